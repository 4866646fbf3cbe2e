"""A model of transformers that was loaded with a copy of these sources is saved with it again, without this package.

`saving` does this where the package is imported. Families need neither: transformers copies the files of their classes.
"""

from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from hf_efficient_attn.hub.config_saving import before_saving, write_file

# the file of a copy in which transformers finds the classes of a sparsified model, and the others that it imports
SPARSIFIED = "modeling_sparsified"
MARK = "_keeps_code"


def keep_code() -> None:
    """Have configs that name the copy beside them saved with it; may be called again."""
    before_saving(keep_copy, MARK)


def keep_copy(config: PreTrainedConfig, folder: Path) -> None:
    """Write the files of the copy, unless they are there."""
    main = Path(__file__).with_name(f"{SPARSIFIED}.py")
    if names_copy(config) and not (folder / main.name).exists():
        # where the disk is full, the last file is not there, and the next save writes all
        for file in (*main.parent.glob("hea_*.py"), main):
            write_file(folder / file.name, file.read_text(encoding="utf-8"))


def names_copy(config: Any) -> bool:
    """Return whether the code of a config is a copy beside it; that of a repository on the Hub is found by its name."""
    auto_map = getattr(config, "auto_map", None)
    entry = auto_map.get("AutoConfig") if isinstance(auto_map, dict) else None
    return isinstance(entry, str) and entry.partition(".")[0] == SPARSIFIED
