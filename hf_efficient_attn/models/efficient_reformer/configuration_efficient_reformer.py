"""Configuration of the Reformer."""

from collections.abc import Sequence
from math import prod
from typing import Any

from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import RopeParameters

from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.messages import shown
from hf_efficient_attn.models.config.checks import check_fields, check_least, refuse_pattern
from hf_efficient_attn.models.config.errors import strict_config
from hf_efficient_attn.models.config.fields import DropoutFields, GatedMLPFields, OwnHeadDim
from hf_efficient_attn.models.config.library import LibraryConfig

# Which fields of an `EfficientReformerConfig` exclude each other, and what to do about it.


LSH, LOCAL = "lsh", "local"
COUNTS = {
    **dict.fromkeys(("lsh_attn_chunk_length", "local_attn_chunk_length", "num_hashes"), 1),
    **dict.fromkeys(("lsh_num_chunks_before", "lsh_num_chunks_after"), 0),
    **dict.fromkeys(("local_num_chunks_before", "local_num_chunks_after", "chunk_size_lm_head"), 0),
}
# with more, the number of a bucket would not fit into 32 bits
MAX_BUCKETS = 2**24


def check_attention(config: Any) -> None:
    """Raise ConfigurationError for layers of an unknown kind, or counts that no layer can have."""
    kinds, layers = config.attn_layers, config.num_hidden_layers
    if kinds is not None and (not kinds or layers % len(kinds) or not set(kinds) <= {LSH, LOCAL}):
        raise ConfigurationError(
            f"attn_layers={shown(list(kinds))}; it must hold {shown(LSH)} or {shown(LOCAL)} for each of "
            f"num_hidden_layers={layers} layers. A shorter list is repeated; its length must divide the number of "
            "layers."
        )
    check_least(config, **COUNTS)
    product = 1
    for factor in config.bucket_factors:
        product *= factor
        if factor < 2 or factor % 2 or product > MAX_BUCKETS:
            raise ConfigurationError(
                f"num_buckets={shown(config.num_buckets)}; every factor must be even and at least 2, because a "
                f"rotation gives two buckets, and their product must be at most {MAX_BUCKETS}."
            )
    refuse_pattern(config, "the layers of a Reformer follow attn_layers")
    config.check_head_sizes()


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
            f"at least 1 for each axis, and axial_pos_embds_dim must add up to hidden_size={config.hidden_size}."
        )
    if config.num_axial_positions < longest:
        raise ConfigurationError(
            f"axial_pos_shape={shown(list(shape))} has {config.num_axial_positions} positions, but "
            f"max_position_embeddings={longest}. Make an axis longer, or lower max_position_embeddings."
        )


def check_streams(config: Any) -> None:
    """Raise ConfigurationError for a tied embedding of another width than the last hidden state."""
    if config.tie_word_embeddings and config.output_width != config.hidden_size:
        raise ConfigurationError(
            f"tie_word_embeddings=True, but with stream_join={shown(config.stream_join)} the output layer gets "
            f"{config.output_width} numbers per token, and the embedding has {config.hidden_size}. Use "
            "stream_join='mean', or tie_word_embeddings=False."
        )


# The authors' networks, as fields of `EfficientReformerConfig`; keywords change or add fields.
#
# Sources: Kitaev et al. (arXiv:2001.04451), the settings published with their code (google/trax), and the configs of
# the checkpoints converted from it.


ENWIK8: dict[str, Any] = {
    "vocab_size": 258,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "attn_layers": ["local", "local", "lsh", "local"],
    "lsh_attn_chunk_length": 256,
    "local_attn_chunk_length": 128,
    "num_buckets": 512,
    "num_hashes": 4,
    "max_position_embeddings": 65_536,
    "stream_join": "concat",
    "axial_pos_shape": [128, 512],
    "axial_pos_embds_dim": [256, 768],
    "embedding_dropout": 0.2,
    "hidden_dropout": 0.2,
    "activation_dropout": 0.2,
    "attention_dropout": 0.2,
    "is_causal": True,
}
IMAGENET64: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "head_dim": 64,
    "attn_layers": ["lsh"],
    "lsh_attn_chunk_length": 128,
    "num_buckets": 192,
    "num_hashes": 2,
    "hidden_act": "gelu_new",
    "norm_eps": 1e-6,
    "max_position_embeddings": 12_288,
    "stream_join": "concat",
    "axial_pos_shape": [64, 64, 3],
    "axial_pos_embds_dim": [384, 384, 256],
    "attention_dropout": 0.2,
    "is_causal": True,
}
COPY: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "attn_layers": ["lsh"],
    "lsh_attn_chunk_length": 64,
    "num_hashes": 4,
    "max_position_embeddings": 1024,
    "stream_join": "concat",
    "is_causal": True,
}


CHOICES = {
    "position_embedding_type": ("axial", "learned", "rope", "none"),
    "stream_join": ("mean", "concat"),
    "classifier_head": ("linear", "dense"),
}


@strict_config
class EfficientReformerConfig(GatedMLPFields, DropoutFields, OwnHeadDim, LibraryConfig, PreTrainedConfig):
    r"""Config of a Reformer: each token attends to tokens in the same hash bucket, or to its neighbours.

    The presets `enwik8`, `imagenet64` and `copy_task` are the authors' networks; every field can be changed on top.

    Args:
        attn_layers: "lsh" or "local" for each layer, or a shorter list that is repeated; None: "local" and "lsh" in
            turn.
        head_dim: width of a head; None: hidden_size / num_attention_heads.
        lsh_attn_chunk_length, local_attn_chunk_length: c, the length of a chunk in tokens.
        lsh_num_chunks_before, lsh_num_chunks_after, local_num_chunks_before, local_num_chunks_after: to how many chunks
            before and after their own the tokens of a chunk attend.
        local_wraps: whether the chunks of a bidirectional text form a ring, in which the last chunks come before the
            first one, as in transformers' Reformer. A chunk counts once, even if it is both before and after. Chunks of
            a causal text never form a ring.
        num_hashes: r, the number of hashing rounds. A trained model may be evaluated with more rounds.
        num_buckets: b, the number of buckets, an even number; or a list of even factors of it, which need fewer
            rotations. None: about 2 · max_position_embeddings / c, so that a bucket of the longest text has about c / 2
            tokens.
        hash_seed: seed of the rotations, which depend only on it and on the layer, and are the same at every call.
            None: evaluation has seed 0, and every training call draws new rotations from torch's generator, like
            dropout.
        attend_across_buckets: whether tokens of different buckets in the same or neighbouring chunks attend to each
            other (the authors' code); False: only tokens that share a bucket in a round do (their paper, equation 4).
        count_duplicates: whether a key that shares a chunk with the query in several rounds counts several times (the
            authors' code); False: it counts once (their paper, equation 16).
        chunk_by_bucket: whether chunks are cut within each bucket instead of across the sorted sequence; the first
            chunk of a bucket has none before it. Then the keys of a causal token depend only on the past, and cached
            generation equals the full forward pass. False is the authors' form, where the chunks of all rounds form one
            ring.
        is_causal: whether each token attends only to itself and the past; False: to both sides.
        stream_join: how the two streams are joined after the last layer: "mean": the last hidden state has the width
            hidden_size, as libraries expect; "concat": it is twice as wide, as in the authors' code, the presets, and
            checkpoints of transformers. `output_width` is this width.
        position_embedding_type: "axial", "learned", "rope" or "none".
        axial_pos_shape: n₁, n₂, …: position p becomes (p div n₂, p mod n₂), and texts have at most n₁·n₂ tokens. None:
            two numbers near √max_position_embeddings.
        axial_pos_embds_dim: how hidden_size is divided between the axes; None: evenly.
        axial_norm_std: initial standard deviation of axial positions.
        chunk_size_feed_forward, chunk_size_lm_head: how many tokens go through the MLP, or from the last hidden state
            to the loss, at once; 0: all. With the second, training makes no tensor of all logits, and returns none.
        norm_type, norm_eps, norm_bias: "layernorm" or "rmsnorm"; `norm_bias` is for layernorm.
        attention_bias, attention_output_bias, mlp_bias, lm_head_bias: whether there are biases in the projections of
            queries, keys and values; in the attention output; in the MLP; in the language modeling head.
        gated_mlp: whether the MLP computes act(x·W_gate) * (x·W_up).
        attention_dropout, lsh_attention_dropout: dropout of attention weights; the second is for LSH layers, None: the
            same as the first.
        classifier_head, classifier_activation: "linear"; or "dense", with a dense layer and this activation before it.
        classifier_pooling: the token that represents a sequence: "first", "last" or "mean"; None: "last" if causal,
            otherwise "mean".

    Raises:
        ConfigurationError: fields that exclude each other; the message lists what is allowed.

    Source: Kitaev et al., "Reformer: The Efficient Transformer" (arXiv:2001.04451).

    >>> config = EfficientReformerConfig(num_hidden_layers=4, max_position_embeddings=16_384)
    >>> config.layer_kinds, config.bucket_factors, config.axial_shape
    (('local', 'lsh', 'local', 'lsh'), (16, 32), (128, 128))
    """

    model_type = "efficient_reformer"
    papers = ("2001.04451",)
    # LSH layers have one projection for queries and keys
    lora_modules = ["q_proj", "qk_proj", "v_proj"]
    ia3_modules = ["k_proj", "qk_proj", "v_proj", "down_proj"]
    # scores of a head in a layer, for n tokens
    attention_cost = (
        "n · num_hashes · lsh_attn_chunk_length · (1 + lsh_num_chunks_before + lsh_num_chunks_after) in an LSH layer, "
        "n · local_attn_chunk_length · (1 + local_num_chunks_before + local_num_chunks_after) in a local layer"
    )

    vocab_size: int = 320
    hidden_size: int = 256
    intermediate_size: int = 512
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    head_dim: int | None = None
    is_causal: bool = False

    attn_layers: list[str] | tuple[str, ...] | None = None
    lsh_attn_chunk_length: int = 64
    lsh_num_chunks_before: int = 1
    lsh_num_chunks_after: int = 0
    local_attn_chunk_length: int = 64
    local_num_chunks_before: int = 1
    local_num_chunks_after: int = 0
    local_wraps: bool = False
    num_hashes: int = 1
    num_buckets: int | list[int] | tuple[int, ...] | None = None
    hash_seed: int | None = None
    attend_across_buckets: bool = True
    count_duplicates: bool = True
    chunk_by_bucket: bool = False
    lsh_attention_dropout: float | int | None = None

    stream_join: str = "mean"
    chunk_size_lm_head: int = 0
    hidden_act: str = "relu"
    mlp_bias: bool = True
    attention_bias: bool = False
    attention_output_bias: bool = False
    norm_type: str = "layernorm"
    norm_eps: float | int = 1e-12
    norm_bias: bool = True

    position_embedding_type: str = "axial"
    max_position_embeddings: int = 4096
    axial_pos_shape: list[int] | tuple[int, ...] | None = None
    axial_pos_embds_dim: list[int] | tuple[int, ...] | None = None
    axial_norm_std: float | int = 1.0
    rope_parameters: RopeParameters | dict | None = None
    initializer_range: float | int = 0.02

    lm_head_bias: bool = True
    classifier_pooling: str | None = None
    classifier_head: str = "linear"
    classifier_activation: str = "tanh"

    use_cache: bool = True
    tie_word_embeddings: bool = False
    pad_token_id: int | None = 0
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = 2
    sep_token_id: int | None = None

    @classmethod
    def enwik8(cls, **fields: Any) -> "EfficientReformerConfig":
        """Return the 12-layer network for texts of up to 65,536 bytes, as released: 149,182,722 parameters."""
        return cls(**{**ENWIK8, **fields})

    @classmethod
    def imagenet64(cls, **fields: Any) -> "EfficientReformerConfig":
        """Return the 6-layer network for images of 64 × 64 pixels in three colours, 12,288 tokens."""
        return cls(**{**IMAGENET64, **fields})

    @classmethod
    def copy_task(cls, **fields: Any) -> "EfficientReformerConfig":
        """Return the 1-layer network that copies 511 symbols (section 5 of the paper)."""
        return cls(**{**COPY, **fields})

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """The kind of every layer."""
        if self.attn_layers is None:
            return tuple(LSH if index % 2 else LOCAL for index in range(self.num_hidden_layers))
        part = tuple(self.attn_layers)
        return part * (self.num_hidden_layers // len(part))

    @property
    def output_width(self) -> int:
        """Width of the last hidden state: `hidden_size`, or twice as much with stream_join="concat"."""
        return 2 * self.hidden_size if self.stream_join == "concat" else self.hidden_size

    @property
    def bucket_factors(self) -> tuple[int, ...]:
        """The factors of the number of buckets.

        By default their product is the largest power of two up to 2 · max_position_embeddings / c, in two factors if it
        is large, as in the authors' code and in transformers; but it never depends on the text.
        """
        given = self.num_buckets
        if given is not None:
            return tuple(given) if isinstance(given, Sequence) else (given,)
        chunks = max(1, self.max_position_embeddings // self.lsh_attn_chunk_length)
        power = (2 * chunks).bit_length() - 1
        if 2**power > 2 * max(int(chunks**0.5), self.lsh_attn_chunk_length):
            return (2 ** (power // 2), 2 ** (power - power // 2))
        return (2**power,)

    @property
    def axial_shape(self) -> tuple[int, ...]:
        """The number of positions of each axis."""
        if self.axial_pos_shape is not None:
            return tuple(self.axial_pos_shape)
        first = 2 ** ((self.max_position_embeddings.bit_length() - 1) // 2)
        return (first, -(-self.max_position_embeddings // first))

    @property
    def axial_widths(self) -> tuple[int, ...]:
        """The width of each axis; the widths add up to hidden_size."""
        if self.axial_pos_embds_dim is not None:
            return tuple(self.axial_pos_embds_dim)
        axes = len(self.axial_shape)
        width = self.hidden_size // axes
        return (*[width] * (axes - 1), self.hidden_size - width * (axes - 1))

    @property
    def num_axial_positions(self) -> int:
        """The number of positions that the axes have together."""
        return prod(self.axial_shape)

    def check(self) -> None:
        """Raise ConfigurationError if no model can be built from these fields; write `head_dim` if it is None."""
        check_fields(self, CHOICES)
        check_attention(self)
        check_positions(self)
        check_streams(self)


__all__ = ["EfficientReformerConfig"]
