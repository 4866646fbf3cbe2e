"""Config classes whose fields have types: a value of another type is refused by name, with those that are allowed."""

import re
from functools import wraps
from typing import Any, TypeVar

from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassFieldValidationError

from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.messages import shown

Config = TypeVar("Config")


class FieldError(ConfigurationError, StrictDataclassFieldValidationError, TypeError):
    """A field of a config that transformers refuses, under every type of exception that transformers would raise.

    Args:
        message: what is wrong, the value, and what is allowed.
    """

    def __init__(self, message: str) -> None:
        ConfigurationError.__init__(self, message)


def strict_config(cls: type[Config]) -> type[Config]:
    """Make a config class `strict`, so that the types of its fields are checked; wrong ones raise FieldError."""
    checked: Any = strict(cls)
    build, write = checked.__init__, checked.__setattr__

    @wraps(build)
    def __init__(self: Any, *args: Any, **fields: Any) -> None:
        if args:
            raise FieldError(f"{checked.__name__}({shown(args[0])}, …): fields are given by name, as hidden_size=64.")
        # aliases of fields are resolved before all are checked
        build(self, **{checked.attribute_map.get(name, name): value for name, value in fields.items()})

    @wraps(write)
    def __setattr__(self: Any, name: str, value: Any) -> None:
        name = checked.attribute_map.get(name, name)
        try:
            write(self, name, value)
        except StrictDataclassFieldValidationError as error:
            raise FieldError(f"{name}={shown(value)}; it must be {allowed_types(checked, name)}.") from error

    checked.__init__, checked.__setattr__ = __init__, __setattr__
    return cls


def allowed_types(cls: Any, name: str) -> str:
    """Return the types a field of a config may have, in words: "int or None"."""
    kind = cls.__dataclass_fields__[name].type
    text = kind.__name__ if isinstance(kind, type) and not hasattr(kind, "__args__") else str(kind)
    return re.sub(r"\b(typing|transformers)\.(\w+\.)*", "", text).replace(" | ", " or ")
