"""The compressed Transformers under contract; a family of `families.py`."""

from typing import Any

from family import Family
from models_cases import Case, case_of

import hf_efficient_attn as hea
from hf_efficient_attn.patterns import Band, BlockLocal


def compressed(name: str, **fields: Any) -> Case:
    """Return a case whose layers read fewer keys than its texts have tokens."""
    projected = {"projected_tokens": 4} if "linformer" in fields.get("mechanism", "linformer") else {}
    return case_of(f"compressed-{name}", hea.CompressedTransformerConfig, {**projected, **fields})


COMPRESSED = Family(
    "compressed_transformer",
    (
        compressed("linformer", shows_a_route=True, projection_sharing="none", projection_bias=True),
        compressed("linformer-layerwise", projection_sharing="layerwise", projection_first=True, norm_position="pre"),
        compressed(
            "linformer-mixed",
            mechanism=["linformer", "pattern"],
            attention_pattern=[None, Band(3, 3)],
            projection_type="convolution",
            projected_tokens=32,
            projection_sharing="kv",
            gated_mlp=True,
            type_vocab_size=2,
        ),
        compressed(
            "linear-causal",
            shows_a_route=True,
            mechanism="linear",
            is_causal=True,
            chunk_tokens=4,
            feature_map="positive_random",
            num_features=10,
            norm_position="pre",
        ),
        compressed(
            "linear-mixed",
            mechanism=["pattern", "linear"],
            attention_pattern=[Band(3, 0), None],
            is_causal=True,
            is_traced=False,
        ),
        compressed("linear-masked", mechanism="linear"),
        compressed(
            "memory-causal",
            shows_a_route=True,
            mechanism="memory_compressed",
            is_causal=True,
            compression_tokens=4,
            compression_by_head=False,
            compression_null_key=True,
        ),
        compressed(
            "memory-local",
            mechanism=["pattern", "memory_compressed"],
            attention_pattern=[BlockLocal(4), None],
            is_causal=True,
            is_traced=False,
        ),
        compressed("memory", mechanism="memory_compressed", compression_tokens=5),
        compressed(
            "prior",
            mechanism="prior",
            prior_width_tokens=3,
            attention_pattern=Band(5, 5),
            num_key_value_heads=2,
            position_embedding_type="none",
        ),
        compressed("prior-causal", mechanism="prior", prior_is_trained=False, is_causal=True, is_traced=False),
        compressed("talking-causal", mechanism="talking_heads", attention_pattern=Band(6, 0), is_causal=True),
        compressed("average-causal", mechanism="linear", feature_map="constant", is_causal=True, is_traced=False),
        compressed(
            "residual-causal",
            mechanism="residual_scores",
            attention_pattern=[Band(6, 0), None],
            is_causal=True,
            num_key_value_heads=2,
        ),
        compressed(
            "collaborative-causal",
            mechanism="collaborative_heads",
            shared_key_width=12,
            attention_pattern=Band(6, 0),
            is_causal=True,
        ),
        compressed(
            "reused-causal",
            mechanism=["pattern", "reused_weights"],
            attention_pattern=[Band(6, 0), None],
            is_causal=True,
            num_key_value_heads=2,
        ),
        compressed("nystrom", mechanism="nystrom", num_landmarks=4, conv_kernel_size=5),
    ),
    decoder="compressed-linear-mixed",
    trained="compressed-linformer-layerwise",
    refuses={"halo": "compressed_transformer need whole sequences", "prefix": "Prefix tuning cannot give it keys"},
    accepts={"prefix": ("compressed-prior-causal", "compressed-talking-causal", "compressed-residual-causal")},
)
