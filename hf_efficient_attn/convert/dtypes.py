"""Which dtypes a source has: a model gets one, so that those of a mixed source have to be named."""

from pathlib import Path

import torch
from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.utils import cached_file

from hf_efficient_attn.convert.notes import summarize

# as safetensors writes them
FLOATING = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}


def note_mixed(model: PreTrainedModel, path: str | None, dtype: torch.dtype) -> list[str]:
    """Return a note on the source's weights of another dtype than `dtype`, which all get.

    path: folder or Hub name the model was loaded from, whose safetensors files count, as transformers has already cast
    what it loaded; None: the model in memory counts.
    """
    found = _in_memory(model) if path is None else _in_files(path)
    others: dict[torch.dtype, list[str]] = {}
    for name, own in found.items():
        if own != dtype:
            others.setdefault(own, []).append(name)
    if not others or len(set(found.values())) == 1:
        return []
    listed = "; ".join(f"{_say(own)}: {summarize(names)}" for own, names in others.items())
    return [f"The source mixes dtypes, and all weights get {_say(dtype)}. Cast are those of {listed}."]


def _in_memory(model: PreTrainedModel) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in model.named_parameters()}


def _in_files(path: str) -> dict[str, torch.dtype]:
    config = cached_file(path, "config.json")
    found: dict[str, torch.dtype] = {}
    for file in Path(str(config)).parent.glob("*.safetensors"):
        with safe_open(file, framework="pt") as weights:
            kinds = {name: weights.get_slice(name).get_dtype() for name in weights.keys()}  # noqa: SIM118  no mapping
        found |= {name: FLOATING[kind] for name, kind in kinds.items() if kind in FLOATING}
    return found


def _say(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
