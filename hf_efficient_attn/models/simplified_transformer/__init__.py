"""Simplified Transformer blocks (He & Hofmann, arXiv:2311.01906)."""

from .configuration_simplified_transformer import SimplifiedTransformerConfig
from .modeling_simplified_transformer import (
    SimplifiedTransformerForCausalLM,
    SimplifiedTransformerForMaskedLM,
    SimplifiedTransformerForMultipleChoice,
    SimplifiedTransformerForQuestionAnswering,
    SimplifiedTransformerForSequenceClassification,
    SimplifiedTransformerForTokenClassification,
    SimplifiedTransformerModel,
    SimplifiedTransformerPreTrainedModel,
)

__all__ = [
    "SimplifiedTransformerConfig",
    "SimplifiedTransformerForCausalLM",
    "SimplifiedTransformerForMaskedLM",
    "SimplifiedTransformerForMultipleChoice",
    "SimplifiedTransformerForQuestionAnswering",
    "SimplifiedTransformerForSequenceClassification",
    "SimplifiedTransformerForTokenClassification",
    "SimplifiedTransformerModel",
    "SimplifiedTransformerPreTrainedModel",
]
