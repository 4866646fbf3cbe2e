"""Fields of the configs with blocks of `sparse/block.py`; each family's config explains them."""

from dataclasses import dataclass
from typing import Any

from hf_efficient_attn.models.config.fields import NormFields


@dataclass(init=False, repr=False, eq=False)
class BlockFields(NormFields):
    """Mixin: the block of `sparse/block.py`, and the embeddings before the first one."""

    hidden_act: str = "gelu"
    mlp_bias: bool = True
    attention_bias: bool = True
    attention_output_bias: bool = True
    norm_before_first_layer: bool = True
    embedding_norm: bool = True

    position_embedding_type: str = "learned"
    max_position_embeddings: int = 4096
    position_offset: int = 0
    sinusoid_layout: str = "interleaved"
    scale_embedding: bool = False
    initializer_range: float | int = 0.02

    @property
    def sinusoid_amplitude(self) -> float:
        """The factor of sinusoids, so that they are as large as the embeddings they are added to."""
        return 1.0 if self.scale_embedding else self.initializer_range


@dataclass(init=False, repr=False, eq=False)
class SparseFields(BlockFields):
    """Mixin: the same, and what the layers read."""

    attention_pattern: Any = None
    global_tokens: Any = None
    global_projections: bool = False
    max_global_tokens: int = 128
    random_blocks_in_eval: str = "fixed"
    full_attention_up_to: int | None = None


class PatternAlone:
    """Mixin for configs with a pattern and none of the other fields of `SparseFields`: what layers read instead."""

    global_tokens = None
    global_projections = False
    random_blocks_in_eval = "fixed"
    full_attention_up_to = None
