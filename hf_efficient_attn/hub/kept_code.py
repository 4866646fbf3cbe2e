"""A model of transformers that was loaded with a copy of these sources is saved with it again, without this package.

`saving` does this where the package is imported. Families need neither: transformers copies the files of their classes.
"""

import functools
import shutil
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig
from transformers.utils import CONFIG_NAME

# the file of a copy in which transformers finds the classes of a sparsified model, and the others that it imports
SPARSIFIED = "modeling_sparsified"
FILES = (f"{SPARSIFIED}.py", "hea_*.py")
MARK = "_keeps_code"


def keep_code() -> None:
    """Have configs that name the copy beside them saved with it; may be called again."""
    if not getattr(PreTrainedConfig.to_json_file, MARK, False):
        PreTrainedConfig.to_json_file = keeping_code(PreTrainedConfig.to_json_file)  # type: ignore[method-assign]


def keeping_code(to_json_file: Any) -> Any:
    """Return a config's `to_json_file` that also writes the files of the copy, unless they are there."""

    @functools.wraps(to_json_file)
    def saving(config: PreTrainedConfig, json_file_path: Any, *args: Any, **kwargs: Any) -> None:
        folder = Path(json_file_path).parent
        if Path(json_file_path).name == CONFIG_NAME and names_copy(config) and not (folder / FILES[0]).exists():
            for file in [file for pattern in FILES for file in Path(__file__).parent.glob(pattern)]:
                shutil.copyfile(file, folder / file.name)
        to_json_file(config, json_file_path, *args, **kwargs)

    setattr(saving, MARK, True)
    return saving


def names_copy(config: Any) -> bool:
    """Return whether the code of a config is a copy beside it; that of a repository on the Hub is found by its name."""
    auto_map = getattr(config, "auto_map", None)
    entry = auto_map.get("AutoConfig") if isinstance(auto_map, dict) else None
    return isinstance(entry, str) and entry.partition(".")[0] == SPARSIFIED
