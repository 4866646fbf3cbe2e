"""The parts of a Transformer that none of these papers changes: norms, MLPs, plain softmax attention, cached states.

Shapes: B batch, T tokens, D head size, H heads, Q query tokens, K key tokens.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import repeat_kv

from hf_efficient_attn.errors import UnsupportedBackendError
from hf_efficient_attn.layout.tracing import autocast_states

# the same functions, computed in one pass over memory instead of eight
FUSED_ACTIVATIONS = {"gelu_new": "gelu_pytorch_tanh", "gelu_fast": "gelu_pytorch_tanh"}


class KeptInFloat32(nn.Module):
    """Base of modules whose parameters and buffers no cast makes narrower than float32.

    `.to(dtype)` and `.half()`, and their callers (Trainer's bf16_full_eval, DeepSpeed), go through `_apply`. For
    `from_pretrained`, a model sets `_keep_in_fp32_modules_strict`.
    """

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        def move(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)
            is_too_narrow = moved.is_floating_point() and moved.dtype.itemsize < torch.float32.itemsize
            return tensor.to(moved.device, torch.float32) if is_too_narrow else moved

        return super()._apply(move, recurse)  # type: ignore[no-untyped-call]


class RMSNorm(nn.RMSNorm):
    """torch's RMSNorm in the dtype of its weight: under autocast the input may be narrower, and torch would warn."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(self.weight.dtype))


NORMS: dict[str, type[nn.Module]] = {"rmsnorm": RMSNorm, "layernorm": nn.LayerNorm}


def build_norm(config: Any, kind: str | None = None, width: int | None = None) -> nn.Module:
    """Return a norm over `hidden_size` or another `width`, of the config's `norm_type` or of another `kind`.

    Reads from the config: `hidden_size`, `norm_eps`, and for `layernorm` also `norm_bias` (True if it has none).
    """
    kind = kind or config.norm_type
    bias = {} if kind == "rmsnorm" else {"bias": getattr(config, "norm_bias", True)}
    return NORMS[kind](config.hidden_size if width is None else width, eps=config.norm_eps, **bias)


def finite(hidden_states: torch.Tensor) -> torch.Tensor:
    """Return the states, in float16 clamped to the largest number minus 1,000, as in BART's encoder."""
    if hidden_states.dtype != torch.float16:
        return hidden_states
    limit = torch.finfo(torch.float16).max - 1000
    return hidden_states.clamp(-limit, limit)


class InitializedLinear(nn.Linear):
    """A linear map whose weight is initialised with N(0, `std`²); None: like every other linear map of the model."""

    def __init__(self, in_features: int, out_features: int, bias: bool, std: float | None = None) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.initial_std = std

    def initialize(self) -> None:
        if self.initial_std is not None:
            init.normal_(self.weight, std=self.initial_std)


def drop_rate(dropout: nn.Dropout) -> float:
    """Return the current dropout probability of attention weights; 0 in evaluation.

    It comes from a submodule, as in BERT, because code that sets every `nn.Dropout` to 0 (TRL) or to evaluation also
    means attention weights; such code would not change a number in the config.
    """
    return dropout.p if dropout.training else 0.0


class MLP(nn.Module):
    """Return W_down·act(W_up·x), or W_down·(act(W_gate·x) * W_up·x) if gated. [B, T, hidden] → same.

    Reads from the config: `hidden_size`, `intermediate_size`, `hidden_act`, `mlp_bias`, `activation_dropout`, and, if
    a config has it, `leaky_relu_slope`.

    output_std: W_down is initialised with N(0, output_std²); None: like every other map.
    """

    def __init__(self, config: Any, is_gated: bool = False, output_std: float | None = None) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(hidden, inner, bias=bias) if is_gated else None
        self.up_proj = nn.Linear(hidden, inner, bias=bias)
        self.down_proj = InitializedLinear(inner, hidden, bias, output_std)
        name = FUSED_ACTIVATIONS.get(config.hidden_act, config.hidden_act)
        slope = getattr(config, "leaky_relu_slope", None)
        self.act_fn = ACT2FN[name] if name != "leaky_relu" or slope is None else nn.LeakyReLU(slope)
        self.dropout = nn.Dropout(config.activation_dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.gate_proj is not None:
            return self.down_proj(self.dropout(self.act_fn(self.gate_proj(x)) * self.up_proj(x)))
        return self.down_proj(self.dropout(self.act_fn(self.up_proj(x))))


class Block(GradientCheckpointingLayer):
    """Base of blocks: attention and an MLP, each with a skip, and a norm after it (post-norm) or before it (pre-norm).

    Post-norm: x ← N(x + f(x)), as in Vaswani et al. (arXiv:1706.03762), BERT and RoBERTa. Pre-norm: x ← x + f(N(x)).

    Reads from the config: `norm_position`, `hidden_dropout`, and what norms and MLP read.

    Args:
        cross_attention: attention to another sequence, between attention and MLP; None: there is none.
        has_first_norm: whether the attention has a norm.
    """

    def __init__(
        self,
        config: Any,
        attention: nn.Module,
        is_gated: bool = False,
        cross_attention: nn.Module | None = None,
        has_first_norm: bool = True,
    ) -> None:
        super().__init__()
        self.is_pre_norm = config.norm_position == "pre"
        self.self_attn = attention
        self.attention_norm = build_norm(config) if has_first_norm else nn.Identity()
        if cross_attention is not None:
            self.cross_attn, self.cross_norm = cross_attention, build_norm(config)
        self.mlp, self.mlp_norm = MLP(config, is_gated), build_norm(config)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def before(self, states: Tensor, norm: nn.Module) -> Tensor:
        """Return the input of a part of the block, normed if pre-norm, [B, T, hidden_size] → the same."""
        return norm(states) if self.is_pre_norm else states

    def after(self, states: Tensor, added: Tensor, norm: nn.Module) -> Tensor:
        """Return the states plus the output of a part of the block, normed if post-norm."""
        states = states + self.dropout(added)
        return states if self.is_pre_norm else norm(states)

    def feed(self, states: Tensor, mlp: nn.Module | None = None, norm: nn.Module | None = None) -> Tensor:
        """Return the states after the MLP; `mlp` and `norm` may replace those of the block."""
        mlp, norm = self.mlp if mlp is None else mlp, self.mlp_norm if norm is None else norm
        return finite(self.after(states, mlp(self.before(states, norm)), norm))


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return softmax attention and its weights, computed densely, for `attn_implementation="eager"`.

    Shapes: query [B, H, Q, D]; key and value [B, H or groups, K, D] → [B, Q, H, D] and [B, H, Q, K].
    """
    key = repeat_kv(key, module.num_key_value_groups)
    value = repeat_kv(value, module.num_key_value_groups)
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    if position_bias is not None:
        scores = scores + position_bias
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    elif attention_mask is not None:
        scores = scores + attention_mask
    wide = torch.promote_types(scores.dtype, torch.float32)
    weights = nn.functional.softmax(scores, dim=-1, dtype=wide).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


# Appending new keys and values to a cache, whatever their dtypes.


def append_to_cache(cache: Cache, key: Tensor, value: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
    """Return keys and values of cached and new tokens, [B, H, K, D], in the dtypes of the new ones.

    Under autocast they are returned in its dtype, to which attention would cast them anyway. A cache layer keeps the
    dtype of its first keys, because the buffers of a static cache cannot change theirs.
    """
    key, value = autocast_states(key, value)
    held = held_dtype(cache, layer_idx) or key.dtype
    keys, values = cache.update(key.to(held), value.to(held), layer_idx)
    return keys.to(key.dtype), values.to(value.dtype)


def held_dtype(cache: Cache, layer_idx: int) -> torch.dtype | None:
    """Return the dtype of the keys that a layer holds; None: it holds none yet."""
    if layer_idx >= len(cache.layers):
        return None
    keys = cache.layers[layer_idx].keys
    return None if keys is None else keys.dtype


def check_cached(
    cache: Cache, layer_idx: int, why: str, keys: tuple[int | None, int | None], values: Any = (None, None)
) -> None:
    """Raise UnsupportedBackendError if a cache was filled by code that does not know what a layer keeps.

    Args:
        why: what the layer keeps, in words.
        keys, values: the expected number of heads, and the head size; None: any.
    """
    layer = cache.layers[layer_idx] if layer_idx < len(cache.layers) else None
    for name, wanted in (("keys", keys), ("values", values)):
        held = getattr(layer, name, None)
        if held is None or held.ndim != 4 or not held.shape[2]:
            continue
        found = (held.shape[1], held.shape[3])
        if any(each is not None and each != own for each, own in zip(wanted, found, strict=True)):
            raise UnsupportedBackendError(
                f"The cache holds {name} with {found[0]} heads of size {found[1]}, but layer {layer_idx} keeps {why}. "
                "Prefix tuning cannot provide this; use prompt tuning or LoRA instead."
            )


# Parameters under DeepSpeed's ZeRO: in shards (stage 3), or copies of separate weights that ZeRO trains.


def is_in_shards(parameter: nn.Parameter) -> bool:
    """Return whether a parameter is empty now because processes hold it in shards."""
    return parameter.shape != getattr(parameter, "ds_shape", parameter.shape)


def is_a_copy(parameter: nn.Parameter) -> bool:
    """Return whether the optimizer trains separate weights, and copies them to the parameter after each step."""
    return parameter.requires_grad and (hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping"))


def are_released_by_layers(parameters: Iterable[nn.Parameter]) -> bool:
    """Return whether parameters are whole only while their layer runs: the third stage of ZeRO holds them in shards."""
    return any(hasattr(parameter, "ds_id") for parameter in parameters)


def gathered(parameters: Iterable[nn.Parameter]) -> AbstractContextManager:
    """Return a context in which parameters are whole; on exit, all processes get those of the first process.

    All processes must enter it.
    """
    held = [parameter for parameter in parameters if hasattr(parameter, "ds_id")]
    if not held:
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(held, modifier_rank=0)  # type: ignore[no-any-return]
