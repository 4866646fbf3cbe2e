"""Load the model to convert from a folder, from the Hub or from memory, and check that it is complete."""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import cached_file

from hf_efficient_attn.convert.counterpart import Counterpart
from hf_efficient_attn.convert.hub import check_weights, find_on_hub, reading, summarize, why_not_from_hub
from hf_efficient_attn.convert.registry import (
    AUTO_CLASSES,
    COUNTERPARTS,
    check_source,
    head_of_class,
    resolve_head,
    table_of,
)
from hf_efficient_attn.convert.weights import WEIGHT_FILES, check_floating, covers, is_old_buffer, weight_names
from hf_efficient_attn.errors import CheckpointError, ConfigurationError
from hf_efficient_attn.integration.saving import SAVED_NAME
from hf_efficient_attn.messages import shown
from hf_efficient_attn.models.base import saved_config


def check_saved_config(path: str, saved: dict[str, Any]) -> None:
    """Check the fields of a config.json; `saved` is empty if there is no such file.

    Raises:
        CheckpointError: no config.json, no model_type in it, or a field of a wrong type.
        ConfigurationError: quantized weights, or an unknown attention.
    """
    if "model_type" not in saved:
        raise CheckpointError(
            f"{path} has no config.json with a model_type. Give a folder that save_pretrained wrote, or a name on the "
            "Hub."
        )
    model_type, architectures = saved["model_type"], saved.get("architectures")
    if not isinstance(model_type, str):
        raise CheckpointError(f"The config in {path} has model_type={shown(model_type)}; it must be a name.")
    if architectures is not None and not (
        isinstance(architectures, list) and all(isinstance(name, str) for name in architectures)
    ):
        raise CheckpointError(
            f"The config in {path} has architectures={shown(architectures)}; it must be a list of class names."
        )
    if saved.get("quantization_config") is not None:
        raise ConfigurationError(
            f"The weights in {path} are quantized (quantization_config={shown(saved['quantization_config'])}). Convert "
            "the checkpoint that they were made from, and quantize the result."
        )
    _check_attention(path, saved)


def _names_of_parts(name: Any) -> list[Any]:
    """Return the attention implementation that a config names, or those of its parts if it names one for each."""
    if isinstance(name, dict):
        return [each for part in name.values() for each in _names_of_parts(part)]
    return [] if name is None else [name]


def _check_attention(path: str, saved: dict[str, Any]) -> None:
    """Raise ConfigurationError for unknown attention, and for kernels on the Hub, whose code loading would run."""
    for key in ("attn_implementation", "_attn_implementation"):
        for name in _names_of_parts(saved.get(key)):
            if name in ("eager", SAVED_NAME, *ALL_ATTENTION_FUNCTIONS.valid_keys()):
                continue
            raise ConfigurationError(
                f"The config in {path} has {key}={shown(name)}, which is not an attention implementation of "
                "transformers or of this package. Remove the field, and pass attn_implementation to from_pretrained."
            )


def find_head(path: str, config: Any, counterpart: Counterpart) -> str:
    """Return the only head that fits the names of the weights and that the config allows.

    Raises:
        ConfigurationError: no head fits, or several do; the message lists them.
        CheckpointError: no weights, or damaged files.
    """
    names = weight_names(path)
    found = fitting_heads(counterpart, names)
    # two heads may have the same names of weights, while the config allows only one of them
    heads = [head for head in found if _is_allowed(counterpart, config, head)] or found
    if len(heads) == 1:
        return heads[0]
    outside = summarize(_outside_backbone(counterpart, names))
    choice = ", ".join(AUTO_CLASSES[head] for head in heads or counterpart.heads)
    raise ConfigurationError(
        f"The config of {path} has no architectures, and its weights outside the backbone fit "
        f"{'several heads' if heads else 'no head'}: {outside}. Choose one with head (--head): {choice}."
    )


def fitting_heads(counterpart: Counterpart, names: Iterable[str]) -> list[str]:
    """Return the heads that have all their weights among the names, with no weights of another head left over."""
    present = [name for name in names if not is_old_buffer(name)]
    outside = _outside_backbone(counterpart, present)
    if not outside:
        return ["Model"]
    return [head for head in counterpart.heads if head != "Model" and _fits(counterpart, head, present, outside)]


def _fits(counterpart: Counterpart, head: str, present: list[str], outside: list[str]) -> bool:
    table = counterpart.heads[head]
    # an lm_head that is tied to the embedding is not saved
    needed = [theirs for theirs, ours in table.items() if "lm_head" not in ours]
    is_complete = all(any(covers((theirs,), name) for name in present) for theirs in needed)
    return is_complete and all(covers((*table, *counterpart.unused), name) for name in outside)


def _outside_backbone(counterpart: Counterpart, names: Iterable[str]) -> list[str]:
    """Return the names outside the backbone; none if no name has its prefix, because it was then saved alone."""
    listed = list(names)
    if not any(name.startswith(counterpart.prefix) for name in listed):
        return []
    return [
        name
        for name in listed
        if not (name.startswith(counterpart.prefix) or is_old_buffer(name) or covers(counterpart.left_behind, name))
    ]


def _is_allowed(counterpart: Counterpart, config: Any, head: str) -> bool:
    try:
        counterpart.to_ours(config, head, False)
    except ConfigurationError:
        return False
    return True


# every checkpoint that has a tokenizer has one of these; without any, transformers makes up an empty tokenizer
TOKENIZER_FILES = (
    "tokenizer.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tokenizer.model",
    "source.spm",
    "tokenizer_config.json",
)


def load_tokenizer(src: str | None, num_positions: int | None) -> Any:
    """Return the source's tokenizer for inputs of up to `num_positions` tokens (None: as saved), or None without one.

    Raises:
        CheckpointError: the tokenizer cannot be read.
    """
    if src is None or not _has_tokenizer(src):
        return None
    with reading(src, f"The tokenizer in {src}", "Copy or download it again, or take its files away."):
        tokenizer = AutoTokenizer.from_pretrained(src)
    if num_positions is not None:
        tokenizer.model_max_length = num_positions
    return tokenizer


def _has_tokenizer(src: str) -> bool:
    return any(_has_file(src, name) for name in TOKENIZER_FILES)


def _has_file(src: str, name: str) -> bool:
    try:
        return cached_file(src, name) is not None
    except OSError as error:
        answer = why_not_from_hub(src, error)
        if answer is not None:
            raise CheckpointError(answer) from error
        return False


# longest name of a file or folder in common file systems, in bytes
LONGEST_NAME = 255


@dataclass
class Source:
    """A model to convert.

    Attributes:
        path: folder or Hub name that it was loaded from; None: from memory.
        head: a key of `AUTO_CLASSES`.
        target: the model type that it becomes.
        new_names: its parameters that the checkpoint lacks, because the caller chose another head.
        notes: what the user should know.
    """

    model: PreTrainedModel
    head: str
    target: str
    path: str | None = None
    new_names: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)

    @property
    def model_type(self) -> str:
        return str(self.model.config.model_type)

    @property
    def counterpart(self) -> Counterpart | None:
        """The table of its model type; None: it is of one of our families."""
        return table_of(self.model_type, self.target)


def check_source_name(src: Any) -> None:
    """Check that a source is a model or a possible path.

    Raises:
        ConfigurationError: an object of another type.
        CheckpointError: an empty path, or one with a name that is too long for file systems.
    """
    if isinstance(src, PreTrainedModel):
        return
    if not isinstance(src, str | os.PathLike):
        raise ConfigurationError(f"src is {shown(src)}; it must be a folder, a name on the Hub, or a model in memory.")
    if not os.fspath(src):
        # Path("") is the current folder
        raise CheckpointError("There is no folder '', which src names. Give a folder, or a name on the Hub.")
    if any(len(os.fsencode(name)) > LONGEST_NAME for name in Path(src).parts):
        raise CheckpointError(f"There is no folder {shown(os.fspath(src))}: the name is too long.")


def describe_source(src: Any, head: str | None) -> tuple[Any, str, bool]:
    """Return the config and head of a source, and whether the checkpoint itself has this head; load no weights.

    The config equals that of the loaded model. The checkpoint's own head is the one in its config's `architectures`;
    if there are none, the one that the names of its weights fit.

    Raises:
        ConfigurationError: a model type or head that cannot be converted.
        CheckpointError: there is no checkpoint, or its config describes no model.
    """
    wanted = None if head is None else resolve_head(head)
    if isinstance(src, PreTrainedModel):
        check_source(src.config.model_type)
        found = head_of_class(type(src).__name__)
        if wanted not in (None, found):
            raise ConfigurationError(
                f"A {type(src).__name__} in memory keeps its head. Save it, and convert the folder, for another head."
            )
        return src.config, _known_head(found, src.config.model_type, [type(src).__name__]), True
    path = find_on_hub(str(src))
    saved = saved_config(path, {})
    check_saved_config(path, saved)
    model_type, architectures = saved["model_type"], saved.get("architectures") or []
    check_source(model_type)
    with reading(path, f"The config in {path}, of a {shown(model_type)} model,", "Correct it."):
        config = AutoConfig.from_pretrained(path)
    own = head_of_class(architectures[0]) if architectures else None
    if wanted is None and not architectures and model_type in COUNTERPARTS:
        own = find_head(path, config, COUNTERPARTS[model_type])
    found = _known_head(wanted or own, model_type, architectures)
    if model_type in COUNTERPARTS and found in COUNTERPARTS[model_type].two_labels:
        config.num_labels = 2
    return config, found, wanted in (None, own)


def load_source(src: Any, head: str, is_own_head: bool, target: str) -> Source:
    """Load the source that `describe_source` has described.

    Raises:
        CheckpointError: weights missing, unexpected, damaged, or of other shapes.
    """
    if isinstance(src, PreTrainedModel):
        return Source(src, head, target)
    path = find_on_hub(str(src))
    check_weights(path, WEIGHT_FILES)
    model, info = _load(path, head)
    source = Source(model, head, target, path)
    check_floating(path)
    _check_loaded(source, info, is_own_head)
    return source


def _known_head(head: str | None, model_type: str, architectures: list[str]) -> str:
    """Return the head; raise ConfigurationError if it has no counterpart."""
    counterpart = COUNTERPARTS.get(model_type)
    heads = list(AUTO_CLASSES) if counterpart is None else list(counterpart.heads)
    if head not in heads:
        what = f"has architectures={architectures}" if head is None else f"is to be loaded as {AUTO_CLASSES[head]}"
        raise ConfigurationError(
            f"The {shown(model_type)} checkpoint {what}, which cannot be converted. Choose one of these heads: "
            f"{', '.join(AUTO_CLASSES[name] for name in heads)}."
        )
    return head


def _load(path: str, head: str) -> tuple[PreTrainedModel, dict[str, Any]]:
    auto_class = getattr(transformers, AUTO_CLASSES[head])
    what = f"The weights in {path}, loaded as {AUTO_CLASSES[head]},"
    with reading(path, what, "Copy or download the checkpoint again if it is incomplete."):
        # with ignore_mismatched_sizes, `info` lists the weights of other shapes by name
        model, info = auto_class.from_pretrained(
            path, output_loading_info=True, dtype="auto", ignore_mismatched_sizes=True
        )
    return model, info


def _check_loaded(source: Source, info: dict[str, Any], is_own_head: bool) -> None:
    """Raise CheckpointError for missing, unexpected or mismatched weights; note those that are left behind."""
    counterpart = source.counterpart
    declared = _may_lack(counterpart)
    head_names = () if counterpart is None else tuple(counterpart.heads[source.head])
    prefix = f"{source.model.base_model_prefix}."
    missing = [name for name in sorted(info["missing_keys"]) if covers(head_names, name) or not covers(declared, name)]
    unexpected = [
        name for name in sorted(info["unexpected_keys"]) if not (covers(declared, name) or is_old_buffer(name))
    ]
    if not is_own_head:
        new = [name for name in missing if not name.startswith(prefix) or covers(head_names, name)]
        own_names = {name for name, _ in source.model.named_parameters()}
        # names of the backbone may have its prefix or not, because the saved head is another one
        old = [name for name in unexpected if name not in own_names and not name.startswith(prefix)]
        missing, unexpected = _without(missing, new), _without(unexpected, old)
        source.new_names = tuple(new)
        if old:
            source.notes.append(f"Left out, because the head changes: {summarize(old)}.")
    left = [name for name in sorted(info["unexpected_keys"]) if covers(declared, name)]
    if left:
        source.notes.append(f"Left out, because nothing corresponds to them: {summarize(left)}.")
    mismatched = [str(entry[0] if isinstance(entry, tuple) else entry) for entry in info.get("mismatched_keys", ())]
    problems = {"missing": missing, "unexpected": unexpected, "with another shape than in the config": mismatched}
    if any(problems.values()):
        lists = "; ".join(f"{what}: {summarize(names)}" for what, names in problems.items() if names)
        raise CheckpointError(
            f"The weights in {source.path} do not fit a {type(source.model).__name__}: {lists}. Nothing was converted. "
            "Choose the head that the weights have with head (--head), or complete the checkpoint."
        )


def _may_lack(counterpart: Counterpart | None) -> tuple[str, ...]:
    """Return the names of weights that may be missing or left over."""
    if counterpart is None:
        return ()
    names = (*counterpart.left_behind, *counterpart.recomputed, *counterpart.unused, *counterpart.copies)
    return (*names, *(counterpart.prefix + name for name in names))


def _without(names: list[str], others: list[str]) -> list[str]:
    return [name for name in names if name not in set(others)]
