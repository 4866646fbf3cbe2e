"""Batches for training: segments of long texts, aligned sentences, and texts with masked words and sentences.

Sources: Sukhbaatar et al. (arXiv:1905.07799) and the authors' code, for segments: B contiguous rows, consecutive blocks
of M tokens. Ainslie et al. (arXiv:2004.08483), section 4, for ETC: masked language modelling with whole words, and
contrastive predictive coding.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import BatchEncoding, DataCollatorForSeq2Seq

from hf_efficient_attn.errors import InputError
from hf_efficient_attn.messages import shown
from hf_efficient_attn.models.bp_seq2seq.modeling_bp_seq2seq import INPUTS
from hf_efficient_attn.models.etc_transformer.structured_inputs import structured_inputs
from hf_efficient_attn.models.inputs import whole_numbers

# the name of the sentence numbers → the tokens that they belong to
NUMBERED = dict(zip(INPUTS, ("input_ids", "labels"), strict=True))
# the sentence number of padding, which attends to nothing and to which nothing attends
NO_SENTENCE = -1
# as in BERT, the fractions of predicted tokens that become the mask token or another token; the rest stays unchanged
MASKED_SHARE, OTHER_SHARE = 0.8, 0.1
# at least two parts are masked, because the loss distinguishes each from the others, but at most half of the parts
LEAST_SENTENCES = 2


class TextSegments(Dataset[dict[str, Any]]):
    """Cut a text into `num_rows` contiguous rows, and each row into segments of `segment_tokens` tokens.

    Item i is segment i // num_rows of row i % num_rows. If items are taken in this order, in batches whose size divides
    num_rows, row j of a batch continues row j of the previous batch. `segment_index` tells this to a model that keeps
    past states. With Trainer:

        num_rows = args.per_device_train_batch_size * args.world_size
        args.train_sampling_strategy = "sequential"
        Trainer(model, args, train_dataset=TextSegments(ids, num_rows, 512), data_collator=SegmentCollator())

    Accelerate gives whole batches to the processes in turn, so each process keeps its own rows, and accumulated batches
    are consecutive segments. An item holds `input_ids` [M], `labels` [M] (the next token of each) and `segment_index`.
    No target is lost between two segments of a row, but the last tokens of a row, at most M, are left out.

    >>> segments = TextSegments(list(range(14)), num_rows=2, segment_tokens=3)
    >>> [(item["segment_index"], item["input_ids"].tolist(), item["labels"].tolist()) for item in segments]
    [(0, [0, 1, 2], [1, 2, 3]), (0, [7, 8, 9], [8, 9, 10]), (1, [3, 4, 5], [4, 5, 6]), (1, [10, 11, 12], [11, 12, 13])]

    Args:
        token_ids: the text, [N] integers: a sequence, an array or a tensor, whose dtype is kept.
        num_rows: batch size of all processes together.
        segment_tokens: M, the length of a segment in tokens.

    Raises:
        InputError: token_ids are not one row of integers, or too few for one segment in each row.
    """

    def __init__(self, token_ids: Sequence[int] | torch.Tensor, num_rows: int, segment_tokens: int) -> None:
        ids = torch.as_tensor(token_ids)
        if ids.ndim != 1 or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise InputError(
                f"token_ids has shape {list(ids.shape)} and dtype {ids.dtype}; it must be one row of integers, [N]."
            )
        for name, count in (("num_rows", num_rows), ("segment_tokens", segment_tokens)):
            if count < 1:
                raise InputError(f"{name}={count} must be at least 1.")
        if len(ids) < num_rows * (segment_tokens + 1):
            raise InputError(
                f"{len(ids):,} tokens are too few for {num_rows:,} rows with a segment of {segment_tokens:,} tokens "
                f"and one more token each: {num_rows * (segment_tokens + 1):,} are needed. Give more text, fewer rows "
                "or shorter segments."
            )
        row_tokens = len(ids) // num_rows
        self.num_rows, self.segment_tokens = num_rows, segment_tokens
        self.num_segments = (row_tokens - 1) // segment_tokens
        self.rows = ids[: num_rows * row_tokens].view(num_rows, row_tokens)

    def __len__(self) -> int:
        return self.num_rows * self.num_segments

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"There is no item {index:,}; items are 0 to {len(self) - 1:,}.")
        segment, row = divmod(index, self.num_rows)
        start = segment * self.segment_tokens
        tokens = self.rows[row, start : start + self.segment_tokens + 1].long()
        return {"input_ids": tokens[:-1], "labels": tokens[1:], "segment_index": segment}


class SegmentCollator:
    """Stack items of `TextSegments` into a batch in which every label counts.

    The loss of transformers' causal models shifts `labels` by one, and so drops the last target of each row. The labels
    of an item are already shifted: they become `shift_labels`, which the loss and Trainer's count of tokens use
    unchanged. `labels` are the input_ids, by transformers' convention, for all other code that needs them.

    Shapes: input_ids, labels, shift_labels [B, M]; segment_index [B].

    Raises:
        InputError: the rows of a batch belong to different segments, so a model could not keep past states.
    """

    def __call__(self, items: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        input_ids = torch.stack([item["input_ids"] for item in items])
        batch = {
            "input_ids": input_ids,
            "labels": input_ids,
            "shift_labels": torch.stack([item["labels"] for item in items]),
        }
        # Trainer drops columns that the model's forward does not take: a model without memory gets no segment_index
        if "segment_index" in items[0]:
            segments = [item["segment_index"] for item in items]
            if len(set(segments)) > 1:
                raise InputError(
                    f"The rows of a batch are at different segments, {shown(sorted(set(segments)))}. Set num_rows of "
                    "TextSegments to the batch size of a process (per_device_train_batch_size, or in evaluation "
                    "per_device_eval_batch_size) x number of processes, and keep the items in order "
                    "(train_sampling_strategy='sequential')."
                )
            batch["segment_index"] = torch.tensor(segments)
        return batch


class AlignedSentencesCollator(DataCollatorForSeq2Seq):
    """Pad sources, labels and the numbers of their sentences, like transformers' `DataCollatorForSeq2Seq`.

    An item holds `input_ids`, `labels`, and for each of their tokens the number of its sentence: `sentence_ids` and
    `decoder_sentence_ids`. Sources are padded on the tokenizer's padding side. Labels are padded on the right, because
    a decoder would attend to padding on the left. The sentence of padding is −1. If items have no sentence numbers, the
    batch has none; if sources have no labels, it has only `sentence_ids`. With Trainer:

        collator = hea.training.AlignedSentencesCollator(tokenizer, model=model)
        args = Seq2SeqTrainingArguments(..., predict_with_generate=True)
        Seq2SeqTrainer(model, args, train_dataset=items, eval_dataset=items, data_collator=collator).train()

    Evaluation by `generate` does not use the sentence numbers of the labels: it begins with the first sentence of each
    source, and continues with the next sentence after each `sentence_end_token_id` (a field of the model's config).

    Args:
        tokenizer, model, padding, max_length, pad_to_multiple_of, label_pad_token_id: as in `DataCollatorForSeq2Seq`.

    Raises:
        InputError: numbers are given only for sources or only for labels, or not in every item; they are not integers,
            or not one per token.
    """

    def __call__(self, features: Sequence[dict[str, Any]], return_tensors: str | None = None) -> Any:
        without = [{name: each for name, each in item.items() if name not in INPUTS} for item in features]
        batch = super().__call__(without, return_tensors)
        if self.tokenizer.padding_side == "left" and batch.get("labels") is not None:
            self._pad_labels_behind(batch, [len(item["labels"]) for item in features])
        if not any(item.get(name) is not None for item in features for name in INPUTS):
            return batch
        for name, numbered in NUMBERED.items():
            # labels may be missing, for `generate`
            if any(item.get(each) is not None for item in features for each in (name, numbered)):
                rows = [_numbers(name, numbered, place, item) for place, item in enumerate(features)]
                padded = self._padded(rows, batch[numbered].shape[1], name == INPUTS[0])
                batch[name] = padded if isinstance(batch[numbered], Tensor) else padded.numpy()
        return batch

    def _pad_labels_behind(self, batch: Any, lengths: list[int]) -> None:
        """Move the padding of labels from the left to the right, and recompute `decoder_input_ids` if there are any."""
        is_tensor = isinstance(batch["labels"], Tensor)
        rows = [torch.as_tensor(row).roll(length) for row, length in zip(batch["labels"], lengths, strict=True)]
        labels = torch.stack(rows)
        batch["labels"] = labels if is_tensor else labels.numpy()
        if self.model is not None and "decoder_input_ids" in batch:
            batch["decoder_input_ids"] = self.model.prepare_decoder_input_ids_from_labels(labels=labels)

    def _padded(self, rows: list[list[int]], width: int, is_source: bool) -> Tensor:
        """Return rows of numbers as one padded tensor."""
        padded = torch.full((len(rows), width), NO_SENTENCE)
        for row, numbers in zip(padded, rows, strict=True):
            start = width - len(numbers) if is_source and self.tokenizer.padding_side == "left" else 0
            row[start : start + len(numbers)] = torch.tensor(numbers)
        return padded


def _numbers(name: str, numbered: str, place: int, item: dict[str, Any]) -> list[int]:
    """Return the sentence number of each token of an item; raise InputError if there is not one per token."""
    given, tokens = item.get(name), item.get(numbered)
    if given is None or tokens is None:
        missing = name if given is None else numbered
        raise InputError(
            f"Item {place} of a batch has no {missing}. Give every item its tokens, and {' and '.join(INPUTS)} with "
            "one number for each token; if the sentences are not aligned, leave these numbers out of all items."
        )
    numbers = whole_numbers(given)
    if numbers is None or len(numbers) != len(tokens):
        count = "" if numbers is None else f" ({len(numbers):,} numbers)"
        raise InputError(
            f"Item {place} of a batch has {name}={shown(given)}{count} for {len(tokens):,} tokens of {numbered}. Give "
            "one integer for each token; if you truncate the tokens, also truncate their numbers."
        )
    return numbers


class SentenceMaskingCollator:
    """Mask words and sentences of texts, for masked language modelling of an ETC with `cpc_loss_weight`.

    An item is a mapping with a `text`. If its parts are not its sentences, it also has `parts`: their intervals in
    characters (see `structured_inputs`). If parts belong to contexts without an order, it also has `contexts`: the
    number of each part's context. Every part gets a global token. A fraction `cpc_share` of the parts of a batch, at
    least two if there are at least four, are masked with all their tokens, and marked in `cpc_mask`. A fraction
    `mlm_share` of the other words is predicted, each with all its tokens: 80% of these tokens become the mask token and
    10% another token. Tokens of masked parts are not predicted, because their surroundings tell their topic but not
    their words. Masks are drawn with torch's random number generator, so they differ in every epoch.

    With Trainer (`remove_unused_columns=False` keeps the texts):

        args = TrainingArguments(..., remove_unused_columns=False)
        collator = hea.training.SentenceMaskingCollator(tokenizer, max_length=4096)
        callbacks = [hea.training.AuxiliaryLossCallback()]
        Trainer(model, args, train_dataset=texts, data_collator=collator, callbacks=callbacks)

    Args:
        tokenizer: a fast tokenizer with a mask token.
        max_length: length to which texts are truncated, in tokens; None: no truncation.
        mlm_share: fraction of the words to predict.
        cpc_share: fraction of the parts that are masked; 0: none, and the model needs no `cpc_loss_weight`.
        global_token_id: the `global_token_id` of the model's config; not the tokenizer's padding token.
        cpc_token_id: the token that replaces tokens of masked parts; None: the mask token.
        has_whole_text: whether a first global token stands for the whole text; it is never masked.

    Returns the tensors of `structured_inputs`, `labels` [B, T] with −100 where nothing is predicted and, with
    `cpc_share`, `cpc_mask` [B, G] and `cpc_input_ids` [B, T].

    Raises:
        InputError: the tokenizer has no mask token, fractions are out of range, items have no text, or texts no words.
    """

    def __init__(
        self,
        tokenizer: Any,
        max_length: int | None = None,
        mlm_share: float = 0.15,
        cpc_share: float = 0.1,
        global_token_id: int = 1,
        cpc_token_id: int | None = None,
        has_whole_text: bool = False,
    ) -> None:
        if getattr(tokenizer, "mask_token_id", None) is None:
            raise InputError(
                f"The tokenizer {type(tokenizer).__name__} has no mask token. Add one with "
                "tokenizer.add_special_tokens({'mask_token': '[MASK]'}), and call model.resize_token_embeddings if "
                "the token is new."
            )
        for name, share, is_allowed in (
            ("mlm_share", mlm_share, 0 < mlm_share <= 1),
            ("cpc_share", cpc_share, 0 <= cpc_share <= 0.5),
        ):
            if not is_allowed:
                raise InputError(
                    f"{name}={share}: mlm_share must be above 0 and at most 1, cpc_share at least 0 and at most 0.5."
                )
        self.tokenizer, self.max_length = tokenizer, max_length
        self.mlm_share, self.cpc_share = mlm_share, cpc_share
        self.global_token_id, self.has_whole_text = global_token_id, has_whole_text
        self.cpc_token_id = tokenizer.mask_token_id if cpc_token_id is None else cpc_token_id

    def __call__(self, items: Sequence[Mapping[str, Any]]) -> BatchEncoding:
        batch = self._encoded(items)
        ids, words = batch["input_ids"], _words(batch)
        chosen = self._choose_parts(batch)
        inside = _tokens_of(chosen, batch["long_to_global"])
        if not (words >= 0).any():
            raise InputError(f"The {len(items)} texts of a batch have no word that could be masked. Leave them out.")
        if not (words[~inside] >= 0).any():
            # all words are in masked parts, so no part is masked
            chosen, inside = torch.zeros_like(chosen), torch.zeros_like(inside)
        predicted = self._choose_words(words.masked_fill(inside, -1))
        batch["labels"] = ids.masked_fill(~predicted, -100)
        batch["input_ids"] = self._masked(ids, predicted).masked_fill(inside, self.cpc_token_id)
        if self.cpc_share:
            batch["cpc_mask"], batch["cpc_input_ids"] = chosen.long(), ids
        return batch

    def _encoded(self, items: Sequence[Mapping[str, Any]]) -> BatchEncoding:
        without = next((each for each in items if not isinstance(each, Mapping) or "text" not in each), None)
        if without is not None:
            found = shown(sorted(without)) if isinstance(without, Mapping) else type(without).__name__
            raise InputError(
                f"An item has {found} but no 'text'. Use a dataset with a column 'text', and set "
                "remove_unused_columns=False in TrainingArguments, because Trainer drops columns that the model does "
                "not take."
            )
        parts, contexts = (_of_items(name, items) for name in ("parts", "contexts"))
        options = (self.global_token_id, self.max_length, self.has_whole_text)
        texts = [each["text"] for each in items]
        return structured_inputs(self.tokenizer, texts, parts, *options, contexts=contexts)

    def _choose_parts(self, batch: BatchEncoding) -> Tensor:
        """Return which parts are masked, bool [B, G]."""
        candidates = torch.nonzero((batch["global_mask"] - batch["global_attends_to_all"]) == 1)
        count = min(max(LEAST_SENTENCES, round(self.cpc_share * len(candidates))), len(candidates) // 2)
        chosen = torch.zeros_like(batch["global_mask"], dtype=torch.bool)
        if self.cpc_share and count >= LEAST_SENTENCES:
            rows, numbers = candidates[torch.randperm(len(candidates))[:count]].unbind(1)
            chosen[rows, numbers] = True
        return chosen

    def _choose_words(self, words: Tensor) -> Tensor:
        """Return which tokens are predicted, bool [B, T]: all tokens of randomly chosen words, at least one word.

        words: the number of each token's word in the batch, [B, T]; −1: not to be chosen.
        """
        numbers = words.unique()
        numbers = numbers[numbers >= 0]
        drawn = torch.rand(len(numbers))
        chosen = numbers[drawn <= max(self.mlm_share, drawn.min().item())]
        return torch.isin(words, chosen)

    def _masked(self, ids: Tensor, predicted: Tensor) -> Tensor:
        """Return the tokens, with each predicted token masked, replaced or unchanged."""
        drawn = torch.rand(ids.shape)
        others = torch.randint(len(self.tokenizer), ids.shape)
        masked = ids.masked_fill(predicted & (drawn < MASKED_SHARE), self.tokenizer.mask_token_id)
        return torch.where(predicted & (drawn >= 1 - OTHER_SHARE), others, masked)


def _of_items(name: str, items: Sequence[Mapping[str, Any]]) -> list[Any] | None:
    """Return the values that all items have under a name, or None if no item has one."""
    listed = [each.get(name) for each in items]
    if len({each is None for each in listed}) > 1:
        raise InputError(f"Some items of a batch have {name}, and others do not. Give it to all items or to none.")
    return None if listed[0] is None else listed


def _words(batch: BatchEncoding) -> Tensor:
    """Return the number of each token's word in the batch, [B, T]; −1 for special tokens and padding."""
    words = [[-1 if word is None else word for word in batch.word_ids(row)] for row in range(len(batch["input_ids"]))]
    numbers = torch.tensor(words)
    first = (1 + numbers.max()) * torch.arange(len(numbers)).unsqueeze(1)
    return torch.where(numbers >= 0, numbers + first, -1)


def _tokens_of(chosen: Tensor, links: Tensor) -> Tensor:
    """Return which tokens belong to chosen parts, bool [B, T]; links: the numbers of each token's parts, [B, T, K]."""
    rows = torch.arange(len(links)).view(-1, 1, 1)
    return (chosen[rows, links.clamp(min=0)] & (links >= 0)).any(-1)
