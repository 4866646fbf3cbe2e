"""The local encoder family."""

from .configuration_local_encoder import LocalEncoderConfig
from .modeling_local_encoder import LocalEncoderForMaskedLM, LocalEncoderForTokenClassification, LocalEncoderModel

__all__ = [
    "LocalEncoderConfig",
    "LocalEncoderForMaskedLM",
    "LocalEncoderForTokenClassification",
    "LocalEncoderModel",
]
