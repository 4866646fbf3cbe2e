"""Configuration of the Transformer with adaptive attention span."""

from typing import Any

from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import RopeParameters

from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.models.config.checks import check_fields
from hf_efficient_attn.models.config.errors import strict_config
from hf_efficient_attn.models.config.fields import DropoutFields, GatedMLPFields, HeadSizes, NormFields
from hf_efficient_attn.models.config.library import LibraryConfig, check_given_pattern
from hf_efficient_attn.models.spans.config import SpanFields, check_spans

# The authors' networks, as fields of `AdaptiveSpanConfig`; keywords of the presets change or add fields.
#
# The paper does not give the vocabularies of 28 and 205 symbols, which include an end of line. With them, the parameter
# counts agree with the rounded counts in the paper.


SMALL: dict[str, Any] = {"span_penalty": 5e-7, "activation_dropout": 0.3, "attention_dropout": 0.3}
LARGE: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "span_penalty": 5e-7,
    "activation_dropout": 0.4,
    "attention_dropout": 0.4,
}
TEXT8, ENWIK8 = {"vocab_size": 28}, {"vocab_size": 205}


CHOICES = {
    "position_embedding_type": ("relative_keys", "rope", "none"),
    "matrix_init": ("normal", "uniform"),
}


@strict_config
class AdaptiveSpanConfig(
    SpanFields, NormFields, GatedMLPFields, DropoutFields, HeadSizes, LibraryConfig, PreTrainedConfig
):
    r"""Config of a Transformer whose heads learn their attention span.

    The presets `text8_small`, `text8_large`, `enwik8_small`, `enwik8_large` and `enwik8_demo` are the authors'
    networks, `modern` is a pre-norm network with rotary positions; every field can be changed on top.

    Args:
        span: "adaptive": a learned span per head; "dynamic": a span that is predicted for every token; "fixed": the
            span limit.
        span_limit: the longest span S, in tokens. To change it in a trained model, see `set_span_limit`.
        span_ramp: R, the number of tokens over which the mask falls from 1 to 0 beyond the span.
        span_penalty: λ; training minimises the mean loss of a token in nats plus λ · Σ over layers of the mean span of
            the heads in tokens (R not counted).
        span_init: initial value of learned spans, as a fraction of the limit.
        dynamic_span_bias: initial b of a dynamic span S · sigmoid(v·x + b); v starts at 0.
        include_self: whether a token attends to itself; None: only if the model is bidirectional. In the authors'
            network a token attends only to earlier tokens.
        frozen_spans: spans in tokens that are no longer trained, one list per layer with one number per head; see
            `freeze_spans`.
        is_causal: whether tokens attend only to the past; False: to both sides, with a ramp on each side.
        position_embedding_type: "relative_keys", a trained vector per distance added to the keys, shared by heads and
            layers (causal only); "rope"; "none".
        norm_position, norm_type, norm_eps, norm_bias: "post", or "pre" with another norm after the last block;
            "layernorm" or "rmsnorm"; `norm_bias` is for layernorm.
        attention_bias, attention_output_bias, mlp_bias, lm_head_bias: bias vectors of query, key and value; attention
            output; MLP; vocabulary.
        gated_mlp: whether the MLP computes act(x·W_gate) * (x·W_up).
        activation_dropout, attention_dropout: dropout of the MLP's inner activations and of attention weights.
        matrix_init: initialisation of matrices: "normal", N(0, initializer_range²), or "uniform", ±1/√(inputs), as in
            torch's linear layers.
        embedding_init_std: initial standard deviation of embeddings; None: initializer_range.
        classifier_pooling: the token that represents a sequence: "first", "last" or "mean"; None: "last" if causal,
            otherwise "mean".

    Raises:
        ConfigurationError: fields that exclude each other; the message lists what is allowed.

    Source: Sukhbaatar et al., "Adaptive Attention Span in Transformers" (arXiv:1905.07799).

    >>> AdaptiveSpanConfig.enwik8_demo().span_limit
    1024
    """

    model_type = "adaptive_span"
    papers = ("1905.07799",)
    can_shard_sequence = True
    # scores of a head in a layer, for n tokens
    attention_cost = "n · (span + span_ramp) with the span of the head, at most n · span_limit"

    vocab_size: int = 256
    hidden_size: int = 512
    intermediate_size: int = 2048
    num_hidden_layers: int = 12
    num_attention_heads: int = 8
    is_causal: bool = True

    span: str = "adaptive"
    span_limit: int = 8192
    include_self: bool | None = None

    hidden_act: str = "relu"
    mlp_bias: bool = True
    attention_bias: bool = False
    attention_output_bias: bool = False

    position_embedding_type: str = "relative_keys"
    rope_parameters: RopeParameters | dict | None = None
    max_position_embeddings: int = 8192
    matrix_init: str = "uniform"
    embedding_init_std: float | int | None = 1.0
    initializer_range: float | int = 0.02

    lm_head_bias: bool = True
    classifier_pooling: str | None = None

    use_cache: bool = True
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    @classmethod
    def text8_small(cls, **fields: Any) -> "AdaptiveSpanConfig":
        """Return the 12-layer network for text8: 38,357,116 parameters, span limit 8,192.

        Source: Sukhbaatar et al. (arXiv:1905.07799), section 3, and the authors' scripts.
        """
        return cls(**{**SMALL, **TEXT8, **fields})

    @classmethod
    def text8_large(cls, **fields: Any) -> "AdaptiveSpanConfig":
        """Return the 24-layer network for text8: 208,638,172 parameters; for the source see `text8_small`."""
        return cls(**{**LARGE, **TEXT8, **fields})

    @classmethod
    def enwik8_small(cls, **fields: Any) -> "AdaptiveSpanConfig":
        """Return the 12-layer network for enwik8: 38,538,541 parameters; for the source see `text8_small`."""
        return cls(**{**SMALL, **ENWIK8, **fields})

    @classmethod
    def enwik8_large(cls, **fields: Any) -> "AdaptiveSpanConfig":
        """Return the 24-layer network for enwik8: 208,910,221 parameters; for the source see `text8_small`."""
        return cls(**{**LARGE, **ENWIK8, **fields})

    @classmethod
    def enwik8_demo(cls, **fields: Any) -> "AdaptiveSpanConfig":
        """Return the small network of the authors' script for one GPU: 8 layers, 4 heads; 6,480,621 parameters.

        The span limit is 1,024.
        """
        shape = {
            "hidden_size": 256,
            "intermediate_size": 1024,
            "num_hidden_layers": 8,
            "num_attention_heads": 4,
            "span_limit": 1024,
            "span_penalty": 2e-6,
        }
        return cls(**{**shape, **ENWIK8, **fields})

    @classmethod
    def modern(cls, **fields: Any) -> "AdaptiveSpanConfig":
        """Return a modern network: pre-norm RMSNorm, gated MLP, rotary positions; a token attends to itself.

        No paper trains it; spans and penalty work as in the authors' network.
        """
        preset: dict[str, Any] = {
            "include_self": True,
            "norm_position": "pre",
            "norm_type": "rmsnorm",
            "hidden_act": "silu",
            "gated_mlp": True,
            "mlp_bias": False,
            "lm_head_bias": False,
            "position_embedding_type": "rope",
            "matrix_init": "normal",
            "embedding_init_std": None,
            "tie_word_embeddings": True,
        }
        return cls(**{**preset, **fields})

    @property
    def num_attention_maps(self) -> int:
        """Number of projections hidden_size → hidden_size in the attention of all layers."""
        return 4 * self.num_hidden_layers

    def check(self) -> None:
        """Raise ConfigurationError if no model can be built from these fields; write `frozen_spans` in JSON types."""
        check_fields(self, CHOICES)
        self.check_head_sizes()
        check_spans(self)
        check_given_pattern(self)
        if self.position_embedding_type == "relative_keys" and not self.is_causal:
            raise ConfigurationError(
                "position_embedding_type='relative_keys' has vectors only for distances to earlier tokens; with "
                "is_causal=False use 'rope' or 'none'."
            )


__all__ = ["AdaptiveSpanConfig"]
