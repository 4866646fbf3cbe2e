"""Patterns: which query may attend to which key, their algebra, and their JSON."""

from hf_efficient_attn.patterns.algebra import Complement, Intersection, PerHead, Union
from hf_efficient_attn.patterns.bands import Band, BlockTopK, Causal, CompressedKeys, Dilated, Full, Strided
from hf_efficient_attn.patterns.big_bird import BigBirdBlocks, RandomBlocks, bigbird
from hf_efficient_attn.patterns.blocks import BlockLocal, Blocks
from hf_efficient_attn.patterns.config_spec import layers_to_dict, parse_pattern, patterns_per_layer
from hf_efficient_attn.patterns.global_tokens import GlobalTokens
from hf_efficient_attn.patterns.grid import Grid, SizedGrid
from hf_efficient_attn.patterns.interleaved_span_tree import InterleavedSpanTree
from hf_efficient_attn.patterns.pattern import Pattern, TokenOrder
from hf_efficient_attn.patterns.span_tree import SizedSpanTree, SpanTree, span_tree_nodes
from hf_efficient_attn.patterns.tables import GatheredKeys, KeyTable

__all__ = [
    "Band",
    "BigBirdBlocks",
    "BlockLocal",
    "BlockTopK",
    "Blocks",
    "Causal",
    "Complement",
    "CompressedKeys",
    "Dilated",
    "Full",
    "GatheredKeys",
    "GlobalTokens",
    "Grid",
    "InterleavedSpanTree",
    "Intersection",
    "KeyTable",
    "Pattern",
    "PerHead",
    "RandomBlocks",
    "SizedGrid",
    "SizedSpanTree",
    "SpanTree",
    "Strided",
    "TokenOrder",
    "Union",
    "bigbird",
    "layers_to_dict",
    "parse_pattern",
    "patterns_per_layer",
    "span_tree_nodes",
]
