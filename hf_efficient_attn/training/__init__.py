"""Helpers for training with `Trainer`: callbacks, collators, parameter groups, spans, indexers, shared sequences."""

from hf_efficient_attn.models.indexed.index_model import index_stage
from hf_efficient_attn.models.indexed.index_training import index_recall
from hf_efficient_attn.models.spans.module import head_spans
from hf_efficient_attn.models.spans.training import freeze_spans, set_span_limit
from hf_efficient_attn.training.callbacks import (
    AuxiliaryLossCallback,
    FullAttentionPhase,
    LayerLossCallback,
    RedrawFeaturesCallback,
)
from hf_efficient_attn.training.collators import (
    AlignedSentencesCollator,
    SegmentCollator,
    SentenceMaskingCollator,
    TextSegments,
)
from hf_efficient_attn.training.complete_checkpoints import last_complete_checkpoint
from hf_efficient_attn.training.optimizer_groups import optimizer_groups
from hf_efficient_attn.training.shard_sequence import shard_sequence
from hf_efficient_attn.training.shared_texts import SharedTextsMixin
from hf_efficient_attn.training.span_callback import SpanCallback

__all__ = [
    "AlignedSentencesCollator",
    "AuxiliaryLossCallback",
    "FullAttentionPhase",
    "LayerLossCallback",
    "RedrawFeaturesCallback",
    "SegmentCollator",
    "SentenceMaskingCollator",
    "SharedTextsMixin",
    "SpanCallback",
    "TextSegments",
    "freeze_spans",
    "head_spans",
    "index_recall",
    "index_stage",
    "last_complete_checkpoint",
    "optimizer_groups",
    "set_span_limit",
    "shard_sequence",
]
