"""Which fields of an `EfficientReformerConfig` exclude each other, and what to do about it."""

from typing import Any

from hf_efficient_attn.attention.layer_patterns import FIELD
from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.messages import shown
from hf_efficient_attn.models.config.numbers import check_heads

LSH, LOCAL = "lsh", "local"
COUNTS = (
    ("lsh_attn_chunk_length", 1),
    ("local_attn_chunk_length", 1),
    ("num_hashes", 1),
    ("lsh_num_chunks_before", 0),
    ("lsh_num_chunks_after", 0),
    ("local_num_chunks_before", 0),
    ("local_num_chunks_after", 0),
    ("chunk_size_lm_head", 0),
)
# more would number a bucket of a text beyond 32 bits
MAX_BUCKETS = 2**24


def check_attention(config: Any) -> None:
    """Raise ConfigurationError for layers of an unknown kind, or counts that no layer can have."""
    kinds, layers = config.attn_layers, config.num_hidden_layers
    if kinds is not None and (not kinds or layers % len(kinds) or not set(kinds) <= {LSH, LOCAL}):
        raise ConfigurationError(
            f"attn_layers={shown(list(kinds))}; it must hold {shown(LSH)} or {shown(LOCAL)} for each of "
            f"num_hidden_layers={layers} layers, or a part that is repeated, whose length divides their number."
        )
    for name, least in COUNTS:
        if getattr(config, name) < least:
            raise ConfigurationError(f"{name}={getattr(config, name)} must be at least {least}.")
    product = 1
    for factor in config.bucket_factors:
        product *= factor
        if factor < 2 or factor % 2 or product > MAX_BUCKETS:
            raise ConfigurationError(
                f"num_buckets={shown(config.num_buckets)}; every factor must be even and at least 2, since a rotation "
                f"gives two buckets, and their product at most {MAX_BUCKETS}."
            )
    if getattr(config, FIELD, None) is not None:
        raise ConfigurationError(
            f"{FIELD}={shown(getattr(config, FIELD))}: the layers of a Reformer read what attn_layers says, and follow "
            "no other pattern. Leave it out."
        )
    if config.head_dim is None:
        check_heads(config.hidden_size, config.num_attention_heads, "hidden_size", "num_attention_heads")
        config.head_dim = config.hidden_size // config.num_attention_heads
    if config.head_dim < 1:
        raise ConfigurationError(f"head_dim={config.head_dim} must be at least 1.")


def check_positions(config: Any) -> None:
    """Raise ConfigurationError for positions that do not fit the width or the longest text."""
    kind, longest = config.position_embedding_type, config.max_position_embeddings
    if kind == "rope" and config.head_dim % 2:
        raise ConfigurationError(f"Rotary positions need an even head_dim, not {config.head_dim}.")
    if kind != "axial":
        return
    shape, widths = config.axial_shape, config.axial_widths
    if len(shape) != len(widths) or min((*shape, *widths), default=0) < 1 or sum(widths) != config.hidden_size:
        raise ConfigurationError(
            f"axial_pos_shape={shown(list(shape))} and axial_pos_embds_dim={shown(list(widths))} must have a number of "
            f"at least 1 for each axis, and the second must add up to hidden_size={config.hidden_size}."
        )
    if config.num_axial_positions < longest:
        raise ConfigurationError(
            f"axial_pos_shape={shown(list(shape))} has {config.num_axial_positions} positions, but "
            f"max_position_embeddings={longest}. Make an axis longer, or texts shorter."
        )


def check_streams(config: Any) -> None:
    """Raise ConfigurationError for a tied embedding of another width than the last hidden state."""
    if config.tie_word_embeddings and config.output_width != config.hidden_size:
        raise ConfigurationError(
            f"tie_word_embeddings=True, but stream_join={shown(config.stream_join)} gives the vocabulary "
            f"{config.output_width} numbers a token, and the embedding has {config.hidden_size}. Use "
            "stream_join='mean', or tie_word_embeddings=False."
        )
