"""Base of the attention modules of all families: sizes, heads, dropout of weights, and requests to the engine.

Shapes: B rows, N tokens, H heads, D head size.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from hf_efficient_attn.attention.build_call import LayerPattern
from hf_efficient_attn.attention.explanation import LayerRequest
from hf_efficient_attn.errors import UnsupportedBackendError
from hf_efficient_attn.integration.layer_patterns import part_of
from hf_efficient_attn.models.base import backend_of
from hf_efficient_attn.models.inputs import LayerInputs
from hf_efficient_attn.models.parts.blocks import drop_rate


class MultiHeadAttention(nn.Module):
    """Base of the attention modules of the families.

    Reads from the config: `num_attention_heads`, `head_dim`, `is_causal`, `attention_dropout`, and for `make_maps` also
    `hidden_size`, `attention_bias` and `attention_output_bias`.

    Args:
        is_causal: whether tokens attend only to themselves and the past; None: as the config says.
        dropout: the dropout probability of attention weights; None: `attention_dropout`.
    """

    def __init__(
        self, config: Any, layer_idx: int, is_causal: bool | None = None, dropout: float | None = None
    ) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.head_dim, self.num_heads = config.head_dim, config.num_attention_heads
        self.scaling = config.head_dim**-0.5
        self.is_causal = config.is_causal if is_causal is None else is_causal
        self.dropout = nn.Dropout(config.attention_dropout if dropout is None else dropout)

    def make_maps(self, key_width: int | None = None) -> None:
        """Create the projections of queries, keys, values and output.

        key_width: the width of keys and values; None: that of the queries.
        """
        hidden, width, bias = self.config.hidden_size, self.num_heads * self.head_dim, self.config.attention_bias
        key_width = width if key_width is None else key_width
        self.q_proj = nn.Linear(hidden, width, bias=bias)
        self.k_proj, self.v_proj = (nn.Linear(hidden, key_width, bias=bias) for _ in range(2))
        self.o_proj = nn.Linear(width, hidden, bias=self.config.attention_output_bias)

    def heads(self, states: Tensor) -> Tensor:
        """Return [B, N, H · D] as [B, H, N, D]."""
        return states.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def needs_weights(self, options: Mapping[str, Any]) -> bool:
        """Return whether a call with these options asks for attention weights."""
        return bool(options.get("output_attentions", self.config.output_attentions))

    def engine_options(self, inputs: LayerInputs, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of `attend_layer` that are the same for all heads.

        options: the call's other arguments.
        """
        return {
            "tokens": inputs.token_mask,
            "query_offset": inputs.query_offset,
            "matrix": inputs.matrix,
            "dropout": drop_rate(self.dropout),
            "need_weights": self.needs_weights(options),
            "backend": backend_of(self.config),
        }

    def request(
        self, layer_spec: LayerPattern, num_heads: int | None = None, num_key_heads: int | None = None, **fields: Any
    ) -> LayerRequest:
        """Return what the module asks the engine for.

        Args:
            num_heads: None: all heads of the module.
            num_key_heads: None: `num_heads`.
            fields: further fields of the request.
        """
        num_heads = self.num_heads if num_heads is None else num_heads
        num_key_heads = num_heads if num_key_heads is None else num_key_heads
        own = {"part": part_of(self), "is_causal": self.is_causal, "layer": self.layer_idx}
        sizes = (num_heads, num_key_heads, self.head_dim, self.head_dim)
        return LayerRequest(layer_spec, *sizes, self.config, **{**own, "backend": backend_of(self.config), **fields})


class AsksNothing:
    """Mixin of attention modules that compute their scores themselves."""

    def costs(self, num_keys: int) -> str:
        """Return a sentence that says what a head computes for `num_keys` tokens."""
        raise NotImplementedError

    def layer_request(self, num_keys: int, task: str | None) -> LayerRequest:
        """Raise, because these modules ask the engine for nothing.

        Raises:
            UnsupportedBackendError: always; it says what is computed instead.
        """
        raise UnsupportedBackendError(f"{self.costs(num_keys)} The layer computes them itself, without a backend.")
