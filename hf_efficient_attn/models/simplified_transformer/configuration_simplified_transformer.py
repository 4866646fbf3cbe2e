"""Configuration of the simplified Transformer family: one config for six blocks."""

import difflib
from collections.abc import Iterable
from typing import Any

from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import RopeParameters

from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.integration.layer_patterns import FIELD, NAME
from hf_efficient_attn.integration.names import has_indexer
from hf_efficient_attn.messages import shown
from hf_efficient_attn.models.config.checks import check_fields, meant
from hf_efficient_attn.models.config.errors import strict_config
from hf_efficient_attn.models.config.fields import DropoutFields, GatedMLPFields, HeadSizes
from hf_efficient_attn.models.config.library import LibraryConfig, check_given_pattern
from hf_efficient_attn.models.spans.config import SpanFields, check_spans

from .gains import (
    BLOCK_STYLES,
    GAIN_SYMBOLS,
    PARALLEL_GAINS,
    REPARAMETERIZATION_GAINS,
    SEQUENTIAL_GAINS,
    BlockStyle,
    depth_scaled_mlp_gain,
)

# Checks of simplified Transformer configs: fields from which no model can be built, and their messages.


CHOICES = {
    "block": tuple(BLOCK_STYLES),
    "final_norm_type": (None, "rmsnorm", "layernorm"),
    "position_embedding_type": ("sinusoidal", "scaled_sinusoidal", "learned", "alibi", "rope", "none"),
    "attention_bias": ("none", "query_key", "all"),
    "matrix_init": (None, "normal", "orthogonal", "identity"),
    "matrix_init_tie": (None, "last_layer", "all_layers"),
}


def check_config(config: Any) -> None:
    """Raise ConfigurationError if no model can be built from the fields of a `SimplifiedTransformerConfig`."""
    check_fields(config, CHOICES)
    config.check_head_sizes()
    _check_key_value_heads(config)
    _check_gains(config)
    _check_matrices(config)
    _check_spans(config)
    check_given_pattern(config)


def _check_key_value_heads(config: Any) -> None:
    groups = config.key_value_heads
    if groups == config.num_attention_heads:
        return
    if groups < 1 or config.num_attention_heads % groups:
        raise ConfigurationError(
            f"num_key_value_heads={groups} does not divide num_attention_heads={config.num_attention_heads}."
        )
    if config.is_shaped or config.is_reparameterized or config.resolved_matrix_init != "normal":
        raise ConfigurationError(
            f"num_key_value_heads={groups} shares values among heads, but block={shown(config.block)} with "
            f"matrix_init={shown(config.resolved_matrix_init)} gives each of the {config.num_attention_heads} heads "
            "its own slice of a square value matrix. Leave num_key_value_heads unset, or use block='pre_ln' or "
            "'parallel' with plain matrices."
        )


def _check_gains(config: Any) -> None:
    foreign = SEQUENTIAL_GAINS if config.style.parallel else PARALLEL_GAINS
    for name in foreign:
        if getattr(config, name) is not None or name in (config.trainable_gains or ()):
            own = PARALLEL_GAINS if config.style.parallel else SEQUENTIAL_GAINS
            raise ConfigurationError(
                f"block={shown(config.block)} has no {name} ({GAIN_SYMBOLS[name]}); {' and '.join(own)} set its skip."
            )
    for name in config.trainable_gains or ():
        if name not in GAIN_SYMBOLS:
            raise ConfigurationError(unknown("gain in trainable_gains", name, GAIN_SYMBOLS))
    for name in ("attention_gain", "mlp_gain", "softmax_gain"):
        if config.gain(name) == 0 and not config.is_trainable(name):
            raise ConfigurationError(
                f"{name}=0 as a constant multiplies a branch by zero, so its parameters never get a gradient. Add "
                f"{shown(name)} to trainable_gains, or choose another value."
            )


def _check_matrices(config: Any) -> None:
    if config.resolved_matrix_init != "normal" or config.is_reparameterized:
        for name in ("matrix_init_std", "projection_init_std"):
            if getattr(config, name) is not None:
                raise ConfigurationError(
                    f"{name}={getattr(config, name)} is only for W^V and W^P with reparameterized=False and "
                    f"matrix_init='normal', but block={shown(config.block)} has "
                    f"reparameterized={config.is_reparameterized} and "
                    f"matrix_init={shown(config.resolved_matrix_init)}. Leave {name} unset, or set these two."
                )
    if not config.is_reparameterized:
        given = [name for name in REPARAMETERIZATION_GAINS if getattr(config, name) is not None]
        given += [name for name in ("first_value_gain", "last_projection_gain") if getattr(config, name) is not None]
        given += [name for name in config.trainable_gains or () if name in REPARAMETERIZATION_GAINS]
        if given:
            raise ConfigurationError(
                f"Only matrices W = a·W_init + b·ΔW have {', '.join(given)}, but "
                f"reparameterized={config.is_reparameterized} for block={shown(config.block)}. Set "
                "reparameterized=True."
            )
    if config.matrix_init_tie is not None and config.resolved_matrix_init != "orthogonal":
        raise ConfigurationError(
            f"matrix_init_tie={shown(config.matrix_init_tie)} needs orthogonal matrices, but they start as "
            f"{shown(config.resolved_matrix_init)}. Set matrix_init='orthogonal'."
        )
    if config.is_reparameterized and config.resolved_matrix_init == "normal":
        raise ConfigurationError(
            "matrix_init='normal' with reparameterized matrices: their W_init must be 'identity' or 'orthogonal'."
        )


def _check_spans(config: Any) -> None:
    if config.span is None:
        if config.frozen_spans is not None:
            raise ConfigurationError(
                "frozen_spans need span='adaptive', but span is None: every head attends to all tokens."
            )
        return
    check_spans(config)
    if config.position_embedding_type == "alibi":
        raise ConfigurationError(
            f"span={shown(config.span)} with position_embedding_type='alibi': ALiBi adds a bias to all pairs, which "
            "layers with spans do not compute. Use 'rope' or 'sinusoidal'."
        )
    if config.key_value_heads != config.num_attention_heads:
        raise ConfigurationError(
            f"span={shown(config.span)} with num_key_value_heads={config.key_value_heads}: heads with different spans "
            "cannot share keys. Leave num_key_value_heads unset."
        )


def gain_fields() -> list[str]:
    """Return the names of all config fields about gains."""
    return [*GAIN_SYMBOLS, "first_value_gain", "last_projection_gain", "per_head_gains", "trainable_gains"]


def unknown(what: str, value: object, allowed: Iterable[object]) -> str:
    """Return the message for a value that is not allowed, with the nearest one that is."""
    names = [str(name) for name in allowed]
    return f"Unknown {what}: {shown(value)}. Allowed: {', '.join(names)}.{meant(value, names)}"


# The paper's models, as presets of `SimplifiedTransformerConfig`.
#
# Each preset is a classmethod; keywords change or add fields. Source: He & Hofmann (arXiv:2311.01906), appendices C
# and D.


@strict_config
class SimplifiedTransformerConfig(
    SpanFields,
    GatedMLPFields,
    DropoutFields,
    HeadSizes,
    LibraryConfig,
    PreTrainedConfig,
):
    r"""Config of a Transformer with Pre-LN, parallel, V-SkipInit, SAS, SAS-P or norm-free SAS-P blocks.

    Every field left at None takes the paper's value for `block`; `gain()`, `is_trainable()` and `style` resolve them.
    Positions (RoPE) and activation (GELU) are not the paper's, because models learn more with them; the presets have
    the paper's.

    Args:
        block: `pre_ln`, `parallel` (one norm, one skip, attention parallel to MLP), `v_skipinit` (no attention skip,
            shaped attention, full W^V and W^P), `sas` (also W^V = W^P = I), `sas_p` (attention parallel to MLP, no skip
            at all), `sas_p_no_norm` (norms only before the first block and after the last).
        is_causal: whether each token attends only to itself and the past (language models); False: to the whole
            sequence (masked models).
        num_key_value_heads: number of groups of heads that share keys and values. Only `pre_ln` and `parallel` can use
            fewer than `num_attention_heads`, because in other blocks each head mixes its own slice of the values.
        hidden_act, leaky_relu_slope, gated_mlp: MLP activation, with `hidden_act="leaky_relu"` of that slope; a gated
            MLP is act(x·W_gate) * (x·W_up), both of width `intermediate_size`.
        norm_type, norm_eps, final_norm_type: `rmsnorm` or `layernorm`; the norm after the last block can differ.
        position_embedding_type: `rope`, `learned`, `sinusoidal`, `scaled_sinusoidal` (its scale is trained; crammed
            BERT), `alibi`, `none`. Only `learned` limits the length to `max_position_embeddings` tokens.
        attention_bias: which attention maps have a bias vector: `none`, `query_key` or `all`.
        query_init_std, key_init_std, matrix_init_std, projection_init_std, mlp_output_init_std: initial standard
            deviation of W^Q, of W^K, of plain normal W^V and W^P, of W^P alone, and of the last map of the MLP. By
            default W^Q starts at 0 in shaped attention; otherwise it and all others start with `initializer_range`.
            GPT-2 divides the deviations of W^P and of the last map of the MLP by √(2·layers).
        identity_gain, softmax_gain, centering_gain: α, β, γ of shaped attention α·I + β·A − γ·C, one per head. With an
            `attention_pattern` or `index`, C is also restricted to the allowed or selected keys.
        per_head_gains: whether each head has its own α, β, γ; False: the heads of a layer share them.
        attention_skip_gain, attention_gain, mlp_skip_gain, mlp_gain: α_SA, β_SA, α_FF, β_FF of sequential blocks.
        combined_skip_gain: gain of the single skip of parallel blocks, instead of the two skip gains above.
        reparameterized: W = a·W_init + b·ΔW for W^V and W^P, with ΔW = 0 at the start, instead of plain matrices.
        value_skip_gain, value_gain, projection_skip_gain, projection_gain: a_V, b_V, a_P, b_P. If b is 0, ΔW could
            never change and is left out; an identity with a = 1 and b = 0 has no module at all.
        first_value_gain, last_projection_gain: b_V of the first layer and b_P of the last one, if they differ from the
            others.
        matrix_init, matrix_init_tie: W_init (or the plain matrix) is normal, orthogonal or the identity. Orthogonal
            W_init can be tied: `last_layer` makes the product of all W^V·W^P the identity through the last W^P;
            `all_layers` sets every W^P to the inverse of its layer's W^V. `matrix_seed` draws the orthogonal ones.
        trainable_gains: names of the trained gains; the others are constants.
        classifier_pooling: what represents a sequence in classification: the `last` real token (default if causal),
            the `mean` over real tokens (default otherwise) or the `first`.
        span: how far heads attend; None: to all tokens; "adaptive", "dynamic" or "fixed": as in `AdaptiveSpanConfig`,
            with its fields `span_limit`, `span_ramp`, `span_penalty`, `span_init`, `dynamic_span_bias`, `frozen_spans`.
            C then has the same soft mask, so that A = C at the start still holds.

    Raises:
        ConfigurationError: an unknown block or gain, heads that do not divide `hidden_size`, or fields that exclude
            each other; the message lists what is allowed.

    Source: He & Hofmann, "Simplifying Transformer Blocks" (arXiv:2311.01906).

    >>> config = SimplifiedTransformerConfig(block="sas_p", num_hidden_layers=18)
    >>> config.gain("mlp_gain"), config.is_trainable("mlp_gain"), config.is_shaped
    (0.1, True, True)
    """

    model_type = "simplified_transformer"
    papers = ("2311.01906",)
    # maps that every block has; W^V may be missing or not an `nn.Linear`, and W^Q often starts at 0, where DoRA would
    # divide by 0
    lora_modules = ["k_proj", "up_proj", "down_proj"]
    ia3_modules = ["k_proj", "down_proj"]
    # the values of `block`
    blocks = tuple(BLOCK_STYLES)
    # layers call the attention interface of transformers, whose guard checks inputs and finds layers with a pattern
    checks_inputs = False
    follows_patterns = False
    can_shard_sequence = True
    # scores of a head in a layer, for n tokens
    attention_cost = "n² / 2 if causal, otherwise n²; with a span or attention_pattern only its pairs"

    vocab_size: int = 50_000
    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 18
    num_attention_heads: int = 12
    num_key_value_heads: int | None = None
    block: str = "sas_p"
    is_causal: bool = True

    hidden_act: str = "gelu"
    leaky_relu_slope: float | int = 0.01
    mlp_bias: bool = False
    norm_type: str = "rmsnorm"
    norm_eps: float | int = 1e-5
    final_norm_type: str | None = None

    position_embedding_type: str = "rope"
    max_position_embeddings: int = 1024
    rope_parameters: RopeParameters | dict | None = None

    attention_bias: str = "query_key"
    initializer_range: float | int = 0.02
    query_init_std: float | int | None = None
    key_init_std: float | int | None = None
    matrix_init_std: float | int | None = None
    projection_init_std: float | int | None = None
    mlp_output_init_std: float | int | None = None

    identity_gain: float | int | None = None
    softmax_gain: float | int | None = None
    centering_gain: float | int | None = None
    per_head_gains: bool = True
    attention_skip_gain: float | int | None = None
    attention_gain: float | int | None = None
    mlp_skip_gain: float | int | None = None
    mlp_gain: float | int | None = None
    combined_skip_gain: float | int | None = None
    trainable_gains: list[str] | tuple[str, ...] | None = None

    reparameterized: bool | None = None
    value_skip_gain: float | int | None = None
    value_gain: float | int | None = None
    first_value_gain: float | int | None = None
    projection_skip_gain: float | int | None = None
    projection_gain: float | int | None = None
    last_projection_gain: float | int | None = None
    matrix_init: str | None = None
    matrix_init_tie: str | None = None
    matrix_seed: int = 0

    classifier_pooling: str | None = None
    span: str | None = None
    use_cache: bool = True
    tie_word_embeddings: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    @classmethod
    def codeparrot_gpt(cls, block: str = "sas_p", **fields: Any) -> "SimplifiedTransformerConfig":
        """Return the paper's causal model (appendix D.1): 18 layers of 768, 12 heads, 50,000 tokens of vocabulary.

        With 72 layers pass `intermediate_size=1536`, as in the depth study. Like the authors' modules, this preset has
        a bias vector on every map and a LayerNorm at the end. The authors freeze the biases of W^V, W^P and the MLP at
        zero; here they are trained (`attention_bias="query_key", mlp_bias=False` leaves them out).
        """
        defaults: dict[str, Any] = {
            "hidden_act": "relu",
            "attention_bias": "all",
            "mlp_bias": True,
            "final_norm_type": "layernorm",
            "position_embedding_type": "learned",
        }
        return cls(**{**defaults, "block": block, **fields})

    @classmethod
    def crammed_bert(cls, block: str = "sas_p", **fields: Any) -> "SimplifiedTransformerConfig":
        """Return the paper's masked model (appendix D.2): 16 layers of 768, gated GELU MLP, LayerNorm, no biases."""
        defaults: dict[str, Any] = {
            "vocab_size": 32_768,
            "num_hidden_layers": 16,
            "intermediate_size": 1536,
            "is_causal": False,
            "hidden_act": "gelu",
            "gated_mlp": True,
            "norm_type": "layernorm",
            "norm_eps": 1e-12,
            "attention_bias": "none",
            "position_embedding_type": "scaled_sinusoidal",
            "max_position_embeddings": 128,
            "mlp_gain": None if block in ("pre_ln", "parallel") else 0.05,
        }
        return cls(**{**defaults, "block": block, **fields})

    @classmethod
    def languini_gpt(cls, block: str = "sas_p", **fields: Any) -> "SimplifiedTransformerConfig":
        """Return the paper's Languini-books model (v2, appendix C): 12 layers of 768, GELU, ALiBi, 512 tokens."""
        defaults: dict[str, Any] = {
            "vocab_size": 16_384,
            "num_hidden_layers": 12,
            "hidden_act": "gelu",
            "position_embedding_type": "alibi",
            "max_position_embeddings": 512,
        }
        return cls(**{**defaults, "block": block, **fields})

    def __post_init__(self, **kwargs: Any) -> None:
        for name in kwargs:
            if "gain" in name or difflib.get_close_matches(name, gain_fields(), cutoff=0.8):
                raise ConfigurationError(unknown("gain", name, gain_fields()))
        super().__post_init__(**kwargs)

    @property
    def default_implementation(self) -> str | None:
        """The name "efficient" if layers have spans, a pattern or indexers; None: the default of transformers."""
        is_own = self.span is not None or getattr(self, FIELD, None) is not None or has_indexer(self)
        return NAME if is_own else None

    @property
    def attention_notes(self) -> tuple[str, ...]:
        """What `explain` says about layers that compute the mean over their keys."""
        note = "Shaped attention also computes the mean over its keys, which costs the same again."
        return (note,) if self.is_centered and (getattr(self, FIELD, None) is not None or has_indexer(self)) else ()

    @property
    def style(self) -> BlockStyle:
        """The layout and the paper's values of `block`."""
        return BLOCK_STYLES[self.block]

    @property
    def include_self(self) -> bool:
        """Whether a token attends to itself; in these blocks it does, like the identity of shaped attention."""
        return True

    @property
    def sinusoid_amplitude(self) -> float:
        """The factor of sinusoidal positions, so that they are as large as the embeddings they are added to."""
        return self.initializer_range

    @property
    def num_attention_maps(self) -> int:
        """Number of maps hidden_size → hidden_size in the attention of all layers: W^Q, W^K, existing W^V and W^P."""
        layers = range(self.num_hidden_layers)
        return sum(4 - self.is_identity(layer, "value") - self.is_identity(layer, "projection") for layer in layers)

    def is_identity(self, layer_idx: int, matrix: str) -> bool:
        """Return whether a layer's W^V (`matrix="value"`) or W^P (`"projection"`) is the identity, without a module."""
        if not self.is_reparameterized or self.resolved_matrix_init != "identity":
            return False
        return self.gain(f"{matrix}_skip_gain", layer_idx) == 1 and self.gain(f"{matrix}_gain", layer_idx) == 0

    @property
    def is_reparameterized(self) -> bool:
        """Whether W^V and W^P are written a·W_init + b·ΔW."""
        return self.style.reparameterized if self.reparameterized is None else self.reparameterized

    @property
    def resolved_matrix_init(self) -> str:
        """How W^V and W^P (or their fixed part) start: `normal`, `orthogonal` or `identity`."""
        return self.matrix_init or self.style.matrix_init

    @property
    def is_shaped(self) -> bool:
        """Whether attention has an identity or a centring term besides the softmax."""
        return self.is_centered or self._is_active("identity_gain", 0.0)

    @property
    def is_centered(self) -> bool:
        """Whether attention subtracts the mean over the allowed keys."""
        return self._is_active("centering_gain", 0.0)

    @property
    def sends_more(self) -> bool:
        """Whether processes that share a text exchange more data in a layer than `explain` predicts."""
        return self.is_centered or self.position_embedding_type == "alibi"

    @property
    def has_head_gains(self) -> bool:
        """Whether attention is anything but the plain softmax."""
        return self.is_shaped or self._is_active("softmax_gain", 1.0)

    def _is_active(self, name: str, neutral: float) -> bool:
        return self.gain(name) != neutral or self.is_trainable(name)

    def gain(self, name: str, layer_idx: int | None = None) -> float:
        """Return the initial value of gain `name`, in layer `layer_idx` if layers differ.

        Raises:
            ConfigurationError: there is no gain of this name, or `block` does not have it.
        """
        if name not in GAIN_SYMBOLS:
            raise ConfigurationError(unknown("gain", name, GAIN_SYMBOLS))
        if name in REPARAMETERIZATION_GAINS:
            return self._matrix_gain(name, layer_idx)
        if name in (SEQUENTIAL_GAINS if self.style.parallel else PARALLEL_GAINS):
            raise ConfigurationError(f"block={shown(self.block)} has no {name} ({GAIN_SYMBOLS[name]}).")
        value = getattr(self, name)
        if value is None:
            value = self.style.gains[name]
        if value is None:
            return depth_scaled_mlp_gain(self.num_hidden_layers, self.hidden_size, self.intermediate_size)
        return value

    def _matrix_gain(self, name: str, layer_idx: int | None) -> float:
        override = None
        if name == "value_gain" and layer_idx == 0:
            override = self.first_value_gain
            if override is None and self.value_gain is None and self.style.reparameterized:
                override = 1.0  # the paper keeps W^V of the first layer
        if name == "projection_gain" and layer_idx == self.num_hidden_layers - 1:
            override = self.last_projection_gain
        if override is not None:
            return override
        value = getattr(self, name)
        return self.style.gains.get(name, 1.0) if value is None else value

    def is_trainable(self, name: str) -> bool:
        """Return whether gain `name` is a parameter (True) or a constant."""
        return name in (self.style.trainable if self.trainable_gains is None else self.trainable_gains)

    @property
    def structure(self) -> dict[str, Any]:
        """The resolved fields that decide which weights a model has; configs that differ here share no checkpoints."""
        names = ("block", "norm_type", "final_norm_type", "gated_mlp", "attention_bias", "mlp_bias", "per_head_gains")
        return {
            **{name: getattr(self, name) for name in names},
            "position_embedding_type": self.position_embedding_type,
            "num_key_value_heads": self.key_value_heads,
            "reparameterized": self.is_reparameterized,
            "matrix_init": self.resolved_matrix_init if self.is_reparameterized else None,
            "trainable_gains": sorted(name for name in GAIN_SYMBOLS if self.is_trainable(name)),
            "span": self.span if self.frozen_spans is None else "frozen",
        }

    def check(self) -> None:
        """Raise ConfigurationError if no model can be built from these fields."""
        check_config(self)


__all__ = ["SimplifiedTransformerConfig"]
