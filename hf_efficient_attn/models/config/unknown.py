"""Fields that no config of a family has: refused if they hide a method, otherwise warned of with a guess."""

import dataclasses
import difflib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from transformers import PreTrainedConfig
from transformers.utils import logging

from hf_efficient_attn.messages import shown
from hf_efficient_attn.models.config.errors import FieldError
from hf_efficient_attn.models.config.fields import own_fields

logger = logging.get_logger(__name__)
# from 0 to 1: names at least this similar are taken for misspelt
ALIKE = 0.85
# letters; longer names are not compared
LONGEST = 100
# what other libraries, and older versions of the presets, call a field
RENAMED = {"causal": "is_causal"}
_OR_PATTERN = ", or set the fields yourself: attention_pattern=Band(32, 32) is a window of 64"


def check_names(config: Any, fields: Mapping[str, Any]) -> None:
    """Raise FieldError for names that are not fields of a config, but a method, a property or a preset's argument.

    They would change nothing. Arguments of presets are recognised even if misspelt; only a preset makes fields of them.
    What is in `RENAMED` has another name.
    """
    cls = type(config)
    for name, value in fields.items():
        # found in the class without calling a property
        found = inspect.getattr_static(cls, name, None)
        is_computed = isinstance(found, property) and found.fset is None
        if is_computed or callable(getattr(cls, name, None)) or isinstance(found, Mapping) > isinstance(value, Mapping):
            what = "follows from other fields" if is_computed else "belongs to the class"
            raise FieldError(f"{name}={shown(value)} is no field of {cls.__name__}: {name} {what}. Leave it out.")
        if name in RENAMED:
            renamed = f"{RENAMED[name]}={shown(value)}"
            raise FieldError(f"{name}={shown(value)} is no field of {cls.__name__}. Write {renamed}.")
        if not name.startswith("_") and nearest_field(cls, name) is None:
            refuse_argument_of_preset(cls, name, value)


def refuse_argument_of_preset(cls: Any, name: str, value: Any) -> None:
    """Raise FieldError for a name that is, or probably was meant to be, an argument of a preset."""
    arguments = preset_arguments(cls)
    meant = name if name in arguments else next(iter(_close(name, [*arguments]) + _longer(name, arguments)), None)
    if meant is None:
        return
    presets = ", ".join(arguments[meant])
    is_pattern = "attention_pattern" in {field.name for field in dataclasses.fields(cls)}
    raise FieldError(
        f"{shown(name, 60)[1:-1]}={shown(value, 60)} is no field of {cls.__name__}, and would change nothing; "
        f"{meant} is an argument of its presets: {presets}. "
        f"Write {cls.__name__}.{arguments[meant][0]}({meant}=…){_OR_PATTERN if is_pattern else ''}."
    )


def preset_arguments(cls: Any) -> dict[str, list[str]]:
    """Return the arguments from which presets of a config class make fields, each with its presets.

    >>> from hf_efficient_attn import SparseTransformerConfig
    >>> preset_arguments(SparseTransformerConfig)["attention_window"]
    ['longformer']
    """
    fields = {field.name for field in dataclasses.fields(cls)}
    arguments: dict[str, list[str]] = {}
    for parent in cls.__mro__[: cls.__mro__.index(PreTrainedConfig)]:
        for preset, method in vars(parent).items():
            if isinstance(method, classmethod):
                for argument in list(inspect.signature(method.__func__).parameters.values())[1:]:
                    if argument.kind is argument.POSITIONAL_OR_KEYWORD and argument.name not in fields:
                        arguments.setdefault(argument.name, []).append(preset)
    return arguments


def warn_of_unknown(config: Any, fields: Mapping[str, Any], families: Iterable[type]) -> None:
    """Warn once of an unknown field: that other `families` have it, or which one was probably meant.

    transformers silently keeps every field.
    """
    for name in fields:
        if name in vars(config) and not hasattr(type(config), name):
            start = f"{type(config).__name__} has no field {shown(name)}, "
            owners = [family.__name__ for family in families if name in own_fields(family)]
            meant = nearest_field(type(config), name)
            if owners:
                logger.warning_once(f"{start}only {', '.join(owners)}: it is not checked here. Leave it out.")
            elif meant is not None:
                logger.warning_once(f"{start}so it changes nothing. Was {shown(meant)} meant?")


def nearest_field(cls: Any, name: str) -> str | None:
    """Return the field of a config class of which a name is a misspelling or a short form; None: there is none.

    >>> from hf_efficient_attn import SparseTransformerConfig
    >>> nearest_field(SparseTransformerConfig, "num_layer"), nearest_field(SparseTransformerConfig, "is_decoder")
    ('num_hidden_layers', None)
    """
    inherited = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    own = [field.name for field in dataclasses.fields(cls) if field.name not in inherited]
    names = [*own, *cls.attribute_map]
    words = _words(name)
    longer = [each for each in names if len(words) > 1 and words[0] == _words(each)[0] and {*words} < {*_words(each)}]
    return next(iter(_close(name, names) + longer), None)


def _close(name: str, names: list[str]) -> list[str]:
    # difflib takes quadratic time
    return difflib.get_close_matches(name, names, n=1, cutoff=ALIKE) if len(name) < LONGEST else []


def _longer(name: str, names: Iterable[str]) -> list[str]:
    """Return the names that have one word more."""
    words = {*_words(name)}
    return [each for each in names if words < {*_words(each)} and len(_words(each)) == len(words) + 1]


def _words(name: str) -> list[str]:
    return [word.rstrip("s") for word in name.lower().split("_")]
