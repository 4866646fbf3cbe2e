"""Save configs with their stub or their copy of the sources, and with an `auto_map` of its classes."""

import functools
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_efficient_attn.hub.config_saving import before_saving, write_file
from hf_efficient_attn.hub.copies import ORIGIN, SPARSIFIED_ORIGIN, copy_files, copy_map, has_copy
from hf_efficient_attn.hub.stub import ENTRY, FILE, HEAD, MODULE, stub_classes, stub_text
from hf_efficient_attn.models.config.library import LibraryConfig

MARK = "_writes_stubs"
# beginnings of the files that this module writes, in all versions of the package
BEGINNINGS = tuple(each.encode() for each in (HEAD, ORIGIN, SPARSIFIED_ORIGIN))


def write_stubs() -> None:
    """Save the stub with every config that needs one, and let Trainer push it. Calling this again changes nothing."""
    before_saving(place_code, MARK)
    if not hasattr(CallbackHandler.on_push_begin, MARK):
        handler_class: Any = CallbackHandler
        handler_class.on_push_begin = with_code(CallbackHandler.on_push_begin)


def name_classes(config: Any) -> None:
    """Write the classes of the stub or the copy into `config.auto_map`, or remove them; entries of other code stay."""
    if has_copy(config):
        config.auto_map = {**config.auto_map, **copy_map(config)}
        return
    found = getattr(config, "auto_map", None)
    # an invalid `auto_map` counts as empty
    known = found if isinstance(found, dict) else {}
    others = {name: entry for name, entry in known.items() if not (isinstance(entry, str) and ENTRY.fullmatch(entry))}
    stub = {name: f"{MODULE}.{cls}" for name, cls in stub_classes(config).items()}
    if stub or others or isinstance(config, LibraryConfig):
        config.auto_map = {**stub, **others}
    elif found is not None:
        del config.auto_map


def place_code(config: PreTrainedConfig, folder: Path) -> None:
    """Write the stub or the copy that a config needs into its folder, and remove files of an earlier one."""
    name_classes(config)
    files = code_files(config)
    for name, text in files.items():
        write_file(folder / name, text)
    for file in written_files(folder):
        if file.name not in files:
            file.unlink()


def written_files(folder: Path) -> list[Path]:
    """Return the code files in a folder that this package has written."""
    return [file for file in folder.glob("*.py") if file.is_file() and is_written_here(file)]


def is_written_here(file: Path) -> bool:
    with file.open("rb") as opened:
        return opened.read(max(map(len, BEGINNINGS))).startswith(BEGINNINGS)


def with_code(on_push_begin: Any) -> Any:
    """Return `on_push_begin`, which then also copies the code of a checkpoint into the output folder.

    Trainer pushes the output folder, into which it copies config and weights of the checkpoint, but not the code.
    """

    @functools.wraps(on_push_begin)
    def beginning(handler: Any, args: Any, state: Any, *others: Any, **named: Any) -> Any:
        output = Path(args.output_dir)
        for file in written_files(output / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"):
            write_file(output / file.name, file.read_text(encoding="utf-8"))
        return on_push_begin(handler, args, state, *others, **named)

    setattr(beginning, MARK, True)
    return beginning


def code_files(config: PreTrainedConfig) -> dict[str, str]:
    """Return the code files that are saved with a config, by name."""
    if has_copy(config):
        return copy_files(config)
    return {FILE: stub_text(config)} if stub_classes(config) else {}
