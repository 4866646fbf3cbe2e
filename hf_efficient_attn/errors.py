"""Every exception this package raises.

EfficientAttentionError (ValueError)
├── ConfigurationError       a config field, or a combination of fields, that no model can be built from
├── CheckpointError          a checkpoint that belongs to another model
├── InputError               lengths, masks or positions a model cannot take
│   └── WorkLimitError       a question about a pattern that would take too long to answer
│       └── MaskLimitError   masks of a backend that would grow as the square of the length
└── UnsupportedBackendError  an attention implementation that cannot compute what the model asks for

The ConfigurationError of a field of another type, `models.config.errors.FieldError`, is also what transformers raises
there.
"""

from hf_efficient_attn.messages import cut

LONGEST_MESSAGE = 500
# letters of such a message that are kept at its end, where it says what to do next
LONGEST_END = 160


class EfficientAttentionError(ValueError):
    """Base of all errors of this package; a `ValueError`, so that callers need not import it.

    A message of more than 500 characters is cut in its middle.
    """

    # no `__init__`: torch's compiler traces none of an exception, so the message would be lost in compiled programs
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
