"""Read saved configs; errors of transformers become an InputError that names the path."""

from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike

from transformers import AutoConfig, PreTrainedConfig

from hf_efficient_attn.errors import EfficientAttentionError, InputError
from hf_efficient_attn.messages import cut


def load_config(path: str | PathLike[str]) -> PreTrainedConfig:
    """Return the config in a folder, or in a file.

    Raises:
        EfficientAttentionError: transformers or this package cannot read it.
    """
    with readable(path):
        config: PreTrainedConfig = AutoConfig.from_pretrained(path)
    return config


@contextmanager
def readable(path: str | PathLike[str]) -> Iterator[None]:
    """Turn errors that transformers raises while it reads `path` into InputError; errors of this package pass."""
    try:
        yield
    except EfficientAttentionError:
        raise
    # transformers, and classes of configs and weights, raise errors of any type
    except Exception as error:
        what = f"{type(error).__name__}: {cut(str(error), 200, 60)}"
        raise InputError(f"transformers cannot read {path} ({what}).") from error
