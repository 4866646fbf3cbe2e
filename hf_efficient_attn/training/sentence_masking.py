"""Texts as batches on which an ETC is pre-trained: some words are masked, and some sentences are masked whole.

Source: Ainslie et al. (arXiv:2004.08483), section 4: masked language modelling with whole words, and contrastive
predictive coding.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import BatchEncoding

from hf_efficient_attn.errors import InputError
from hf_efficient_attn.messages import shown
from hf_efficient_attn.models.etc_transformer.structured_text import structured_inputs

# what a word that is to be predicted becomes, as in BERT: the mask token, another token, or itself
MASKED_SHARE, OTHER_SHARE = 0.8, 0.1
# a sentence needs others to be told apart from, and the batch something that is left to read
LEAST_SENTENCES = 2


class SentenceMaskingCollator:
    """Make of texts a batch for the head of masked tokens of an ETC with `cpc_loss_weight`.

    An item is a mapping with a `text` and, if its parts are not its sentences, `parts`: their intervals in characters
    (see `structured_inputs`); if parts are of contexts that have no order, also `contexts`, the number of that of each.
    Every part gets a global token. `cpc_share` of the parts of a batch, at least two of four, are masked with all their
    tokens, and named in `cpc_mask`. `mlm_share` of the other words are to be predicted, each with all its tokens; of
    these 80% become the mask token and 10% another token. Tokens of masked parts are not predicted: their surroundings
    say what they are about, not which words they are. Masks are drawn by torch's random numbers, anew in every epoch.

    With Trainer, which otherwise drops the texts:

        args = TrainingArguments(..., remove_unused_columns=False)
        collator = hea.SentenceMaskingCollator(tokenizer, max_length=4096)
        Trainer(model, args, train_dataset=texts, data_collator=collator, callbacks=[hea.AuxiliaryLossCallback()])

    Args:
        tokenizer: a fast one with a mask token.
        max_length: tokens at which texts are cut; None: nowhere.
        mlm_share: of the words.
        cpc_share: of the parts; 0: no part is masked, and the model needs no `cpc_loss_weight`.
        global_token_id: as in the model's config; not the tokenizer's padding.
        cpc_token_id: what tokens of masked parts become; None: the mask token.
        has_whole_text: whether a first global token stands for the whole text; it is never masked.

    Returns the tensors of `structured_inputs`, `labels` [B, T] with −100 where nothing is predicted and, with
    `cpc_share`, `cpc_mask` [B, G] and `cpc_input_ids` [B, T].

    Raises:
        InputError: a tokenizer without mask token, shares that are none, items without text, or texts without words.
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
                f"The tokenizer {type(tokenizer).__name__} has no mask token. Add one: "
                "tokenizer.add_special_tokens({'mask_token': '[MASK]'}), and model.resize_token_embeddings if it is "
                "new."
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
            # the masked parts are all that there is
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
                f"An item has {found} and no text. Give a dataset with a column 'text', and remove_unused_columns="
                "False in TrainingArguments, since Trainer drops what no model reads."
            )
        parts, contexts = (_of_items(name, items) for name in ("parts", "contexts"))
        options = (self.global_token_id, self.max_length, self.has_whole_text)
        texts = [each["text"] for each in items]
        return structured_inputs(self.tokenizer, texts, parts, *options, contexts=contexts)

    def _choose_parts(self, batch: BatchEncoding) -> Tensor:
        """Return which parts are masked, bool [B, G]."""
        candidates = torch.nonzero((batch["global_mask"] - batch["global_reads_all"]) == 1)
        count = min(max(LEAST_SENTENCES, round(self.cpc_share * len(candidates))), len(candidates) // 2)
        chosen = torch.zeros_like(batch["global_mask"], dtype=torch.bool)
        if self.cpc_share and count >= LEAST_SENTENCES:
            rows, numbers = candidates[torch.randperm(len(candidates))[:count]].unbind(1)
            chosen[rows, numbers] = True
        return chosen

    def _choose_words(self, words: Tensor) -> Tensor:
        """Return which tokens are predicted, bool [B, T]: those of at least one word.

        words: the number of each token's word in its batch, [B, T]; −1: it may not be chosen.
        """
        numbers = words.unique()
        numbers = numbers[numbers >= 0]
        drawn = torch.rand(len(numbers))
        chosen = numbers[drawn <= max(self.mlm_share, drawn.min().item())]
        return torch.isin(words, chosen)

    def _masked(self, ids: Tensor, predicted: Tensor) -> Tensor:
        """Return the tokens of which those that are predicted are masked, replaced or left as they are."""
        drawn = torch.rand(ids.shape)
        others = torch.randint(len(self.tokenizer), ids.shape)
        masked = ids.masked_fill(predicted & (drawn < MASKED_SHARE), self.tokenizer.mask_token_id)
        return torch.where(predicted & (drawn >= 1 - OTHER_SHARE), others, masked)


def _of_items(name: str, items: Sequence[Mapping[str, Any]]) -> list[Any] | None:
    """Return what all items have under a name, or None if none of them has anything."""
    listed = [each.get(name) for each in items]
    if len({each is None for each in listed}) > 1:
        raise InputError(f"Some items of a batch have {name}, and others have none. Give all of them, or none.")
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
