"""Fields and values that the configs of several families share, as mixins; each family's config explains them."""

import inspect
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.models.config.checks import check_heads, check_least

# kinds of positions that are pairs of a sine and a cosine
SINUSOIDS = ("sinusoidal", "scaled_sinusoidal", "relative")


class RopeCheck:
    """Mixin that decides when rotary positions are checked."""

    head_dim: int
    position_embedding_type: str

    def validate_rope(self) -> None:
        """Validate as transformers does, but allow odd head sizes without rotation, as a routing preset has them."""
        if self.position_embedding_type == "rope" or self.head_dim % 2 == 0:
            super().validate_rope()


class HeadSizes(RopeCheck):
    """Mixin: what follows from `hidden_size`, `num_attention_heads` and, if any, `num_key_value_heads`."""

    hidden_size: int
    num_attention_heads: int

    @property
    def head_dim(self) -> int:
        """Width of a head in numbers: `hidden_size` / `num_attention_heads`."""
        return self.hidden_size // self.num_attention_heads

    @property
    def key_value_heads(self) -> int:
        """Number of key heads; that of query heads, unless the config gives a number."""
        named = getattr(self, "num_key_value_heads", None)
        return self.num_attention_heads if named is None else named

    def check_head_sizes(self) -> None:
        """Raise ConfigurationError if the heads do not divide the width, or positions need an even size."""
        check_heads(self.hidden_size, self.num_attention_heads, "hidden_size", "num_attention_heads")
        if self.position_embedding_type == "rope" and self.head_dim % 2:
            raise ConfigurationError(f"Rotary positions need an even head size, not {self.head_dim}.")
        if self.position_embedding_type in SINUSOIDS and self.hidden_size % 2:
            raise ConfigurationError(f"Sinusoidal positions need an even hidden_size, not {self.hidden_size}.")


class OwnHeadDim(RopeCheck):
    """Mixin: heads whose size is a field, and which share no keys."""

    hidden_size: int
    num_attention_heads: int
    head_dim: Any

    @property
    def key_value_heads(self) -> int:
        """Number of key heads, equal to that of query heads."""
        return self.num_attention_heads

    def check_head_sizes(self) -> None:
        """Raise ConfigurationError for a `head_dim` below 1; set it if it is None."""
        if self.head_dim is None:
            check_heads(self.hidden_size, self.num_attention_heads, "hidden_size", "num_attention_heads")
            self.head_dim = self.hidden_size // self.num_attention_heads
        check_least(self, head_dim=1)


# the dropouts of BERT and RoBERTa
BERT_DROPOUT = dict.fromkeys(("embedding_dropout", "hidden_dropout", "attention_dropout", "classifier_dropout"), 0.1)


@dataclass(init=False, repr=False, eq=False)
class BertFields:
    """Mixin: the sizes of BERT-base, its heads and special tokens; each family's config explains the fields."""

    vocab_size: int = 30_522
    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    is_causal: bool = False
    norm_eps: float | int = 1e-12

    lm_head_transform: bool = True
    lm_head_bias: bool = True
    lm_transform_activation: str | None = None
    classifier_head: str = "linear"
    classifier_activation: str = "tanh"

    tie_word_embeddings: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    sep_token_id: int | None = None

    @property
    def transform_activation(self) -> str:
        """The activation of the dense map before the projection to the vocabulary."""
        own: str = self.hidden_act  # type: ignore[attr-defined]
        return own if self.lm_transform_activation is None else self.lm_transform_activation


@dataclass(init=False, repr=False, eq=False)
class DropoutFields:
    """Probabilities of dropout in training; each is an `nn.Dropout` of the model."""

    embedding_dropout: float | int = 0.0
    hidden_dropout: float | int = 0.0
    activation_dropout: float | int = 0.0
    attention_dropout: float | int = 0.0
    classifier_dropout: float | int = 0.0


@dataclass(init=False, repr=False, eq=False)
class NormFields:
    """Where the norms of a block are, "post" or "pre", and their kind."""

    norm_position: str = "post"
    norm_type: str = "layernorm"
    norm_eps: float | int = 1e-5
    norm_bias: bool = True


@dataclass(init=False, repr=False, eq=False)
class GatedMLPFields:
    """Whether the MLP has a gate, and how tensor parallelism shards it."""

    # attention, which may have no output matrix to reduce over, is replicated
    base_model_tp_plan = {"layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}

    gated_mlp: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        if self.gated_mlp:
            self.base_model_tp_plan = {**self.base_model_tp_plan, "layers.*.mlp.gate_proj": "colwise"}
        parent: Any = super()
        parent.__post_init__(**kwargs)


def own_fields(cls: Any) -> set[str]:
    """Return the fields that a config class, or one of our classes that it inherits from, declares.

    >>> from hf_efficient_attn import SparseTransformerConfig
    >>> {"attention_pattern", "pad_token_id"} <= own_fields(SparseTransformerConfig)
    True
    """
    classes = cls.__mro__[: cls.__mro__.index(PreTrainedConfig)]
    return {name for parent in classes for name in inspect.get_annotations(parent)}


# Fields of the configs with blocks of `sparse/attention.py`; each family's config explains them.


@dataclass(init=False, repr=False, eq=False)
class BlockFields(NormFields):
    """Mixin: the block of `sparse/attention.py`, and the embeddings before the first one."""

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
class BertBlockFields(BertFields, BlockFields):
    """Mixin: `BertFields` and `BlockFields`, and the heads of a family of encoders and causal decoders."""

    num_key_value_heads: int | None = None
    type_vocab_size: int = 0
    lm_transform_bias: bool = True
    classifier_pooling: str | None = None
    question_answering_head: str = "linear"
    question_answering_excludes_question: bool = False
    use_cache: bool = True


@dataclass(init=False, repr=False, eq=False)
class SparseFields(BlockFields):
    """Mixin: `BlockFields`, and which keys the layers attend to."""

    attention_pattern: Any = None
    global_tokens: Any = None
    global_projections: bool = False
    max_global_tokens: int = 128
    random_blocks_in_eval: str = "fixed"
    full_attention_up_to: int | None = None


class PatternAlone:
    """Mixin for configs with a pattern but none of the other fields of `SparseFields`."""

    global_tokens = None
    global_projections = False
    random_blocks_in_eval = "fixed"
    full_attention_up_to = None
