"""Every exception this package raises.

EfficientAttentionError (ValueError)
├── ConfigurationError       a config field, or a combination of fields, that no model can be built from
├── CheckpointError          a checkpoint that belongs to another model
├── InputError               lengths, masks or positions a model cannot take
└── UnsupportedBackendError  an attention implementation that cannot compute what the model asks for
"""


class EfficientAttentionError(ValueError):
    """Base of all errors below; a `ValueError`, so that callers need not know this package."""


class ConfigurationError(EfficientAttentionError):
    """A config field, or a combination of fields, that no model can be built from."""


class CheckpointError(EfficientAttentionError):
    """A checkpoint that belongs to another model."""


class InputError(EfficientAttentionError):
    """Lengths, masks or positions a model cannot take."""


class UnsupportedBackendError(EfficientAttentionError):
    """An attention implementation that cannot compute what the model asks for."""
