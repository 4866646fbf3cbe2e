"""The models with a sparse pattern under contract; a family of `families.py`."""

from typing import Any

from family import Family
from models_cases import Case, case_of

import hf_efficient_attn as hea
from hf_efficient_attn.patterns import Band, Dilated, GlobalTokens, PerHead


def sparse(name: str, preset: str | None, **fields: Any) -> Case:
    """Return a case of a preset; `fields` are the preset's own arguments and fields of the config."""
    fields = {**dict.fromkeys(("embedding_dropout", "hidden_dropout", "attention_dropout"), 0.0), **fields}
    return case_of(f"sparse-{name}", hea.SparseTransformerConfig, fields, preset)


SPARSE = Family(
    "sparse_transformer",
    (
        sparse(
            "longformer",
            "longformer",
            shows_a_route=True,
            is_traced=False,
            attention_window=[4, 8],
            pad_token_id=0,
            sep_token_id=2,
        ),
        sparse("longformer-first", "longformer", attention_window=6, global_tokens="first", attention_dilation=[1, 2]),
        sparse(
            "longformer-causal",
            "longformer",
            is_traced=False,
            attention_window=6,
            is_causal=True,
            global_tokens="first",
        ),
        sparse(
            "longformer-causal-global",
            "longformer",
            attention_window=6,
            is_causal=True,
            global_tokens={"every": 5},
            global_projections=True,
            attention_dilation=[1, 2],
            num_dilated_heads=2,
        ),
        sparse("bigbird", "bigbird_itc", block_tokens=2, num_random_blocks=1, sep_token_id=2),
        sparse(
            "bigbird-causal", "bigbird_itc", shows_a_route=True, block_tokens=2, num_random_blocks=1, is_causal=True
        ),
        sparse("char_lm", "longformer_char_lm"),
        sparse("sliding-pre", "sliding", left=3, norm_position="pre", position_embedding_type="sinusoidal"),
        sparse(
            "sliding-grouped",
            "sliding",
            is_traced=False,
            left=3,
            is_causal=True,
            num_key_value_heads=2,
            norm_type="rmsnorm",
        ),
        sparse("block_local", "block_local", block_tokens=4, gated_mlp=True, type_vocab_size=2),
        sparse("strided", "strided", stride=3),
    ),
    instead={
        "TP": ("sparse-bigbird", "sparse-longformer-causal-global"),
        "halo": (
            sparse("globals", None, is_causal=False, attention_pattern=Band(4, 4) | GlobalTokens([0])),
            sparse("chosen", "longformer", attention_window=6, global_tokens={"token_ids": [7, 9]}),
            "sparse-longformer-causal-global",
            sparse(
                "relative",
                None,
                is_causal=True,
                position_embedding_type="relative",
                attention_pattern=[Band(5, 0), PerHead([Band(2, 0), Dilated(6, 0, 3)])],
            ),
        ),
    },
)
