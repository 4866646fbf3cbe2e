"""The published shapes of ETC and BigBird-ETC, as fields of `EtcTransformerConfig`; keywords change or add fields."""

from typing import Any, TypeVar

from hf_efficient_attn.patterns.bands import Band
from hf_efficient_attn.patterns.big_bird import RandomBlocks
from hf_efficient_attn.patterns.blocks import Blocks
from hf_efficient_attn.patterns.pattern import Pattern

Config = TypeVar("Config")

# of BERT
DROPOUT = dict.fromkeys(("embedding_dropout", "hidden_dropout", "attention_dropout", "classifier_dropout"), 0.1)
SHARED: dict[str, bool] = {"share_qkv_projections": True, "share_output_projection": True}
LARGE: dict[str, Any] = {
    "vocab_size": 50_265,
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "local_radius": 169,
    "max_relative_distance": 24,
    # the authors do not say how long the tables are; with this distance there are as many labels
    "relative_vocab_size": 52,
}


def etc_base(cls: type[Config], share_projections: bool = False, **fields: Any) -> Config:
    """Return ETC-base: BERT-base's layout, a radius of 84 tokens, distances up to 12.

    share_projections: one set of query, key, value and output maps for all four pieces: 109 instead of 166 million
        parameters.

    Source: Ainslie et al. (arXiv:2004.08483), section 4 and appendix.
    """
    return cls(**{**DROPOUT, **(SHARED if share_projections else {}), **fields})


def etc_large(cls: type[Config], share_projections: bool = False, **fields: Any) -> Config:
    """Return ETC-large: 24 layers of width 1,024, a radius of 169 tokens, distances up to 24, RoBERTa's vocabulary.

    share_projections: as in `etc_base`.
    """
    return cls(**{**DROPOUT, **LARGE, **(SHARED if share_projections else {}), **fields})


def bigbird_etc_base(
    cls: type[Config], block_tokens: int = 84, num_random_blocks: int = 0, seed: int = 0, **fields: Any
) -> Config:
    """Return BigBird-ETC base: ETC-base whose long tokens read their own block and its two neighbours.

    Args:
        num_random_blocks: further blocks that every block of long tokens reads, drawn for each layer and head; the
            authors' models of this form have none.
        seed: of the random blocks.

    Source: Zaheer et al. (arXiv:2007.14062), section 2 and appendix E.
    """
    return cls(**{**DROPOUT, "attention_pattern": _blocks(block_tokens, num_random_blocks, seed), **fields})


def bigbird_etc_large(
    cls: type[Config], block_tokens: int = 169, num_random_blocks: int = 0, seed: int = 0, **fields: Any
) -> Config:
    """Return BigBird-ETC large: ETC-large with blocks of 169 tokens; see `bigbird_etc_base`."""
    return cls(**{**DROPOUT, **LARGE, "attention_pattern": _blocks(block_tokens, num_random_blocks, seed), **fields})


def _blocks(block_tokens: int, num_random_blocks: int, seed: int) -> Pattern:
    """Return three neighbouring blocks, and random ones that are none of these."""
    near = Blocks(Band(1, 1), block_tokens)
    return near | RandomBlocks(num_random_blocks, block_tokens, seed, exclude=near) if num_random_blocks else near
