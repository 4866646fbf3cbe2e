"""Text to equal blocks of tokens, with the number of bytes each held-out block stands for.

Bits per byte compares models whatever their tokenizer: loss in nats per token · predicted tokens / (ln 2 · bytes). It
is exact here because every byte of the held-out text belongs to exactly one token (a token owns the text from the end
of the token before it to its own end), and the bytes of a block are those of its predicted tokens, all but the first.
"""

import json
import math
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from shared.arguments import UsageError
from shared.own_data import Column, check_columns, check_rows, load_own
from shared.tokenizer_text import first_bytes
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from causal_lm.clm_arguments import DataTrainingArguments
from causal_lm.stdlib_corpus import stdlib_documents

END_OF_TEXT = "<|endoftext|>"
DEFAULT_STDLIB_BYTES = 8_000_000


@dataclass(frozen=True)
class TokenBlocks:
    """The tokenizer and two datasets: `input_ids`, `block_size` a row, and in `validation` also `num_bytes`."""

    tokenizer: PreTrainedTokenizerBase
    train: Dataset
    validation: Dataset

    @property
    def block_size(self) -> int:
        return len(self.train[0]["input_ids"])

    @property
    def bits_per_byte_of_one_nat(self) -> float:
        """Multiply a loss in nats per token by this to get bits per byte of the held-out text."""
        predicted_tokens = len(self.validation) * (self.block_size - 1)
        return predicted_tokens / (math.log(2) * sum(self.validation["num_bytes"]))

    def describe(self) -> dict[str, int]:
        """Return the sizes that a report needs."""
        return {
            "vocab_size": len(self.tokenizer),
            "block_size_tokens": self.block_size,
            "train_tokens": len(self.train) * self.block_size,
            "held_out_tokens": len(self.validation) * self.block_size,
            "held_out_bytes_predicted": sum(self.validation["num_bytes"]),
        }


def prepare_token_blocks(
    data: DataTrainingArguments, tokenizer_name: str | None, vocab_size: int, folder: Path
) -> TokenBlocks:
    """Return the token blocks of these arguments: from `folder` if it holds them, else made and kept there."""
    settings = {**data.source_settings(), "tokenizer_name": tokenizer_name, "vocab_size": vocab_size}
    settings_file = folder / "settings.json"
    if not settings_file.is_file() or json.loads(settings_file.read_text()) != settings:
        shutil.rmtree(folder, ignore_errors=True)
        blocks = _make_token_blocks(data, tokenizer_name, vocab_size)
        blocks.tokenizer.save_pretrained(folder / "tokenizer")
        blocks.train.save_to_disk(folder / "train")
        blocks.validation.save_to_disk(folder / "validation")
        settings_file.write_text(json.dumps(settings, indent=2) + "\n")  # last: marks the folder complete
    return TokenBlocks(
        tokenizer=AutoTokenizer.from_pretrained(folder / "tokenizer"),
        train=Dataset.load_from_disk(str(folder / "train")),
        validation=Dataset.load_from_disk(str(folder / "validation")),
    )


def _make_token_blocks(data: DataTrainingArguments, tokenizer_name: str | None, vocab_size: int) -> TokenBlocks:
    train, validation, text_column = _load_texts(data)
    if data.max_train_samples is not None:
        train = train.select(range(min(data.max_train_samples, len(train))))
    if tokenizer_name:
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_name)
        if not tokenizer.is_fast:
            raise UsageError(
                f"--tokenizer_name {tokenizer_name}: bytes are counted by offsets, which need a fast tokenizer."
            )
    else:
        tokenizer = train_tokenizer((row[text_column] for row in train), vocab_size, data.block_size)
    ends_with_row = not data.reads_lines
    train_blocks = _cut(train, text_column, tokenizer, data.block_size, ends_with_row).remove_columns("num_bytes")
    validation_blocks = _cut(validation, text_column, tokenizer, data.block_size, ends_with_row)
    _check_not_empty({"training": train_blocks, "held-out": validation_blocks}, data.block_size)
    return TokenBlocks(tokenizer, train_blocks, _spread(validation_blocks, data.max_eval_samples))


def _check_not_empty(blocks: dict[str, Dataset], block_size: int) -> None:
    for name, dataset in blocks.items():
        if not len(dataset):
            raise UsageError(
                f"The {name} text has fewer tokens than one block of --block_size {block_size}. "
                "Give more text, or a smaller --block_size."
            )


def _load_texts(data: DataTrainingArguments) -> tuple[Dataset, Dataset, str]:
    """Return the training rows, the held-out rows and the name of their text column."""
    if data.uses_stdlib:
        train_texts, held_out_texts = stdlib_documents(data.max_train_bytes or DEFAULT_STDLIB_BYTES)
        return Dataset.from_dict({"text": train_texts}), Dataset.from_dict({"text": held_out_texts}), "text"
    splits = _load_splits(data)
    names = splits["train"].column_names
    column = Column(data.text_column_name or ("text" if "text" in names else names[0]), "--text_column_name")
    for name, rows in splits.items():
        where = Path(getattr(data, f"{name}_file")).name if data.train_file else f"{data.dataset_name}, split {name}"
        check_columns([column], rows.column_names, where)
        check_rows(({column.name: text} for text in rows[column.name]), [column.fault], where)
    train, validation = splits["train"], splits.get("validation")
    if validation is None:
        num_held_out = round(len(train) * data.validation_split_percentage / 100)
        validation, train = train.select(range(num_held_out)), train.select(range(num_held_out, len(train)))
    if data.max_train_bytes is not None:
        train = train.select(range(_rows_within(train, column.name, data.max_train_bytes)))
    return train, validation, column.name


def _load_splits(data: DataTrainingArguments) -> dict[str, Dataset]:
    """Return "train" and, where there is one, "validation"."""
    if data.train_file:
        files = {"train": data.train_file, "validation": data.validation_file}
        return {name: load_own(f"--{name}_file", file, split="train") for name, file in files.items() if file}
    splits = load_own("--dataset_name", data.dataset_name, name=data.dataset_config_name)
    if "train" not in splits:
        raise UsageError(f"--dataset_name {data.dataset_name} has no split train. Splits: {', '.join(splits)}.")
    return {name: splits[name] for name in ("train", "validation") if name in splits}


def _rows_within(rows: Dataset, text_column: str, max_bytes: int) -> int:
    num_bytes = 0
    for index, row in enumerate(rows):
        num_bytes += len(row[text_column].encode())
        if num_bytes > max_bytes:
            return index
    return len(rows)


def train_tokenizer(texts: Iterable[str], vocab_size: int, max_length: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer of `vocab_size` tokens, trained on the first 8 MB of `texts`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(first_bytes(texts), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=max_length,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )


def _cut(
    rows: Dataset, text_column: str, tokenizer: PreTrainedTokenizerBase, block_size: int, ends_with_row: bool
) -> Dataset:
    """Return the rows joined, each followed by the end-of-text token if `ends_with_row`, and cut into blocks."""
    cut_batch = _batch_cutter(text_column, tokenizer, block_size, ends_with_row)
    blocks = rows.map(cut_batch, batched=True, remove_columns=rows.column_names, desc=f"Blocks of {block_size} tokens")
    # without a single block, `map` returns the rows as they were
    return blocks if "num_bytes" in blocks.column_names else Dataset.from_dict({"input_ids": [], "num_bytes": []})


def _batch_cutter(
    text_column: str, tokenizer: PreTrainedTokenizerBase, block_size: int, ends_with_row: bool
) -> Callable[[dict[str, list[str]]], dict[str, Any]]:
    end = [tokenizer.eos_token_id] if ends_with_row and tokenizer.eos_token_id is not None else []

    def cut_batch(batch: dict[str, list[str]]) -> dict[str, Any]:
        texts = [text for text in batch[text_column] if text]
        options = {"add_special_tokens": False, "return_offsets_mapping": True, "verbose": False}
        encoded = tokenizer(texts, **options) if texts else {}
        ids = chain.from_iterable(row + end for row in encoded.get("input_ids", []))
        offsets = encoded.get("offset_mapping", [])
        lengths = (bytes_of_tokens(*pair) + [0] * len(end) for pair in zip(texts, offsets, strict=True))
        id_blocks = _as_blocks(ids, block_size)
        byte_blocks = _as_blocks(chain.from_iterable(lengths), block_size)
        # the first token of a block is given, not predicted
        return {"input_ids": id_blocks.tolist(), "num_bytes": byte_blocks[:, 1:].sum(axis=1).tolist()}

    return cut_batch


def bytes_of_tokens(text: str, offsets: list[tuple[int, int]]) -> list[int]:
    """Return the UTF-8 bytes each token stands for; they add up to those of `text`.

    Args:
        offsets: (start, end) of each token in characters.

    >>> bytes_of_tokens("naïve  idea", [(0, 5), (7, 11)])  # ï is two bytes; the spaces go to the second token
    [6, 6]
    """
    if not offsets:
        return []
    ends = np.maximum.accumulate(np.array(offsets)[:, 1])
    ends[-1] = len(text)
    bytes_before = np.cumsum([0] + [len(character.encode()) for character in text])
    return np.diff(bytes_before[ends], prepend=0).tolist()


def _as_blocks(values: Iterable[int], block_size: int) -> np.ndarray:
    """Return the values as [number of blocks, block_size]; the short tail is dropped."""
    array = np.fromiter(values, dtype=np.int64)
    return array[: len(array) // block_size * block_size].reshape(-1, block_size)


def _spread(blocks: Dataset, max_blocks: int | None) -> Dataset:
    """Return at most `max_blocks` blocks, evenly spaced, so that every held-out file has its share."""
    if max_blocks is None or len(blocks) <= max_blocks:
        return blocks
    return blocks.select([index * len(blocks) // max_blocks for index in range(max_blocks)])
