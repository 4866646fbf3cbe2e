"""Save a model of transformers with the copy of these sources that it was loaded with.

This is for programs that do not import the package; `saving` does it for those that do. Families need neither, because
transformers copies the files of their classes.
"""

from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from hf_efficient_attn.hub.config_saving import before_saving, write_file

# the file of a copy that has the classes of a sparsified model; it imports the other files
SPARSIFIED = "modeling_sparsified"
MARK = "_keeps_code"


def keep_code() -> None:
    """Save the copy with every config that names it. Calling this again changes nothing."""
    before_saving(keep_copy, MARK)


def keep_copy(config: PreTrainedConfig, folder: Path) -> None:
    """Write the files of the copy, unless they are there."""
    main = Path(__file__).with_name(f"{SPARSIFIED}.py")
    if names_copy(config) and not (folder / main.name).exists():
        # `main` comes last: if the disk is full, it is missing, and the next save writes all files again
        for file in (*main.parent.glob("hea_*.py"), main):
            write_file(folder / file.name, file.read_text(encoding="utf-8"))


def names_copy(config: Any) -> bool:
    """Return whether `auto_map` of a config names a copy in its own folder, not one in a repository on the Hub."""
    auto_map = getattr(config, "auto_map", None)
    entry = auto_map.get("AutoConfig") if isinstance(auto_map, dict) else None
    return isinstance(entry, str) and entry.partition(".")[0] == SPARSIFIED
