"""Text as equal blocks of tokens: a tokenizer, blocks to train on, and blocks that are held out."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hf_efficient_attn.errors import InputError

END_OF_TEXT, MASK = "<|endoftext|>", "<|mask|>"
TOKENIZER_TRAINING_BYTES = 8_000_000
# share of each file, at its end
HELD_OUT = 0.1
# two to choose a learning rate and two for the test: a standard error needs at least two
LEAST_HELD_OUT_BLOCKS = 4


@dataclass(frozen=True)
class TextBlocks:
    """Blocks [blocks, tokens] of a text.

    Attributes:
        validation, test: held-out blocks, alternating, evenly spaced over all held-out text.
        bytes_per_token: UTF-8 bytes per token of the held-out text.
    """

    tokenizer: PreTrainedTokenizerBase
    train: Tensor
    validation: Tensor
    test: Tensor
    bytes_per_token: float


def read_blocks(
    files: Sequence[Path],
    tokens: int,
    least_train_blocks: int,
    most_held_out_blocks: int,
    vocab_size: int,
    tokenizer_folder: str | None = None,
) -> TextBlocks:
    """Return the text of files as blocks; the last tenth of every file is held out.

    Args:
        files: text files in UTF-8; invalid bytes are replaced.
        tokens: length of a block.
        vocab_size: vocabulary size of the byte-level BPE that is trained on the training text.
        tokenizer_folder: folder of a saved tokenizer to use instead.

    Raises:
        InputError: the text is too short.
        OSError: a file or the tokenizer cannot be read.
    """
    train, held_out = read_split(files)
    if not any(train):
        raise InputError(f"{', '.join(map(str, files))}: there is no text. Give files with text.")
    if tokenizer_folder is None:
        tokenizer: PreTrainedTokenizerBase = train_tokenizer(train, vocab_size, tokens, MASK)
    else:
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    blocks, held_out_blocks = (cut(part, tokenizer, tokens) for part in (train, held_out))
    if len(blocks) < least_train_blocks or len(held_out_blocks) < LEAST_HELD_OUT_BLOCKS:
        smaller = "--max-length or --batch-size" if len(blocks) < least_train_blocks else "--max-length"
        raise InputError(
            f"The text is too short. It has {len(blocks)} blocks of {tokens:,} tokens for training, and at least "
            f"{least_train_blocks} are needed. Its last tenth, which is held out, has {len(held_out_blocks)}, and at "
            f"least {LEAST_HELD_OUT_BLOCKS} are needed. Give more text or a smaller {smaller}."
        )
    num = min(most_held_out_blocks, len(held_out_blocks))
    spread = torch.tensor([held_out_blocks[index * len(held_out_blocks) // num] for index in range(num)])
    num_bytes = sum(len(text.encode()) for text in held_out)
    num_tokens = sum(len(ids) for ids in tokenizer(held_out, verbose=False).input_ids)
    return TextBlocks(tokenizer, torch.tensor(blocks), spread[::2], spread[1::2], num_bytes / num_tokens)


def read_split(files: Sequence[Path]) -> tuple[list[str], list[str]]:
    """Return the texts of files without their last tenths, and these last tenths, which are held out."""
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    ends = [round(len(text) * (1 - HELD_OUT)) for text in texts]
    pairs = list(zip(texts, ends, strict=True))
    return [text[:end] for text, end in pairs], [text[end:] for text, end in pairs]


def cut(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, block_size: int) -> list[list[int]]:
    """Return the texts joined, each followed by the end-of-text token, and cut into blocks; the tail is dropped."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    joined = list(chain.from_iterable([*row, *end] for row in tokenizer(list(texts), verbose=False).input_ids))
    return [joined[start : start + block_size] for start in range(0, len(joined) - block_size + 1, block_size)]


def train_tokenizer(
    texts: Sequence[str], vocab_size: int, max_length: int, mask_token: str | None = None
) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer, trained on the first 8 MB of the texts.

    Its special tokens are `END_OF_TEXT` and, if given, `mask_token`.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    mask = {} if mask_token is None else {"mask_token": mask_token}
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, *mask.values()],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(first_bytes(texts, TOKENIZER_TRAINING_BYTES), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **dict.fromkeys(("bos_token", "eos_token", "pad_token"), END_OF_TEXT),
        **mask,
        model_max_length=max_length,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )


def first_bytes(texts: Iterable[str], num_bytes: int) -> Iterator[str]:
    """Yield texts until together they have more than `num_bytes` bytes."""
    for text in texts:
        if num_bytes < 0:
            return
        yield text
        num_bytes -= len(text.encode())
