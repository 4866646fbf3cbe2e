"""Fields given to a config that no config of its family has: refused where they hide a method, else asked about."""

import dataclasses
import difflib
import inspect
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig
from transformers.utils import logging

from hf_efficient_attn.messages import shown
from hf_efficient_attn.models.config.errors import FieldError

logger = logging.get_logger(__name__)
# how alike two names are, from 0 to 1
ALIKE = 0.85
# letters of a name that is compared
LONGEST = 100


def check_names(config: Any, fields: Mapping[str, Any]) -> None:
    """Raise FieldError for fields that are something else in the class of a config: a method, or a computed value."""
    cls = type(config)
    for name, value in fields.items():
        # as it stands in the class: a property is not read
        found = inspect.getattr_static(cls, name, None)
        is_computed = isinstance(found, property) and found.fset is None
        if is_computed or callable(getattr(cls, name, None)) or isinstance(found, Mapping) > isinstance(value, Mapping):
            what = "follows from other fields" if is_computed else "belongs to the class"
            raise FieldError(f"{name}={shown(value)} is no field of {cls.__name__}: {name} {what}. Leave it out.")


def warn_of_unknown(config: Any, fields: Mapping[str, Any]) -> None:
    """Say once which field was probably meant by one that is new, since transformers keeps any without a word."""
    for name in fields:
        if name in vars(config) and not hasattr(type(config), name):
            meant = nearest_field(type(config), name)
            if meant is not None:
                logger.warning_once(
                    f"{type(config).__name__} has no field {shown(name)}, so it changes nothing. Was {shown(meant)} "
                    "meant?"
                )


def nearest_field(cls: Any, name: str) -> str | None:
    """Return the field of a config class that a name is a misspelling or a shorter form of; None: of none.

    >>> from hf_efficient_attn import SparseTransformerConfig
    >>> nearest_field(SparseTransformerConfig, "num_layer"), nearest_field(SparseTransformerConfig, "is_decoder")
    ('num_hidden_layers', None)
    """
    inherited = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    own = [field.name for field in dataclasses.fields(cls) if field.name not in inherited]
    names = [*own, *cls.attribute_map]
    words = _words(name)
    longer = [each for each in names if len(words) > 1 and words[0] == _words(each)[0] and {*words} < {*_words(each)}]
    # difflib compares every letter with every other
    close = difflib.get_close_matches(name, names, n=1, cutoff=ALIKE) if len(name) < LONGEST else []
    return next(iter(close + longer), None)


def _words(name: str) -> list[str]:
    return [word.rstrip("s") for word in name.lower().split("_")]
