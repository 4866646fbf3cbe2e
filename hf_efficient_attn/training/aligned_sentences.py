"""Batches of documents and their translations, sentence by sentence, for `bp_seq2seq`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DataCollatorForSeq2Seq

from hf_efficient_attn.errors import InputError
from hf_efficient_attn.messages import shown
from hf_efficient_attn.models.bp_seq2seq.sentences import INPUTS
from hf_efficient_attn.models.inputs.whole_numbers import whole_numbers

# what each of them numbers
NUMBERED = dict(zip(INPUTS, ("input_ids", "labels"), strict=True))
# the number of padding, which reads nothing and is read by nothing
NO_SENTENCE = -1


class AlignedSentencesCollator(DataCollatorForSeq2Seq):
    """Pad sources and labels as transformers' `DataCollatorForSeq2Seq`, and the numbers of their sentences with them.

    An item holds `input_ids`, `labels`, and for each of their tokens the number of its sentence: `sentence_ids` and
    `decoder_sentence_ids`. Sources are padded on the side of the tokenizer, labels behind, since a decoder would read
    padding before them; padding is of sentence −1. Of items without numbers the batch has none, of sources without
    labels it has `sentence_ids`. With Trainer:

        collator = hea.AlignedSentencesCollator(tokenizer, model=model)
        args = Seq2SeqTrainingArguments(..., predict_with_generate=True)
        Seq2SeqTrainer(model, args, train_dataset=items, eval_dataset=items, data_collator=collator).train()

    In evaluation by `generate`, numbers of the labels are not read: it begins with the first sentence of each source,
    and goes on behind each `sentence_end_token_id` of the model's config.

    Args:
        tokenizer, model, padding, max_length, pad_to_multiple_of, label_pad_token_id: as in `DataCollatorForSeq2Seq`.

    Raises:
        InputError: numbers of one side alone, or not in every item; that are no integers, or not one for each token.
    """

    def __call__(self, features: Sequence[dict[str, Any]], return_tensors: str | None = None) -> Any:
        without = [{name: each for name, each in item.items() if name not in INPUTS} for item in features]
        batch = super().__call__(without, return_tensors)
        if self.tokenizer.padding_side == "left" and batch.get("labels") is not None:
            self._pad_labels_behind(batch, [len(item["labels"]) for item in features])
        if not any(item.get(name) is not None for item in features for name in INPUTS):
            return batch
        for name, numbered in NUMBERED.items():
            # sources alone, for `generate`
            if any(item.get(each) is not None for item in features for each in (name, numbered)):
                rows = [_numbers(name, numbered, place, item) for place, item in enumerate(features)]
                padded = self._padded(rows, batch[numbered].shape[1], name == INPUTS[0])
                batch[name] = padded if isinstance(batch[numbered], Tensor) else padded.numpy()
        return batch

    def _pad_labels_behind(self, batch: Any, lengths: list[int]) -> None:
        """Move the padding of labels that is before them, and make the decoder's input anew where there is one."""
        is_tensor = isinstance(batch["labels"], Tensor)
        rows = [torch.as_tensor(row).roll(length) for row, length in zip(batch["labels"], lengths, strict=True)]
        labels = torch.stack(rows)
        batch["labels"] = labels if is_tensor else labels.numpy()
        if self.model is not None and "decoder_input_ids" in batch:
            batch["decoder_input_ids"] = self.model.prepare_decoder_input_ids_from_labels(labels=labels)

    def _padded(self, rows: list[list[int]], width: int, is_source: bool) -> Tensor:
        """Return rows of numbers as one tensor."""
        padded = torch.full((len(rows), width), NO_SENTENCE)
        for row, numbers in zip(padded, rows, strict=True):
            start = width - len(numbers) if is_source and self.tokenizer.padding_side == "left" else 0
            row[start : start + len(numbers)] = torch.tensor(numbers)
        return padded


def _numbers(name: str, numbered: str, place: int, item: dict[str, Any]) -> list[int]:
    """Return the numbers of the sentences of an item's tokens; raise InputError if there is not one for each."""
    given, tokens = item.get(name), item.get(numbered)
    if given is None or tokens is None:
        missing = name if given is None else numbered
        raise InputError(
            f"Item {place} of a batch has no {missing}. Give every item its tokens, and {' and '.join(INPUTS)}, one "
            "number for each token, or no item these numbers, where sentences are not aligned."
        )
    numbers = whole_numbers(given)
    if numbers is None or len(numbers) != len(tokens):
        count = "" if numbers is None else f", which are {len(numbers):,}"
        raise InputError(
            f"Item {place} of a batch has {name}={shown(given)}{count}, for {len(tokens):,} tokens of {numbered}. Give "
            "one integer for each token; what cuts the tokens must cut their numbers, too."
        )
    return numbers


__all__ = ["AlignedSentencesCollator"]
