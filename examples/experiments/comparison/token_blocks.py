"""Text in blocks of equal numbers of tokens, with the number of bytes in the held-out blocks.

Bits per byte compare models with different tokenizers: loss in nats per token · predicted tokens / (ln 2 · bytes).
"""

import math
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerFast

from comparison.python_text import python_texts
from hf_efficient_attn.bench.text_blocks import END_OF_TEXT, cut, read_split, train_tokenizer


@dataclass(frozen=True)
class TokenBlocks:
    """The source of the text, the tokenizer, and two datasets of `input_ids`, one block per row."""

    source: str
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
            "source": self.source,
            "vocab_size": len(self.tokenizer),
            "train_tokens": len(self.train) * block,
            "held_out_tokens": len(self.validation) * block,
        }


def prepare_token_blocks(
    train_file: str | None, max_train_bytes: int, vocab_size: int, block_size: int, max_eval_blocks: int
) -> TokenBlocks:
    """Return a text in blocks; the held-out ones are evenly spaced over all held-out text.

    train_file: its last tenth is held out. None: the source of Python's standard library, with some files held out.
    """
    if train_file:
        (text,), held_out = read_split([Path(train_file)])
        source, train = Path(train_file).name, [text.encode()[:max_train_bytes].decode(errors="ignore")]
    else:
        source = f"the standard library of Python {platform.python_version()}"
        train, held_out = python_texts(max_train_bytes)
    tokenizer = train_tokenizer(train, vocab_size, block_size)
    parts = [cut(texts, tokenizer, block_size) for texts in (train, held_out)]
    if not all(parts):
        raise SystemExit(f"--block_size {block_size}: the text has fewer tokens than one block.")
    num_blocks = min(max_eval_blocks, len(parts[1]))
    spread = [parts[1][index * len(parts[1]) // num_blocks] for index in range(num_blocks)]
    return TokenBlocks(source, tokenizer, *(Dataset.from_dict({"input_ids": blocks}) for blocks in (parts[0], spread)))
