"""Efficient Transformers as first-class citizens of the Hugging Face ecosystem.

Importing the package registers its model families, so that `AutoConfig`, `AutoModel` and the Auto classes of every head
know them. Registration is per process: a script started on several processes imports the package on each.
"""

from hf_efficient_attn import requirements

# before anything that may not be there in other versions is imported
requirements.check_requirements()

from hf_efficient_attn import hub, patterns
from hf_efficient_attn.attention.functional import attention
from hf_efficient_attn.attention.joined import join_attention
from hf_efficient_attn.attention.select import use_backend
from hf_efficient_attn.convert.conversion import convert
from hf_efficient_attn.errors import (
    CheckpointError,
    ConfigurationError,
    EfficientAttentionError,
    InputError,
    UnsupportedBackendError,
)
from hf_efficient_attn.hub.card import fill_cards
from hf_efficient_attn.hub.saving import write_stubs
from hf_efficient_attn.integration import interface
from hf_efficient_attn.integration.explain import explain
from hf_efficient_attn.integration.indexer import LightningIndexer
from hf_efficient_attn.integration.pattern_cache import PatternCache
from hf_efficient_attn.integration.sparsify import sparsify
from hf_efficient_attn.layout.grouped_keys import ChunkedOrder, KeyGroups
from hf_efficient_attn.layout.listed_keys import ChosenBlocks, ChosenTokens
from hf_efficient_attn.layout.score_terms import Distance, InterleavedRelation, Slope, SoftSpan, SpanRelation, Term
from hf_efficient_attn.models.adaptive_span import (
    AdaptiveSpanConfig,
    AdaptiveSpanForCausalLM,
    AdaptiveSpanForMaskedLM,
    AdaptiveSpanForMultipleChoice,
    AdaptiveSpanForQuestionAnswering,
    AdaptiveSpanForSequenceClassification,
    AdaptiveSpanForTokenClassification,
    AdaptiveSpanModel,
)
from hf_efficient_attn.models.bp_seq2seq import BPSeq2SeqConfig, BPSeq2SeqForConditionalGeneration, BPSeq2SeqModel
from hf_efficient_attn.models.bp_transformer import (
    BPTransformerConfig,
    BPTransformerForCausalLM,
    BPTransformerForMaskedLM,
    BPTransformerForMultipleChoice,
    BPTransformerForQuestionAnswering,
    BPTransformerForSequenceClassification,
    BPTransformerForTokenClassification,
    BPTransformerModel,
)
from hf_efficient_attn.models.compressed_transformer import (
    CompressedTransformerConfig,
    CompressedTransformerForCausalLM,
    CompressedTransformerForMaskedLM,
    CompressedTransformerForMultipleChoice,
    CompressedTransformerForQuestionAnswering,
    CompressedTransformerForSequenceClassification,
    CompressedTransformerForTokenClassification,
    CompressedTransformerModel,
)
from hf_efficient_attn.models.efficient_reformer import (
    EfficientReformerConfig,
    EfficientReformerForCausalLM,
    EfficientReformerForMaskedLM,
    EfficientReformerForMultipleChoice,
    EfficientReformerForQuestionAnswering,
    EfficientReformerForSequenceClassification,
    EfficientReformerForTokenClassification,
    EfficientReformerModel,
)
from hf_efficient_attn.models.etc_transformer import (
    EtcTransformerConfig,
    EtcTransformerForMaskedLM,
    EtcTransformerForMultipleChoice,
    EtcTransformerForQuestionAnswering,
    EtcTransformerForSequenceClassification,
    EtcTransformerForTokenClassification,
    EtcTransformerModel,
    structured_inputs,
)
from hf_efficient_attn.models.indexed import index_model
from hf_efficient_attn.models.indexed.index_model import index, index_stage
from hf_efficient_attn.models.indexed.index_training import index_recall
from hf_efficient_attn.models.register import register_families
from hf_efficient_attn.models.routing_transformer import (
    RoutingTransformerConfig,
    RoutingTransformerForCausalLM,
    RoutingTransformerForMaskedLM,
    RoutingTransformerForMultipleChoice,
    RoutingTransformerForQuestionAnswering,
    RoutingTransformerForSequenceClassification,
    RoutingTransformerForTokenClassification,
    RoutingTransformerModel,
)
from hf_efficient_attn.models.simplified_transformer import (
    SimplifiedTransformerConfig,
    SimplifiedTransformerForCausalLM,
    SimplifiedTransformerForMaskedLM,
    SimplifiedTransformerForMultipleChoice,
    SimplifiedTransformerForQuestionAnswering,
    SimplifiedTransformerForSequenceClassification,
    SimplifiedTransformerForTokenClassification,
    SimplifiedTransformerModel,
)
from hf_efficient_attn.models.spans.module import head_spans
from hf_efficient_attn.models.spans.training import freeze_spans, set_span_limit
from hf_efficient_attn.models.sparse_seq2seq import (
    SparseSeq2SeqConfig,
    SparseSeq2SeqForConditionalGeneration,
    SparseSeq2SeqForQuestionAnswering,
    SparseSeq2SeqForSequenceClassification,
    SparseSeq2SeqModel,
)
from hf_efficient_attn.models.sparse_transformer import (
    SparseTransformerConfig,
    SparseTransformerForCausalLM,
    SparseTransformerForMaskedLM,
    SparseTransformerForMultipleChoice,
    SparseTransformerForQuestionAnswering,
    SparseTransformerForSequenceClassification,
    SparseTransformerForTokenClassification,
    SparseTransformerModel,
)
from hf_efficient_attn.models.star_transformer import (
    StarTransformerConfig,
    StarTransformerForMaskedLM,
    StarTransformerForMultipleChoice,
    StarTransformerForQuestionAnswering,
    StarTransformerForSequenceClassification,
    StarTransformerForTokenClassification,
    StarTransformerModel,
)
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

__version__ = requirements.VERSION

register_families()
interface.register_attention()
index_model.build_indexers()
write_stubs()
fill_cards()

__all__ = [
    "AdaptiveSpanConfig",
    "AdaptiveSpanForCausalLM",
    "AdaptiveSpanForMaskedLM",
    "AdaptiveSpanForMultipleChoice",
    "AdaptiveSpanForQuestionAnswering",
    "AdaptiveSpanForSequenceClassification",
    "AdaptiveSpanForTokenClassification",
    "AdaptiveSpanModel",
    "AlignedSentencesCollator",
    "AuxiliaryLossCallback",
    "BPSeq2SeqConfig",
    "BPSeq2SeqForConditionalGeneration",
    "BPSeq2SeqModel",
    "BPTransformerConfig",
    "BPTransformerForCausalLM",
    "BPTransformerForMaskedLM",
    "BPTransformerForMultipleChoice",
    "BPTransformerForQuestionAnswering",
    "BPTransformerForSequenceClassification",
    "BPTransformerForTokenClassification",
    "BPTransformerModel",
    "CheckpointError",
    "ChosenBlocks",
    "ChosenTokens",
    "ChunkedOrder",
    "CompressedTransformerConfig",
    "CompressedTransformerForCausalLM",
    "CompressedTransformerForMaskedLM",
    "CompressedTransformerForMultipleChoice",
    "CompressedTransformerForQuestionAnswering",
    "CompressedTransformerForSequenceClassification",
    "CompressedTransformerForTokenClassification",
    "CompressedTransformerModel",
    "ConfigurationError",
    "Distance",
    "EfficientAttentionError",
    "EfficientReformerConfig",
    "EfficientReformerForCausalLM",
    "EfficientReformerForMaskedLM",
    "EfficientReformerForMultipleChoice",
    "EfficientReformerForQuestionAnswering",
    "EfficientReformerForSequenceClassification",
    "EfficientReformerForTokenClassification",
    "EfficientReformerModel",
    "EtcTransformerConfig",
    "EtcTransformerForMaskedLM",
    "EtcTransformerForMultipleChoice",
    "EtcTransformerForQuestionAnswering",
    "EtcTransformerForSequenceClassification",
    "EtcTransformerForTokenClassification",
    "EtcTransformerModel",
    "FullAttentionPhase",
    "InputError",
    "InterleavedRelation",
    "KeyGroups",
    "LayerLossCallback",
    "LightningIndexer",
    "PatternCache",
    "RedrawFeaturesCallback",
    "RoutingTransformerConfig",
    "RoutingTransformerForCausalLM",
    "RoutingTransformerForMaskedLM",
    "RoutingTransformerForMultipleChoice",
    "RoutingTransformerForQuestionAnswering",
    "RoutingTransformerForSequenceClassification",
    "RoutingTransformerForTokenClassification",
    "RoutingTransformerModel",
    "SegmentCollator",
    "SentenceMaskingCollator",
    "SharedTextsMixin",
    "SimplifiedTransformerConfig",
    "SimplifiedTransformerForCausalLM",
    "SimplifiedTransformerForMaskedLM",
    "SimplifiedTransformerForMultipleChoice",
    "SimplifiedTransformerForQuestionAnswering",
    "SimplifiedTransformerForSequenceClassification",
    "SimplifiedTransformerForTokenClassification",
    "SimplifiedTransformerModel",
    "Slope",
    "SoftSpan",
    "SpanCallback",
    "SpanRelation",
    "SparseSeq2SeqConfig",
    "SparseSeq2SeqForConditionalGeneration",
    "SparseSeq2SeqForQuestionAnswering",
    "SparseSeq2SeqForSequenceClassification",
    "SparseSeq2SeqModel",
    "SparseTransformerConfig",
    "SparseTransformerForCausalLM",
    "SparseTransformerForMaskedLM",
    "SparseTransformerForMultipleChoice",
    "SparseTransformerForQuestionAnswering",
    "SparseTransformerForSequenceClassification",
    "SparseTransformerForTokenClassification",
    "SparseTransformerModel",
    "StarTransformerConfig",
    "StarTransformerForMaskedLM",
    "StarTransformerForMultipleChoice",
    "StarTransformerForQuestionAnswering",
    "StarTransformerForSequenceClassification",
    "StarTransformerForTokenClassification",
    "StarTransformerModel",
    "Term",
    "TextSegments",
    "UnsupportedBackendError",
    "attention",
    "convert",
    "explain",
    "freeze_spans",
    "head_spans",
    "hub",
    "index",
    "index_recall",
    "index_stage",
    "join_attention",
    "last_complete_checkpoint",
    "optimizer_groups",
    "patterns",
    "set_span_limit",
    "shard_sequence",
    "sparsify",
    "structured_inputs",
    "use_backend",
]
