"""Gains, and the value and projection matrices W^V and W^P: plain, reparameterised, or not there at all.

Source: He & Hofmann (arXiv:2311.01906), equation 6 and appendix C. The authors keep W_init outside the state dict, so
that their orthogonal runs cannot be reloaded; here it is a persistent buffer.
"""

import torch
from torch import nn
from transformers import initialization as init

from hf_efficient_attn.models.parts.blocks import InitializedLinear

from .configuration_simplified_transformer import SimplifiedTransformerConfig


class Gain(nn.Module):
    """Multiply by one number, or by one number per head: a parameter if trained, otherwise a constant.

    Shapes: with `num_heads` [..., H, D] → the same; without, any shape → the same.
    """

    def __init__(self, config: SimplifiedTransformerConfig, name: str, layer_idx: int, num_heads: int = 1) -> None:
        super().__init__()
        self.value = config.gain(name, layer_idx)
        self.gain = nn.Parameter(torch.full((num_heads,), float(self.value))) if config.is_trainable(name) else None

    @property
    def is_zero(self) -> bool:
        """Whether this is the constant 0, so that the term it scales can be left out."""
        return self.gain is None and self.value == 0

    def initialize(self) -> None:
        if self.gain is not None:
            init.constant_(self.gain, self.value)

    def forward(self, x: torch.Tensor, onto: torch.Tensor | None = None, sign: int = 1) -> torch.Tensor:
        """Return gain·x, or onto + sign·gain·x in one pass (`onto` itself where the gain is the constant 0)."""
        if self.gain is None:
            if onto is not None:
                return onto if self.is_zero else torch.add(onto, x, alpha=sign * self.value)
            return x if self.value == 1 else x * self.value
        gain = self.gain.to(x.dtype)
        gain = gain if len(gain) == 1 else gain.unsqueeze(-1)
        return x * gain if onto is None else torch.addcmul(onto, x, gain, value=sign)

    def extra_repr(self) -> str:
        return f"{self.value}, trainable={self.gain is not None}"


class ReparameterizedLinear(nn.Module):
    """Return x·(a·W_init + b·ΔW) with W_init fixed (identity or orthogonal) and ΔW = 0 at the start.

    ΔW exists only where b can be other than 0. Shapes: [..., hidden_size] → [..., hidden_size].
    """

    def __init__(self, config: SimplifiedTransformerConfig, layer_idx: int, matrix: str) -> None:
        super().__init__()
        self.config, self.layer_idx, self.matrix = config, layer_idx, matrix
        size = config.hidden_size
        self.skip_gain = Gain(config, f"{matrix}_skip_gain", layer_idx)
        self.is_identity = config.resolved_matrix_init == "identity"
        if not self.is_identity:
            self.register_buffer("initial_weight", torch.empty(size, size))
        self.weight = None
        if config.gain(f"{matrix}_gain", layer_idx) != 0:
            self.weight = nn.Parameter(torch.zeros(size, size))
            self.update_gain = Gain(config, f"{matrix}_gain", layer_idx)
        self.bias = (
            nn.Parameter(torch.zeros(size)) if config.attention_bias == "all" and self.weight is not None else None
        )

    def initialize(self) -> None:
        if self.weight is not None:
            init.zeros_(self.weight)
        if self.bias is not None:
            init.zeros_(self.bias)
        if not self.is_identity:
            init.copy_(self.initial_weight, initial_matrix(self.config, self.layer_idx, self.matrix))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_identity:
            out = self.skip_gain(x)
            if self.weight is None:
                return out
            return out + nn.functional.linear(x, self.update_gain(self.weight), self.bias)
        return nn.functional.linear(x, self.effective_weight(), self.bias)

    def effective_weight(self) -> torch.Tensor:
        """Return a·W_init + b·ΔW as `nn.Linear` would hold it. Shape [hidden_size, hidden_size]."""
        size = self.config.hidden_size
        device = next((tensor.device for tensor in [*self.parameters(), *self.buffers()]), None)
        initial = torch.eye(size, device=device) if self.is_identity else self.initial_weight
        weight = self.skip_gain(initial)
        return weight if self.weight is None else weight + self.update_gain(self.weight)


class SquareLinear(nn.Linear):
    """A plain W^V or W^P of `hidden_size`² that starts orthogonal or as the identity."""

    def __init__(self, config: SimplifiedTransformerConfig, layer_idx: int, matrix: str) -> None:
        super().__init__(config.hidden_size, config.hidden_size, bias=config.attention_bias == "all")
        self.config, self.layer_idx, self.matrix = config, layer_idx, matrix

    def initialize(self) -> None:
        init.copy_(self.weight, initial_matrix(self.config, self.layer_idx, self.matrix))


def build_projection(config: SimplifiedTransformerConfig, layer_idx: int, matrix: str) -> nn.Module | None:
    """Return the module that applies W^V (`matrix="value"`) or W^P (`"projection"`), or None for the identity."""
    if config.is_identity(layer_idx, matrix):
        return None
    if config.is_reparameterized:
        return ReparameterizedLinear(config, layer_idx, matrix)
    if config.resolved_matrix_init != "normal":
        return SquareLinear(config, layer_idx, matrix)
    sizes = (config.hidden_size, config.hidden_size)
    if matrix == "value":
        sizes = (config.hidden_size, config.head_dim * config.key_value_heads)
    return InitializedLinear(*sizes, bias=config.attention_bias == "all", std=config.matrix_init_std)


def initial_matrix(config: SimplifiedTransformerConfig, layer_idx: int, matrix: str) -> torch.Tensor:
    """Return W_init of one matrix, in `nn.Linear`'s orientation: a pure function of the config.

    Shape [hidden_size, hidden_size], float32, on the CPU. The tie `last_layer` recomputes all layers' matrices.
    """
    if config.resolved_matrix_init == "identity":
        return torch.eye(config.hidden_size, device="cpu")
    last = config.num_hidden_layers - 1
    if matrix == "projection" and config.matrix_init_tie == "all_layers":
        return _orthogonal(config, layer_idx, "value").T.contiguous()
    if matrix == "projection" and config.matrix_init_tie == "last_layer" and layer_idx == last:
        product = torch.eye(config.hidden_size, dtype=torch.float64, device="cpu")
        for layer in range(config.num_hidden_layers):
            product = _orthogonal(config, layer, "value").double() @ product
            if layer < last:
                product = _orthogonal(config, layer, "projection").double() @ product
        return product.T.float().contiguous()
    return _orthogonal(config, layer_idx, matrix)


def _orthogonal(config: SimplifiedTransformerConfig, layer_idx: int, matrix: str) -> torch.Tensor:
    seed = (config.matrix_seed * config.num_hidden_layers + layer_idx) * 2 + (matrix == "projection")
    generator = torch.Generator("cpu").manual_seed(seed)
    size = config.hidden_size
    normal = torch.randn(size, size, generator=generator, dtype=torch.float64, device="cpu")
    q, r = torch.linalg.qr(normal)
    return (q * r.diagonal().sign()).float()
