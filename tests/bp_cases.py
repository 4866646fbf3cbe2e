"""The BP-Transformers under contract; a family of `families.py`."""

from family import Family
from models_cases import Case

import hf_efficient_attn as hea

# labels of one level, and of several
CAUSAL = {"is_causal": True, "num_nodes": 2, "clip_distance": 1}
BP = Family(
    "bp_transformer",
    (
        Case("bp-causal", hea.BPTransformerConfig, tuple(CAUSAL.items()), shows_a_route=True),
        Case("bp-masked", hea.BPTransformerConfig, (("num_nodes", 1), ("clip_distance", 2)), shows_a_route=True),
        Case(
            "bp-positions",
            hea.BPTransformerConfig,
            (("num_nodes", 3), ("position_embedding_type", "learned"), ("classifier_pooling", "mean")),
            is_traced=False,
        ),
    ),
    refuses={"halo": "bp_transformer need whole sequences", "prefix": "half of them for spans"},
)
