"""Text as equal blocks of tokens, with the bytes that the held-out blocks stand for.

Bits per byte compares models whatever their tokenizer: loss in nats per token · predicted tokens / (ln 2 · bytes).
"""

import math
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from comparison.python_text import first_bytes, python_texts

END_OF_TEXT = "<|endoftext|>"
TOKENIZER_TRAINING_BYTES = 8_000_000


@dataclass(frozen=True)
class TokenBlocks:
    """The tokenizer, and two datasets of `input_ids`, a block a row."""

    tokenizer: PreTrainedTokenizerFast
    train: Dataset
    validation: Dataset

    @property
    def bits_per_byte_of_one_nat(self) -> float:
        """Multiply a loss in nats per token by this to get bits per byte of the held-out text."""
        # the first token of a block is given, not predicted
        predicted = [token for block in self.validation["input_ids"] for token in block[1:]]
        # a character of a byte-level token stands for one byte, the end of a text for none
        spelled = self.tokenizer.convert_ids_to_tokens(predicted)
        return len(predicted) / (math.log(2) * sum(len(token) for token in spelled if token != END_OF_TEXT))

    def describe(self) -> dict[str, Any]:
        """Return what the text is, and its sizes."""
        block = len(self.train[0]["input_ids"])
        return {
            "source": f"the standard library of Python {platform.python_version()}",
            "vocab_size": len(self.tokenizer),
            "train_tokens": len(self.train) * block,
            "held_out_tokens": len(self.validation) * block,
        }


def prepare_token_blocks(max_train_bytes: int, vocab_size: int, block_size: int, max_eval_blocks: int) -> TokenBlocks:
    """Return the standard library's source in blocks; the held-out ones are evenly spaced over all held-out text."""
    train, held_out = python_texts(max_train_bytes)
    tokenizer = train_tokenizer(train, vocab_size, block_size)
    parts = [cut(texts, tokenizer, block_size) for texts in (train, held_out)]
    if not all(parts):
        raise SystemExit(f"--block_size {block_size}: the text has fewer tokens than one block.")
    num_blocks = min(max_eval_blocks, len(parts[1]))
    spread = [parts[1][index * len(parts[1]) // num_blocks] for index in range(num_blocks)]
    return TokenBlocks(tokenizer, *(Dataset.from_dict({"input_ids": blocks}) for blocks in (parts[0], spread)))


def cut(texts: Sequence[str], tokenizer: PreTrainedTokenizerFast, block_size: int) -> list[list[int]]:
    """Return the texts joined, each followed by the end-of-text token, and cut into blocks; the tail is dropped."""
    ids = chain.from_iterable([*row, tokenizer.eos_token_id] for row in tokenizer(list(texts), verbose=False).input_ids)
    joined = list(ids)
    return [joined[start : start + block_size] for start in range(0, len(joined) - block_size + 1, block_size)]


def train_tokenizer(texts: Sequence[str], vocab_size: int, max_length: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer with one special token, trained on the first 8 MB of the texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(first_bytes(texts, TOKENIZER_TRAINING_BYTES), trainer)
    special = dict.fromkeys(("bos_token", "eos_token", "pad_token"), END_OF_TEXT)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **special,
        model_max_length=max_length,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )
