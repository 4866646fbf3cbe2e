"""Read the names and dtypes of saved weights, rename them by a table in both directions, and load them into a model."""

import json
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    cached_file,
)

from hf_efficient_attn.convert.counterpart import Names
from hf_efficient_attn.convert.destination import WEIGHTS
from hf_efficient_attn.convert.hub import reading, summarize, why_not_from_hub
from hf_efficient_attn.convert.registry import AUTO_CLASSES
from hf_efficient_attn.errors import CheckpointError

Weights = Mapping[str, Tensor]

# a name in a table is that of a module or of a parameter
SUFFIX = r"(?P<suffix>(?:\.(?:weight|bias))?)"


def to_ours(weights: Weights, names: Names) -> tuple[dict[str, Tensor], list[str]]:
    """Return the weights under our names, with fused weights split, and the names that no table entry covers.

    >>> fused = {"layer.3.qkv.weight": torch.arange(6.0)}
    >>> to_ours(fused, {"layer.*.qkv": ("layers.*.q", "layers.*.k", "layers.*.v")})[0]["layers.3.v.weight"].tolist()
    [4.0, 5.0]
    """
    rules = {_compile(theirs): _several(ours) for theirs, ours in names.items()}
    matches = _matches(rules, weights)
    renamed: dict[str, Tensor] = {}
    for name, match in matches.items():
        tensor, ours = weights[name], rules[match.re]
        # cloned, so that no part keeps the fused tensor alive and saving finds no shared storage
        parts = [tensor] if len(ours) == 1 else [part.clone() for part in tensor.chunk(len(ours))]
        renamed |= {_fill(target, match): part for target, part in zip(ours, parts, strict=True)}
    return renamed, [name for name in weights if name not in matches]


def to_theirs(weights: Weights, names: Names) -> tuple[dict[str, Tensor], list[str]]:
    """Return the weights under their names, with parts fused, and our names that no table entry covers."""
    rules = {
        _compile(ours): (theirs, place)
        for theirs, several in names.items()
        for place, ours in enumerate(_several(several))
    }
    matches = _matches(rules, weights)
    parts: dict[str, dict[int, Tensor]] = {}
    for name, match in matches.items():
        theirs, place = rules[match.re]
        parts.setdefault(_fill(theirs, match), {})[place] = weights[name]
    joined = {
        name: found[0] if len(found) == 1 else torch.cat([found[place] for place in sorted(found)])
        for name, found in parts.items()
    }
    return joined, [name for name in weights if name not in matches]


def covers(patterns: tuple[str, ...], name: str) -> bool:
    """Return whether one of a table's patterns matches the name of a parameter.

    >>> covers(("pooler.dense",), "pooler.dense.bias"), covers(("pooler",), "pooler.dense.bias")
    (True, False)
    """
    return any(_compile(pattern).fullmatch(name) for pattern in patterns)


def original_of(name: str, doubled: Mapping[str, str]) -> str | None:
    """Return the parameter that `name` is initialized from according to a table of modules; None: there is none.

    >>> original_of("layers.3.global.weight", {"layers.*.global": "layers.*.local"})
    'layers.3.local.weight'
    """
    rules = {_compile(copy): original for copy, original in doubled.items()}
    match = _matches(rules, [name]).get(name)
    return None if match is None else _fill(rules[match.re], match)


def _matches(rules: Collection[re.Pattern[str]], names: Iterable[str]) -> dict[str, re.Match[str]]:
    """Return the match of each name with the first rule that covers it; names without a match are left out."""
    found = ((name, next((match for rule in rules if (match := rule.fullmatch(name))), None)) for name in names)
    return {name: match for name, match in found if match}


def _compile(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\*", r"(\d+)") + SUFFIX)


def _several(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


def _fill(name: str, match: re.Match[str]) -> str:
    numbers = iter(match.groups())
    return re.sub(r"\*", lambda _: str(next(numbers)), name) + match["suffix"]


# in the order in which transformers looks for them
WEIGHT_FILES = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)
# buffers that earlier versions of transformers, or fairseq, saved with the weights, and that models now compute
OLD_BUFFER = re.compile(r"(^|\.)(position_ids|token_type_ids|(encoder|decoder)\.version|(\w+_)?inv_freq)$")
# TensorFlow's names for the weights and biases of norms, which the earliest checkpoints kept
OF_TENSORFLOW = {"gamma": "weight", "beta": "bias"}


def weight_names(path: str) -> list[str]:
    """Return the names of the weights in a checkpoint.

    path: a folder or a name on the Hub.

    Raises:
        CheckpointError: no file with weights, or a damaged one.
    """
    readers = dict(zip(WEIGHT_FILES, (_in_safetensors, _in_index, _in_pickle, _in_index), strict=True))
    for name, read in readers.items():
        try:
            file = cached_file(path, name)
        except OSError as error:
            answer = why_not_from_hub(path, error)
            if answer is not None:
                raise CheckpointError(answer) from error
            continue
        with reading(path, f"The file {name} of {path}", "Copy or download the checkpoint again."):
            return [_as_today(each) for each in read(Path(str(file)))]
    raise CheckpointError(f"The weights of {path} cannot be read: it has none of the files {', '.join(readers)}.")


def is_old_buffer(name: str) -> bool:
    """Return whether a name belongs to a buffer that earlier versions saved, so that it is not a weight.

    >>> is_old_buffer("longformer.embeddings.position_ids"), is_old_buffer("embeddings.position_embeddings.weight")
    (True, False)
    """
    return OLD_BUFFER.search(name) is not None


def _in_safetensors(file: Path) -> list[str]:
    with safe_open(file, framework="pt") as weights:
        return list(weights.keys())


def _in_index(file: Path) -> list[str]:
    return list(json.loads(file.read_text(encoding="utf-8"))["weight_map"])


def _in_pickle(file: Path) -> list[str]:
    return list(torch.load(file, map_location="meta", weights_only=True))


def _as_today(name: str) -> str:
    module, _, parameter = name.rpartition(".")
    return f"{module}.{OF_TENSORFLOW[parameter]}" if parameter in OF_TENSORFLOW else name


def check_numbers(model: PreTrainedModel) -> list[str]:
    """Return a note on weights that are NaN or infinite.

    Raises:
        CheckpointError: weights that are integers, such as quantized weights, or that are on the meta device.
    """
    weights = dict(model.named_parameters())
    for kind, found in {
        "on the meta device, without values": [name for name, each in weights.items() if each.is_meta],
        "integers": [name for name, each in weights.items() if not each.is_floating_point()],
    }.items():
        if found:
            raise CheckpointError(
                f"These weights are {kind}: {summarize(found)}. Convert a checkpoint of floating-point weights."
            )
    bad = [name for name, each in weights.items() if not bool(torch.isfinite(each.detach()).all())]
    return [f"Not finite (NaN or infinite), and converted unchanged: {summarize(bad)}."] if bad else []


# safetensors' names of the floating-point dtypes
FLOATING = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}


def note_mixed(model: PreTrainedModel, path: str | None, dtype: torch.dtype) -> list[str]:
    """Return a note on the source's weights whose dtype is not `dtype`, to which all weights are cast.

    path: folder or Hub name that the model was loaded from. Dtypes are read from its files, because transformers has
    already cast what it loaded. None: dtypes are those of the model in memory.
    """
    kinds = _in_memory(model) if path is None else _in_files(path)
    found = {name: own for name, own in kinds.items() if isinstance(own, torch.dtype) and own.is_floating_point}
    others: dict[torch.dtype, list[str]] = {}
    for name, own in found.items():
        if own != dtype:
            others.setdefault(own, []).append(name)
    if not others or len(set(found.values())) == 1:
        return []
    listed = "; ".join(f"from {_say(own)}: {summarize(names)}" for own, names in others.items())
    return [f"The source mixes dtypes; all its weights become {_say(dtype)}. Cast {listed}."]


def _in_memory(model: PreTrainedModel) -> dict[str, torch.dtype | str]:
    return {name: tensor.dtype for name, tensor in model.named_parameters()}


def check_floating(path: str) -> None:
    """Check the dtypes in the files of a folder or Hub name; transformers casts all weights to floating point.

    Raises:
        CheckpointError: weights that are integers or 8-bit floats, such as quantized weights.
    """
    found = _in_files(path)
    names = [name for name, own in found.items() if own not in FLOATING.values() and not is_old_buffer(name)]
    if names:
        raise CheckpointError(
            f"Weights in {path} are integers or 8-bit floats: {summarize(names)}. Convert the floating-point "
            "checkpoint that they were made from."
        )


def _in_files(path: str) -> dict[str, torch.dtype | str]:
    """Return the dtype of every tensor; for dtypes of safetensors that are not in `FLOATING`, their name there."""
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


def build_model(config: Any, head: str, weights: dict[str, Tensor]) -> tuple[PreTrainedModel, list[str]]:
    """Return a model in eval mode with the weights, in the dtype of the first, and the names of missing weights.

    Raises:
        CheckpointError: weights that have no parameter, have another shape, or differ although the model ties them.
    """
    dtype = next(tensor.dtype for tensor in weights.values() if tensor.is_floating_point())
    model = getattr(transformers, AUTO_CLASSES[head]).from_config(config, dtype=dtype)
    expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
    unknown = [name for name in weights if name not in expected]
    other = [name for name, tensor in weights.items() if name in expected and tensor.numel() != expected[name].numel()]
    if unknown or other:
        raise CheckpointError(
            f"The weights do not fit the {type(model).__name__} that the config describes. Weights without parameter: "
            f"{summarize(unknown) or 'none'}; weights with another shape: {summarize(other) or 'none'}."
        )
    tied = model.all_tied_weights_keys
    _check_tied(weights, tied, type(model).__name__)
    # the same numbers may have another shape: a bias of [vocab_size], or of [1, vocab_size]
    shaped = {name: tensor.reshape(expected[name]) for name, tensor in weights.items()}
    missing = model.load_state_dict(shaped, strict=False).missing_keys
    model.tie_weights()
    return model.eval(), [name for name in missing if name not in tied]


def _check_tied(weights: dict[str, Tensor], tied: dict[str, str], name: str) -> None:
    """Raise CheckpointError for tied weights that differ, because transformers would load them untied."""
    pairs = {target: source for target, source in tied.items() if target in weights and source in weights}
    differing = [
        f"{target} and {source}"
        for target, source in pairs.items()
        # one tensor under both names does not differ, even if it contains NaN
        if weights[target].data_ptr() != weights[source].data_ptr() and not weights[target].equal(weights[source])
    ]
    if differing:
        raise CheckpointError(
            f"The config ties weights of {name} that differ: {', '.join(differing)}. Set tie_word_embeddings=False in "
            "the source's config, if the checkpoint is correct."
        )


def check_missing(missing: list[str], new: tuple[str, ...], model: PreTrainedModel) -> list[str]:
    """Return a note on missing weights that are expected to be new; raise CheckpointError for others."""
    rest = [name for name in missing if name not in new]
    if rest:
        raise CheckpointError(f"The source has no weights for {summarize(rest)} of {type(model).__name__}.")
    if not missing:
        return []
    return [f"Newly initialized in {type(model).__name__}, because the source has none: {summarize(missing)}."]
