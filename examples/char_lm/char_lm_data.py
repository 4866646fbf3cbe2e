"""Text as bytes: three parts that do not overlap, rows of segments, and a tokenizer whose tokens are the bytes."""

from collections.abc import Iterable
from pathlib import Path

import torch
from causal_lm.stdlib_corpus import stdlib_documents
from causal_lm.token_blocks import DEFAULT_STDLIB_BYTES
from corpora import python_docs
from shared.arguments import UsageError
from shared.own_data import Column, check_columns, check_rows, load_own
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from char_lm.char_lm_arguments import DataArguments

Texts = dict[str, torch.Tensor]
# of text8 and enwik8: the last 5 % to test on, the 5 % before them to look at during training
HELD_OUT_SHARE = 0.05


def load_bytes(data: DataArguments) -> Texts:
    """Return "train", "validation" and "test", uint8 [N] each, cut to the lengths asked for.

    Raises:
        UsageError: the text cannot be had.
        PackageError: the corpus's package cannot be had.
    """
    if data.train_file:
        texts = _split(Path(data.train_file).read_bytes())
    elif data.dataset_name:
        texts = _of_dataset(data)
    elif data.corpus == "python_docs":
        rows = python_docs.load(packages_from=data.packages_from, accept_other_version=data.accept_other_version)
        texts = {name: _joined(row["text"] for row in split) for name, split in rows.items()}
    else:
        train, held_out = stdlib_documents(data.max_train_bytes or DEFAULT_STDLIB_BYTES)
        texts = {"train": _joined(train), "validation": _joined(held_out[::2]), "test": _joined(held_out[1::2])}
    limits = {"train": data.max_train_bytes, "validation": data.max_eval_bytes, "test": data.max_test_bytes}
    return {name: _tensor(text[: limits[name]]) for name, text in texts.items()}


def _of_dataset(data: DataArguments) -> dict[str, bytes]:
    column, where = Column(data.text_column_name, "--text_column_name"), f"--dataset_name {data.dataset_name}"
    texts = {}
    for name, rows in load_own("--dataset_name", data.dataset_name, name=data.dataset_config_name).items():
        check_columns([column], rows.column_names, f"{where}, split {name}")
        check_rows(rows, [column.fault], f"{where}, split {name}")
        texts[name] = _joined(rows[column.name])
    if "train" not in texts:
        raise UsageError(f"{where} has the splits {', '.join(texts)}. Needed: train.")
    return texts if {"validation", "test"} <= texts.keys() else _split(texts["train"])


def _joined(texts: Iterable[str]) -> bytes:
    return "\n".join(texts).encode()


def _split(text: bytes) -> dict[str, bytes]:
    """Return the first 90 %, and 5 % and 5 %.

    >>> {name: len(part) for name, part in _split(bytes(1000)).items()}
    {'train': 900, 'validation': 50, 'test': 50}
    """
    held_out = round(len(text) * HELD_OUT_SHARE)
    train = len(text) - 2 * held_out
    return {"train": text[:train], "validation": text[train : train + held_out], "test": text[train + held_out :]}


def _tensor(text: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)


def byte_tokenizer(max_length: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of 256 tokens: the bytes of UTF-8, by their values, without special tokens.

    >>> byte_tokenizer(8)("né")["input_ids"]
    [110, 195, 169]
    """
    vocabulary = {character: byte for byte, character in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=max_length,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )
