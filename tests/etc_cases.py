"""The ETCs under contract; a family of `families.py`."""

from typing import Any

from family import Family
from models_cases import Case

import hf_efficient_attn as hea
from hf_efficient_attn.patterns import Band, Dilated, PerHead

# chunks, bands and distances that are short enough to matter
SHORT = {"local_radius": 3, "chunk_tokens": 4, "max_relative_distance": 2, "relative_vocab_size": 8}


def etc(
    name: str, preset: str | None = None, shows_a_route: bool = False, is_traced: bool = True, **fields: Any
) -> Case:
    """Return a case; presets have dropouts, which are 0 here."""
    dropouts = dict.fromkeys(("embedding_dropout", "hidden_dropout", "attention_dropout", "classifier_dropout"), 0.0)
    listed = tuple({**dropouts, **SHORT, **fields}.items())
    return Case(f"etc-{name}", hea.EtcTransformerConfig, listed, shows_a_route, is_traced, preset)


ETC = Family(
    "etc_transformer",
    (
        etc("base", "etc_base", shows_a_route=True),
        etc(
            "shared",
            "etc_base",
            is_traced=False,
            share_projections=True,
            share_feed_forward=False,
            norm_position="pre",
            hard_global_to_long=True,
            classifier_pooling="first",
            classifier_head="dense",
        ),
        etc(
            "bigbird",
            "bigbird_etc_base",
            is_traced=False,
            block_tokens=3,
            num_random_blocks=1,
            share_kv_projections=True,
        ),
        etc(
            "no_labels",
            is_traced=False,
            relative_vocab_size=None,
            type_vocab_size=0,
            hard_long_to_global=True,
            attention_pattern=PerHead([Band(2, 2), Dilated(4, 4, 2)]),
        ),
    ),
    refuses={"halo": "etc_transformer need whole sequences", "prefix": "Prefix tuning cannot give it keys"},
)
