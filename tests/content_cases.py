"""The models whose layers choose keys by what tokens say; families of `families.py`."""

from typing import Any

from family import Family
from models_cases import Case, case_of

import hf_efficient_attn as hea
from hf_efficient_attn.patterns import Band

# chunks that begin anew with every bucket, a ring of local ones, and chunks as the authors cut them
BY_BUCKET: tuple[dict[str, Any], ...] = (
    {"chunk_by_bucket": True, "num_hashes": 1, "num_buckets": 2, "lsh_num_chunks_after": 1, "lsh_attn_chunk_length": 2},
    {"chunk_by_bucket": True, "num_hashes": 2, "num_buckets": 2, "lsh_attn_chunk_length": 2},
    {"local_wraps": True, "local_num_chunks_before": 2, "local_num_chunks_after": 1},
    {"chunk_by_bucket": True, "num_hashes": 3, "lsh_num_chunks_before": 2, "count_duplicates": False},
)
AUTHORS: tuple[dict[str, Any], ...] = (
    {"attend_across_buckets": False},
    {"num_hashes": 3, "lsh_num_chunks_after": 1, "count_duplicates": False},
)


def reformer(name: str, **fields: Any) -> Case:
    """Return a case of the Reformer, whose chunks are short enough to matter; its rotations never change."""
    chunks = {"lsh_attn_chunk_length": 4, "local_attn_chunk_length": 4, "num_buckets": 4}
    fields = {"attn_layers": ["local", "lsh"], "hash_seed": 1, **chunks, **fields}
    return case_of(f"reformer-{name}", hea.EfficientReformerConfig, fields)


def routing(name: str, **fields: Any) -> Case:
    """Return a case of routing heads whose clusters are short enough to matter."""
    fields = {"num_routing_heads": 2, "num_clusters": 3, "cluster_tokens": 4, **fields}
    return case_of(f"routing-{name}", hea.RoutingTransformerConfig, fields)


UNWRITTEN = {"ONNX": "cannot be written as ONNX, because its exporter has no stable sort"}
REFORMER = Family(
    "efficient_reformer",
    (
        reformer("causal", shows_a_route=True, is_causal=True, chunk_by_bucket=True, num_hashes=2, choices=BY_BUCKET),
        reformer("masked", shows_a_route=True, num_hashes=2, local_wraps=True, choices=(*AUTHORS, *BY_BUCKET)),
    ),
    trained="reformer-masked",
    instead={
        "TP": ("reformer-causal", "reformer-masked"),
        # whose local layers would be refused before
        "ONNX": (reformer("lsh", attn_layers=["lsh"], num_hidden_layers=1),),
    },
    refuses={
        "halo": "efficient_reformer need whole sequences",
        "prefix": "Prefix tuning cannot put keys",
        **UNWRITTEN,
    },
)

ROUTING = Family(
    "routing_transformer",
    (
        routing("causal", shows_a_route=True, attention_pattern=Band(3, 0), max_relative_distance=5),
        routing(
            "rope",
            position_embedding_type="rope",
            norm_position="pre",
            include_self=False,
            layers_with_routing=[1],
            num_routing_heads=4,
            head_map=True,
            gated_mlp=True,
        ),
        routing("masked", is_causal=False, max_relative_distance=3),
    ),
    decoder="routing-rope",
    instead={
        "TP": ("routing-causal", "routing-masked"),
        # so many heads that three processes can deal them out
        "ONNX": ("routing-masked",),
    },
    refuses={
        "halo": "routing_transformer need whole sequences",
        "prefix": "Prefix tuning cannot provide this",
        **UNWRITTEN,
    },
)
