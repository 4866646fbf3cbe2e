"""Text for masked language models of two lengths: the same tokens, in short blocks and in long ones.

A long block is `[CLS]`, the tokens of several short blocks, `[SEP]`; each short block has both of its own. So the same
held-out tokens can be masked, once and for all, for models that read short and long inputs.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import DataCollatorForLanguageModeling, PreTrainedModel, PreTrainedTokenizerBase

from comparison.training import ClockedTrainer

NUM_ENDS = 2
NOT_MASKED = -100
# share of the tokens
MASKED = 0.15


@dataclass(frozen=True)
class Stream:
    """Documents joined, each followed by the separator.

    Attributes:
        ids: token ids, [tokens].
        spelled: the text each token stands for, blanks before it included; "" for a separator.
    """

    ids: Tensor
    spelled: list[str]


def join_texts(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> Stream:
    """Return the tokens of the texts."""
    encoded = tokenizer(list(texts), add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids = chain.from_iterable([*row, tokenizer.sep_token_id] for row in encoded.input_ids)
    spelled = chain.from_iterable([*spell(*pair), ""] for pair in zip(texts, encoded.offset_mapping, strict=True))
    return Stream(torch.tensor(list(ids)), list(spelled))


def spell(text: str, offsets: list[tuple[int, int]]) -> list[str]:
    """Return the text that each token stands for; joined they are the text up to the end of the last token.

    Args:
        offsets: (start, end) of each token in characters.

    >>> spell("An idea", [(0, 2), (3, 5), (5, 7)])
    ['An', ' id', 'ea']
    """
    ends = [end for _, end in offsets]
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


@dataclass(frozen=True)
class BlockShape:
    """How many tokens short and long blocks have.

    Args:
        short: tokens of a short block, both ends included.
        long: tokens that a long block may have.
    """

    short: int
    long: int

    def __post_init__(self) -> None:
        if self.short < NUM_ENDS + 1 or self.segments < 2:
            raise SystemExit(
                f"--max_length {self.long}: must be at least {2 * (self.short - NUM_ENDS) + NUM_ENDS}, two blocks "
                f"of the {self.short} tokens that the source reads."
            )

    @property
    def segments(self) -> int:
        """Short blocks of a long one."""
        return (self.long - NUM_ENDS) // (self.short - NUM_ENDS)

    @property
    def content(self) -> int:
        """Tokens of a long block without its ends."""
        return self.segments * (self.short - NUM_ENDS)


def cut(stream: Stream, content: int, name: str) -> Tensor:
    """Return the tokens in rows, [rows, content]; the short tail is dropped."""
    num_rows = len(stream.ids) // content
    if num_rows == 0:
        raise SystemExit(
            f"The {name} text has {len(stream.ids):,} tokens, fewer than one block of {content:,}: take a smaller "
            "--max_length."
        )
    return stream.ids[: num_rows * content].view(num_rows, content)


def with_ends(rows: Tensor, first: int, last: int) -> Tensor:
    """Return the rows with a token before and a token behind, [rows, content + 2]."""
    return torch.cat((rows.new_full((len(rows), 1), first), rows, rows.new_full((len(rows), 1), last)), 1)


def training_blocks(rows: Tensor, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Return the rows, with their ends, as `input_ids`; `DataCollatorForLanguageModeling` masks them anew each time."""
    return Dataset.from_dict({"input_ids": with_ends(rows, tokenizer.cls_token_id, tokenizer.sep_token_id).tolist()})


@dataclass(frozen=True)
class HeldOutText:
    """Held-out long blocks, masked once.

    Attributes:
        inputs: token ids, some of them masked, [blocks, content].
        labels: what is to be predicted, -100 where nothing is, [blocks, content].
        spelled: the text that the masked tokens of each segment stand for, [blocks][segments].
        ends: ids of the tokens before and behind a block.
    """

    inputs: Tensor
    labels: Tensor
    spelled: list[list[str]]
    ends: tuple[int, int]

    @property
    def segments(self) -> int:
        return len(self.spelled[0])

    @property
    def num_masked(self) -> int:
        return int((self.labels != NOT_MASKED).sum())

    @property
    def references(self) -> list[str]:
        """What the masked tokens spell, a text for each segment of each block in turn."""
        return list(chain.from_iterable(self.spelled))

    def batches(self, as_segments: bool) -> list[tuple[Tensor, Tensor]]:
        """Return inputs and labels of one long block each: as one row, or as its segments, [rows, tokens]."""
        width = self.inputs.shape[1] // (self.segments if as_segments else 1)
        return [
            (with_ends(ids.view(-1, width), *self.ends), with_ends(labels.view(-1, width), NOT_MASKED, NOT_MASKED))
            for ids, labels in zip(self.inputs, self.labels, strict=True)
        ]

    @torch.no_grad()
    def nats(self, model: PreTrainedModel, as_segments: bool, title: str) -> Tensor:
        """Return the negative log-likelihood of the masked tokens, summed by segment, [blocks, segments]."""
        model.eval()
        batches = tqdm(self.batches(as_segments), desc=title)
        return self._by_segment(
            masked_losses(model, ids.to(model.device), labels.to(model.device), "none") for ids, labels in batches
        )

    def nats_of_frequencies(self, texts: Tensor, vocab_size: int) -> Tensor:
        """Return what `nats` does, of one who knows only how frequent each token is in other texts."""
        counts = torch.bincount(texts.flatten(), minlength=vocab_size) + 1
        nats = -(counts / counts.sum()).log()
        return self._by_segment(nats[labels[labels != NOT_MASKED]] for labels in self.labels)

    def _by_segment(self, losses: Iterable[Tensor]) -> Tensor:
        """Return the losses of the masked tokens of each block, summed by segment, [blocks, segments]."""
        sums = torch.zeros(len(self.inputs), self.segments, dtype=torch.float64)
        per_segment = self.inputs.shape[1] // self.segments
        for row, labels, of_block in zip(sums, self.labels, losses, strict=True):
            place = (labels != NOT_MASKED).nonzero().flatten() // per_segment
            row.index_add_(0, place, of_block.double().cpu())
        return sums


def mask_held_out(
    stream: Stream, shape: BlockShape, tokenizer: PreTrainedTokenizerBase, seed: int, max_blocks: int
) -> HeldOutText:
    """Return at most `max_blocks` held-out blocks, evenly spaced; the seed decides what is masked."""
    rows = cut(stream, shape.content, "held-out")
    num_blocks = min(max_blocks, len(rows))
    chosen = [place * len(rows) // num_blocks for place in range(num_blocks)]
    mask = DataCollatorForLanguageModeling(tokenizer, mlm_probability=MASKED, seed=seed)
    mask.create_rng()
    inputs, labels = mask.torch_mask_tokens(rows[chosen].clone())
    width = shape.short - NUM_ENDS
    spelled = []
    for place, row in zip(chosen, labels, strict=True):
        starts = range(0, shape.content, width)
        masked = (row != NOT_MASKED).tolist()
        words = stream.spelled[place * shape.content : (place + 1) * shape.content]
        spelled.append(["".join(words[i] for i in range(start, start + width) if masked[i]) for start in starts])
    return HeldOutText(inputs, labels, spelled, (tokenizer.cls_token_id, tokenizer.sep_token_id))


def masked_losses(model: PreTrainedModel, input_ids: Tensor, labels: Tensor, reduction: str) -> Tensor:
    """Return the cross-entropy at the masked tokens, in nats.

    Only these are projected to the vocabulary, which at 15 % masked saves most of a small model's time and memory.
    Shapes: input_ids and labels [rows, tokens] → [masked tokens], or a number if reduced.
    """
    is_masked = labels != NOT_MASKED

    def keep_masked(module: torch.nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        return (inputs[0][is_masked],)

    hook = model.get_output_embeddings().register_forward_pre_hook(keep_masked)
    try:
        logits = model(input_ids=input_ids).logits
    finally:
        hook.remove()
    return cross_entropy(logits.float(), labels[is_masked], reduction=reduction)


class MaskedTokensTrainer(ClockedTrainer):
    """`Trainer` of masked language models that projects only masked tokens to the vocabulary."""

    def compute_loss(
        self, model: Any, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        if num_items_in_batch is None:
            return masked_losses(model, inputs["input_ids"], inputs["labels"], "mean")
        return masked_losses(model, inputs["input_ids"], inputs["labels"], "sum") / num_items_in_batch
