"""Exceptions of this package.

EfficientAttentionError (ValueError)
├── ConfigurationError       a config field, or a combination of fields, that no model can be built from
├── CheckpointError          a checkpoint that belongs to another model
├── InputError               lengths, masks or positions a model cannot take
│   └── WorkLimitError       a question about a pattern that would take too long to answer
│       └── MaskLimitError   masks of a backend that would grow as the square of the length
└── UnsupportedBackendError  an attention implementation that cannot compute what the model asks for

`models.config.errors.FieldError`, the ConfigurationError for a field that a config refuses, is also a subclass of the
exceptions that transformers raises in that case.
"""

from hf_efficient_attn.messages import cut

LONGEST_MESSAGE = 500
# characters kept at the end of a message that is cut, where it says what to do next
LONGEST_END = 160


class EfficientAttentionError(ValueError):
    """Base of all errors of this package; a `ValueError`, so that callers need not import it.

    Messages of more than 500 characters are cut in the middle.
    """

    # no `__init__`: torch's compiler does not trace one of an exception, so compiled programs would lose the message
    def __str__(self) -> str:
        return cut(super().__str__(), LONGEST_MESSAGE, LONGEST_END)


class ConfigurationError(EfficientAttentionError):
    """A config field, or a combination of fields, from which no model can be built."""


class CheckpointError(EfficientAttentionError):
    """A checkpoint that belongs to another model."""


class InputError(EfficientAttentionError):
    """Inputs that cannot be computed: lengths, masks, positions or arguments."""


class WorkLimitError(InputError):
    """A question about a pattern whose answer takes too many steps at these lengths (see `patterns/intervals.py`)."""


class MaskLimitError(WorkLimitError):
    """Masks of a backend that would grow as the square of the length; another backend may need less."""


class UnsupportedBackendError(EfficientAttentionError):
    """An attention implementation that cannot compute what the model asks for."""
