"""Efficient attention and efficient Transformers for Hugging Face Transformers.

Importing the package registers its model families with `AutoConfig`, `AutoModel` and the Auto classes of all heads.
Registration is per process: a script that runs on several processes imports the package in each of them.

`__all__` is what most users need. The module also has the model classes of every family
(`hf_efficient_attn.SparseTransformerForCausalLM`), the score terms and the kinds of selected keys. Callbacks, collators
and other helpers for training are in `hf_efficient_attn.training`.
"""

import importlib
from typing import Any

from hf_efficient_attn import requirements

# before imports that fail with other versions of torch and transformers
requirements.check_requirements()

from hf_efficient_attn import hub, models, patterns, training
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
from hf_efficient_attn.integration.pattern_cache import PatternCache
from hf_efficient_attn.integration.sparsify import sparsify
from hf_efficient_attn.models.adaptive_span import AdaptiveSpanConfig
from hf_efficient_attn.models.bp_seq2seq import BPSeq2SeqConfig
from hf_efficient_attn.models.bp_transformer import BPTransformerConfig
from hf_efficient_attn.models.compressed_transformer import CompressedTransformerConfig
from hf_efficient_attn.models.efficient_reformer import EfficientReformerConfig
from hf_efficient_attn.models.etc_transformer import EtcTransformerConfig, structured_inputs
from hf_efficient_attn.models.indexed import index_model
from hf_efficient_attn.models.indexed.index_model import index
from hf_efficient_attn.models.register import FAMILIES, register_families
from hf_efficient_attn.models.routing_transformer import RoutingTransformerConfig
from hf_efficient_attn.models.simplified_transformer import SimplifiedTransformerConfig
from hf_efficient_attn.models.spans.training import freeze_spans
from hf_efficient_attn.models.sparse_seq2seq import SparseSeq2SeqConfig
from hf_efficient_attn.models.sparse_transformer import SparseTransformerConfig
from hf_efficient_attn.models.star_transformer import StarTransformerConfig
from hf_efficient_attn.training.optimizer_groups import optimizer_groups
from hf_efficient_attn.training.shard_sequence import shard_sequence

__version__ = requirements.VERSION

register_families()
interface.register_attention()
index_model.build_indexers()
write_stubs()
fill_cards()

__all__ = [
    "AdaptiveSpanConfig",
    "BPSeq2SeqConfig",
    "BPTransformerConfig",
    "CheckpointError",
    "CompressedTransformerConfig",
    "ConfigurationError",
    "EfficientAttentionError",
    "EfficientReformerConfig",
    "EtcTransformerConfig",
    "InputError",
    "PatternCache",
    "RoutingTransformerConfig",
    "SimplifiedTransformerConfig",
    "SparseSeq2SeqConfig",
    "SparseTransformerConfig",
    "StarTransformerConfig",
    "UnsupportedBackendError",
    "attention",
    "convert",
    "explain",
    "freeze_spans",
    "hub",
    "index",
    "join_attention",
    "models",
    "optimizer_groups",
    "patterns",
    "shard_sequence",
    "sparsify",
    "structured_inputs",
    "training",
    "use_backend",
]

# name -> the module that defines it, for `__getattr__`: model classes, and names that few users need
_LAZY: dict[str, str] = {
    **{name: family.__name__ for family in FAMILIES for name in family.__all__},
    **dict.fromkeys(training.__all__, training.__name__),
    "ChosenBlocks": "hf_efficient_attn.layout.listed_keys",
    "ChosenTokens": "hf_efficient_attn.layout.listed_keys",
    "ChunkedOrder": "hf_efficient_attn.layout.grouped_keys",
    "Distance": "hf_efficient_attn.layout.score_terms",
    "InterleavedRelation": "hf_efficient_attn.layout.score_terms",
    "KeyGroups": "hf_efficient_attn.layout.grouped_keys",
    "LightningIndexer": "hf_efficient_attn.integration.indexer",
    "Slope": "hf_efficient_attn.layout.score_terms",
    "SoftSpan": "hf_efficient_attn.layout.score_terms",
    "SpanRelation": "hf_efficient_attn.layout.score_terms",
    "Term": "hf_efficient_attn.layout.score_terms",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
