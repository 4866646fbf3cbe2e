"""A config that needs a stub, or has a copy of the sources, is saved with it and an `auto_map` of its classes."""

import re
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_efficient_attn.hub.config_saving import before_saving, write_file
from hf_efficient_attn.hub.copies import copy_files, copy_map, has_copy
from hf_efficient_attn.hub.stub import ENTRY, FILE, HEAD, MODULE, stub_classes, stub_text
from hf_efficient_attn.models.config.library import LibraryConfig

MARK = "_writes_stubs"
CHECKPOINT = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-\d+")


def write_stubs() -> None:
    """Have all configs that need a stub saved with it; may be called again."""
    before_saving(place_code, MARK)


def name_classes(config: Any) -> None:
    """Write the classes of the stub or the copy into `config.auto_map`, or remove them; entries of other code stay."""
    if has_copy(config):
        config.auto_map = {**config.auto_map, **copy_map(config)}
        return
    found = getattr(config, "auto_map", None)
    # a damaged one has said nothing
    known = found if isinstance(found, dict) else {}
    others = {name: entry for name, entry in known.items() if not (isinstance(entry, str) and ENTRY.fullmatch(entry))}
    stub = {name: f"{MODULE}.{cls}" for name, cls in stub_classes(config).items()}
    if stub or others or isinstance(config, LibraryConfig):
        config.auto_map = {**stub, **others}
    elif found is not None:
        del config.auto_map


def place_code(config: PreTrainedConfig, folder: Path) -> None:
    """Write the stub or the copy that a config needs into its folder, or remove a stub that it does not need."""
    name_classes(config)
    files = code_files(config)
    # Trainer pushes a checkpoint by copies of its config and weights beside its folder
    for place in (folder, folder.parent) if CHECKPOINT.fullmatch(folder.name) else (folder,):
        for name, text in files.items():
            write_file(place / name, text)
    stub = folder / FILE
    if FILE not in files and stub.is_file() and stub.read_text(encoding="utf-8").startswith(HEAD):
        stub.unlink()


def code_files(config: PreTrainedConfig) -> dict[str, str]:
    """Return the files of code that are saved with a config, by name."""
    if has_copy(config):
        return copy_files(config)
    return {FILE: stub_text(config)} if stub_classes(config) else {}
