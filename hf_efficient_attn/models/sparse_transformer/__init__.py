"""The sparse Transformer family: Longformer, BigBird and every other pattern, bidirectional and causal."""

from .configuration_sparse_transformer import SparseTransformerConfig
from .modeling_sparse_transformer import (
    SparseTransformerForCausalLM,
    SparseTransformerForMaskedLM,
    SparseTransformerForMultipleChoice,
    SparseTransformerForQuestionAnswering,
    SparseTransformerForSequenceClassification,
    SparseTransformerForTokenClassification,
    SparseTransformerModel,
)

__all__ = [
    "SparseTransformerConfig",
    "SparseTransformerForCausalLM",
    "SparseTransformerForMaskedLM",
    "SparseTransformerForMultipleChoice",
    "SparseTransformerForQuestionAnswering",
    "SparseTransformerForSequenceClassification",
    "SparseTransformerForTokenClassification",
    "SparseTransformerModel",
]
