"""What transformers refuses in a config, as errors of this package: which field, its value, and what is allowed."""

import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import (
    StrictDataclassClassValidationError,
    StrictDataclassError,
    StrictDataclassFieldValidationError,
)

from hf_efficient_attn.errors import ConfigurationError, EfficientAttentionError
from hf_efficient_attn.messages import cut, shown
from hf_efficient_attn.models.config.fields import own_fields
from hf_efficient_attn.models.config.inherited import RULES

Config = TypeVar("Config")
# how many letters of transformers' own message are repeated
LETTERS = 160
# the exceptions of transformers' own code when it computes with a wrong value
RAISED = (
    StrictDataclassError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    RecursionError,
)


class FieldError(
    ConfigurationError, StrictDataclassFieldValidationError, StrictDataclassClassValidationError, TypeError
):
    """A field of a config that transformers refuses, under every type of exception that transformers would raise.

    Args:
        message: what is wrong, the value, and what is allowed.
    """

    def __init__(self, message: str) -> None:
        ConfigurationError.__init__(self, message)


def strict_config(cls: type[Config]) -> type[Config]:
    """Make a config class `strict`, so that the types of its fields are checked; wrong ones raise FieldError."""
    checked: Any = strict(cls)
    build, write, validate = checked.__init__, checked.__setattr__, checked.validate

    @wraps(build)
    def __init__(self: Any, *args: Any, **fields: Any) -> None:
        if args:
            raise FieldError(f"{checked.__name__}({shown(args[0])}, …): fields are given by name, as hidden_size=64.")
        # aliases of fields are resolved before all are checked
        fields = {checked.attribute_map.get(name, name): value for name, value in fields.items()}
        with refused(checked, fields):
            build(self, **fields)

    @wraps(write)
    def __setattr__(self: Any, name: str, value: Any) -> None:
        name = checked.attribute_map.get(name, name)
        _check_rule(name, value)
        if name not in checked.__validators__:
            return write(self, name, value)
        try:
            write(self, name, value)
        except EfficientAttentionError:
            raise
        except RAISED as error:
            raise FieldError(f"{name}={shown(value)}; it must be {allowed_types(checked, name)}.") from error

    @wraps(validate)
    def checked_validate(self: Any) -> None:
        with refused(checked, vars(self)):
            validate(self)

    checked.__init__, checked.__setattr__, checked.validate = __init__, __setattr__, checked_validate
    return cls


def allowed_types(cls: Any, name: str) -> str:
    """Return the types a field of a config may have, in words: "int or None"."""
    kind = cls.__dataclass_fields__[name].type
    text = kind.__name__ if isinstance(kind, type) and not hasattr(kind, "__args__") else str(kind)
    return re.sub(r"\b(typing|transformers)\.(\w+\.)*", "", text).replace(" | ", " or ")


@contextmanager
def refused(cls: type, fields: Mapping[str, Any]) -> Iterator[None]:
    """Raise FieldError where transformers cannot compute with the fields of a config, naming the likely ones."""
    try:
        yield
    except EfficientAttentionError:
        raise
    except RAISED as error:
        given = ", ".join(f"{name}={shown(fields[name], 60)}" for name in _suspects(cls, fields, error)[:3])
        what = f"{given} in a {cls.__name__}" if given else f"This {cls.__name__}"
        reason = cut(f"{type(error).__name__}: {error}", LETTERS, LETTERS // 2)
        raise FieldError(f"{what}: transformers cannot read it ({reason}). Correct or leave out the field.") from error


def _suspects(cls: Any, fields: Mapping[str, Any], error: Exception) -> list[str]:
    """Return the fields that an error or the functions in its traceback mention; if none, those that are not ours."""
    told = ""
    each: BaseException | None = error
    while each is not None:
        functions = (frame.name for frame in traceback.extract_tb(each.__traceback__))
        told, each = " ".join([told, str(each), *functions]), each.__cause__
    named = [name for name in fields if name.strip("_").rstrip("s") in told]
    return named or [name for name in fields if name not in own_fields(cls)]


def _check_rule(name: str, value: Any) -> None:
    """Raise FieldError for a field that none of our classes declares and that transformers reads without checking."""
    rule: tuple[Callable[[Any], bool], str] | None = RULES.get(name)
    if rule is not None and not rule[0](value):
        raise FieldError(f"{name}={shown(value)}; it must be {rule[1]}.")
