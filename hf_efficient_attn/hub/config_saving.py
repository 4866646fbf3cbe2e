"""Call functions before transformers writes a config into a folder, so that they put code next to it.

A method of transformers is replaced, because models, Trainer, PEFT and conversions all save configs with it, before the
files of a push are listed.
"""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig
from transformers.utils import CONFIG_NAME


def before_saving(act: Callable[[Any, Path], None], mark: str) -> None:
    """Call `act(config, folder)` before any config is saved. A second call with the same `mark` changes nothing."""
    to_json_file: Any = PreTrainedConfig.to_json_file
    if getattr(to_json_file, mark, False):
        return

    # `wraps` also copies the marks of the method that is replaced
    @functools.wraps(to_json_file)
    def saving(config: PreTrainedConfig, json_file_path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        file = Path(json_file_path)
        if file.name == CONFIG_NAME:
            act(config, file.parent)
        to_json_file(config, json_file_path, *args, **kwargs)

    setattr(saving, mark, True)
    PreTrainedConfig.to_json_file = saving  # type: ignore[method-assign,assignment]


def write_file(file: Path, text: str) -> None:
    """Write a file atomically, because others may be reading it; do nothing if it already has this text.

    A link into a cache is replaced, and the file in the cache stays as it is.
    """
    if file.is_file() and file.read_text(encoding="utf-8") == text:
        return
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, file)
    finally:
        # it still exists if writing has failed, for example because the disk is full
        partial.unlink(missing_ok=True)
