"""The tokenizer of a source, for inputs as long as the converted model reads."""

from typing import Any

from transformers import AutoTokenizer
from transformers.utils import cached_file

from hf_efficient_attn.convert.hub import why_not_from_hub
from hf_efficient_attn.convert.reading import reading
from hf_efficient_attn.errors import CheckpointError

# every checkpoint that has a tokenizer has one of these; without any, transformers makes up an empty tokenizer
TOKENIZER_FILES = (
    "tokenizer.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tokenizer.model",
    "source.spm",
    "tokenizer_config.json",
)


def load_tokenizer(src: str | None, num_positions: int | None) -> Any:
    """Return the source's tokenizer for inputs of so many tokens (None: any number), or None if it has none.

    Raises:
        CheckpointError: it has one that cannot be read.
    """
    if src is None or not _has_tokenizer(src):
        return None
    with reading(src, f"The tokenizer in {src}", "Copy or download it again, or take its files away."):
        tokenizer = AutoTokenizer.from_pretrained(src)
    if num_positions is not None:
        tokenizer.model_max_length = num_positions
    return tokenizer


def _has_tokenizer(src: str) -> bool:
    return any(_has_file(src, name) for name in TOKENIZER_FILES)


def _has_file(src: str, name: str) -> bool:
    try:
        return cached_file(src, name) is not None
    except OSError as error:
        answer = why_not_from_hub(src, error)
        if answer is not None:
            raise CheckpointError(answer) from error
        return False
