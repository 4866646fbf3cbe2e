"""The adaptive span family: heads that learn how far they read."""

from .configuration_adaptive_span import AdaptiveSpanConfig
from .modeling_adaptive_span import (
    AdaptiveSpanForCausalLM,
    AdaptiveSpanForMaskedLM,
    AdaptiveSpanForSequenceClassification,
    AdaptiveSpanModel,
)

__all__ = [
    "AdaptiveSpanConfig",
    "AdaptiveSpanForCausalLM",
    "AdaptiveSpanForMaskedLM",
    "AdaptiveSpanForSequenceClassification",
    "AdaptiveSpanModel",
]
