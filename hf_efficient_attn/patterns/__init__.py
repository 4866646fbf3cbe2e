"""Who may attend to whom: patterns, their algebra, and their JSON."""

from hf_efficient_attn.patterns.bands import Band, Causal, Dilated, Full, Strided
from hf_efficient_attn.patterns.blocks import BlockLocal, Blocks
from hf_efficient_attn.patterns.global_tokens import GlobalTokens
from hf_efficient_attn.patterns.pattern import Complement, Intersection, Pattern, Union
from hf_efficient_attn.patterns.per_head import PerHead
from hf_efficient_attn.patterns.piece import Piece
from hf_efficient_attn.patterns.random_blocks import RandomBlocks
from hf_efficient_attn.patterns.tables import KeyTable

__all__ = [
    "Band",
    "BlockLocal",
    "Blocks",
    "Causal",
    "Complement",
    "Dilated",
    "Full",
    "GlobalTokens",
    "Intersection",
    "KeyTable",
    "Pattern",
    "PerHead",
    "Piece",
    "RandomBlocks",
    "Strided",
    "Union",
]
