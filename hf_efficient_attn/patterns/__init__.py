"""Who may attend to whom: patterns, their algebra, and their JSON."""

from hf_efficient_attn.patterns.algebra import Complement, Intersection, Union
from hf_efficient_attn.patterns.bands import Band, Causal, Dilated, Full, Strided
from hf_efficient_attn.patterns.big_bird import BigBirdBlocks, bigbird
from hf_efficient_attn.patterns.block_top_k import BlockTopK
from hf_efficient_attn.patterns.blocks import BlockLocal, Blocks
from hf_efficient_attn.patterns.compressed_keys import CompressedKeys
from hf_efficient_attn.patterns.expressions import parse_pattern
from hf_efficient_attn.patterns.gathered_keys import GatheredKeys
from hf_efficient_attn.patterns.global_tokens import GlobalTokens
from hf_efficient_attn.patterns.grid import Grid
from hf_efficient_attn.patterns.interleaved_span_tree import InterleavedSpanTree
from hf_efficient_attn.patterns.layers import layers_to_dict, patterns_per_layer
from hf_efficient_attn.patterns.pattern import Pattern
from hf_efficient_attn.patterns.per_head import PerHead
from hf_efficient_attn.patterns.random_blocks import RandomBlocks
from hf_efficient_attn.patterns.sized_grid import SizedGrid
from hf_efficient_attn.patterns.span_tree import SizedSpanTree, SpanTree, span_tree_nodes
from hf_efficient_attn.patterns.tables import KeyTable
from hf_efficient_attn.patterns.token_order import TokenOrder

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
