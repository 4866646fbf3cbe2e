"""Which dtypes a source has: a model gets one, so that those of a mixed source have to be named."""

from pathlib import Path

import torch
from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.utils import cached_file

from hf_efficient_attn.convert.destination import WEIGHTS
from hf_efficient_attn.convert.notes import summarize
from hf_efficient_attn.convert.weight_names import is_old_buffer
from hf_efficient_attn.errors import CheckpointError

# as safetensors writes them
FLOATING = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}


def note_mixed(model: PreTrainedModel, path: str | None, dtype: torch.dtype) -> list[str]:
    """Return a note on the source's weights of another dtype than `dtype`, which all get.

    path: folder or Hub name the model was loaded from, whose safetensors files count, as transformers has already cast
    what it loaded; None: the model in memory counts.
    """
    kinds = _in_memory(model) if path is None else _in_files(path)
    found = {name: own for name, own in kinds.items() if isinstance(own, torch.dtype) and own.is_floating_point}
    others: dict[torch.dtype, list[str]] = {}
    for name, own in found.items():
        if own != dtype:
            others.setdefault(own, []).append(name)
    if not others or len(set(found.values())) == 1:
        return []
    listed = "; ".join(f"{_say(own)}: {summarize(names)}" for own, names in others.items())
    return [f"The source mixes dtypes, and all weights get {_say(dtype)}. Cast are those of {listed}."]


def _in_memory(model: PreTrainedModel) -> dict[str, torch.dtype | str]:
    return {name: tensor.dtype for name, tensor in model.named_parameters()}


def check_floating(path: str) -> None:
    """Look at the files of a folder or Hub name that transformers has loaded, and has cast to fractions.

    Raises:
        CheckpointError: weights that are integers or of 8 bits, as quantization leaves them.
    """
    found = _in_files(path)
    names = [name for name, own in found.items() if own not in FLOATING.values() and not is_old_buffer(name)]
    if names:
        raise CheckpointError(
            f"Weights in {path} are integers, or fractions of 8 bits: {summarize(names)}. Convert a checkpoint of "
            "floating-point weights, of which they were made."
        )


def _in_files(path: str) -> dict[str, torch.dtype | str]:
    """Return the dtype of every tensor; of one that is no fraction in safetensors, its name there."""
    config = cached_file(path, "config.json")
    found: dict[str, torch.dtype | str] = {}
    for file in Path(str(config)).parent.iterdir():
        if not WEIGHTS.fullmatch(file.name):
            continue
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as weights:
                names = weights.keys()
                kinds = {name: weights.get_slice(name).get_dtype() for name in names}
            found |= {name: FLOATING.get(kind, kind) for name, kind in kinds.items()}
        elif file.suffix == ".bin":
            tensors = torch.load(file, map_location="meta", weights_only=True)
            found |= {name: each.dtype for name, each in tensors.items() if torch.is_tensor(each)}
    return found


def _say(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
