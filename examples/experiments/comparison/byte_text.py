"""Text as bytes: three parts that do not overlap, and a tokenizer whose tokens are the bytes."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from comparison.python_text import python_texts

HELD_OUT = 0.05


def load_bytes(
    train_file: str | None, max_train_bytes: int, max_eval_bytes: int, max_test_bytes: int, least_bytes: int
) -> dict[str, torch.Tensor]:
    """Return "train", "validation" and "test", uint8 [N] each, from a file, or else from the standard library.

    The last 5 % of a file are the test text, and the 5 % before them the validation text, as for text8 and enwik8; each
    must have `least_bytes`.
    """
    if train_file:
        if not Path(train_file).is_file():
            raise SystemExit(f"--train_file {train_file}: no such file.")
        text = Path(train_file).read_bytes()
        held_out = round(len(text) * HELD_OUT)
        if held_out < least_bytes:
            raise SystemExit(
                f"--train_file {train_file} has {len(text):,} bytes, of which {HELD_OUT:.0%} are for validation and as "
                f"many for the test: {least_bytes / HELD_OUT:,.0f} are needed, or a smaller --batch_size or "
                "--segment_bytes."
            )
        ends = (0, len(text) - 2 * held_out, len(text) - held_out, len(text))
        parts = [text[start:end] for start, end in zip(ends, ends[1:], strict=False)]
    else:
        train, others = python_texts(max_train_bytes)
        parts = ["\n".join(texts).encode() for texts in (train, others[::2], others[1::2])]
        # line ends between files come on top of the limit
        max_train_bytes = len(parts[0])
    limits = (max_train_bytes, max_eval_bytes, max_test_bytes)
    cut = [torch.tensor(list(part[:limit]), dtype=torch.uint8) for part, limit in zip(parts, limits, strict=True)]
    return dict(zip(("train", "validation", "test"), cut, strict=True))


def byte_tokenizer(max_length: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose token ids are the bytes of a text.

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
