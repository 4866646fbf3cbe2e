"""The sparse encoder-decoder family: LED, BigBird-Pegasus, the Transformer of 2017, and other encoder patterns."""

from .configuration_sparse_seq2seq import SparseSeq2SeqConfig
from .modeling_sparse_seq2seq import (
    SparseSeq2SeqForConditionalGeneration,
    SparseSeq2SeqForQuestionAnswering,
    SparseSeq2SeqForSequenceClassification,
    SparseSeq2SeqModel,
)

__all__ = [
    "SparseSeq2SeqConfig",
    "SparseSeq2SeqForConditionalGeneration",
    "SparseSeq2SeqForQuestionAnswering",
    "SparseSeq2SeqForSequenceClassification",
    "SparseSeq2SeqModel",
]
