"""What queries and keys are mapped to, so that a product of features takes the place of the exponential of a score.

Features are at least 0 and in float32 or wider, so that the sums over a text neither overflow nor lose small terms. A
map returns them with an exponent for each token, [R, H, L], or None: those of the token are exp(exponent) times as
large.
Shapes: R texts, H heads, L places, D head size, F features.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import relu
from transformers import initialization as init

from hf_efficient_attn.models.parts.blocks import KeptInFloat32


class EluFeatures(nn.Module):
    """elu(x) + 1: as many features as the head has numbers. Katharopoulos et al. (arXiv:2006.16236), section 3.3."""

    def forward(self, states: Tensor) -> tuple[Tensor, None]:
        """Return the features, [R, H, L, D] → the same, as large as they are."""
        states = wide(states)
        # torch's elu, compiled, has gradients of other strides than its graph was made for
        return states.clamp(max=0).exp() + relu(states), None


class ConstantFeatures(nn.Module):
    """1 for every token, so that all that may be read is read alike: average attention.

    Zhang et al., "Accelerating Neural Transformer via an Average Attention Network" (arXiv:1805.00631), section 3.1,
    without their feed-forward network and gate; Lin et al. (arXiv:2106.04554), section 4.5.4.
    """

    def forward(self, states: Tensor) -> tuple[Tensor, None]:
        """Return the feature, [R, H, L, D] → [R, H, L, 1], as large as it is."""
        return torch.ones_like(wide(states[..., :1])), None


class PositiveRandomFeatures(KeptInFloat32):
    """exp(w·x − |x|² / 2) / √F with x the state / D^¼ and F random w: the mean over w of a product is exp(q·k / √D).

    The w are orthogonal in blocks of D, and as long as normal vectors, which makes the error smaller than that of
    independent ones. They are no parameters, but saved with the model. `redraw` replaces them; what is drawn depends on
    the seed, the layer and the number of the draw alone, so that all processes draw the same.

    Source: Choromanski et al., "Rethinking Attention with Performers" (arXiv:2009.14794), lemma 1 and section 2.4.
    """

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.head_dim, self.seed = config.head_dim, config.feature_seed + 1_000_003 * layer_idx
        self.register_buffer("vectors", torch.zeros(config.features_of_head, self.head_dim, dtype=torch.float32))

    def initialize(self) -> None:
        """Set the first draw."""
        init.copy_(self.vectors, self.drawn(0).to(self.vectors.device))

    def drawn(self, number: int) -> Tensor:
        """Return the vectors of a draw, [F, D]."""
        generator = torch.Generator().manual_seed(self.seed + 7_919 * number)
        size = self.head_dim
        num_blocks = -(-self.vectors.shape[0] // size)
        normal = torch.randn(num_blocks, size, size, generator=generator, dtype=torch.float64)
        lengths = torch.randn(num_blocks * size, size, generator=generator, dtype=torch.float64).norm(dim=1)
        columns, upper = torch.linalg.qr(normal)
        # so that every direction is as likely as any other
        columns = columns * upper.diagonal(dim1=1, dim2=2).sign().unsqueeze(1)
        directions = columns.mT.flatten(0, 1)
        return (directions * lengths[:, None])[: self.vectors.shape[0]].float()

    @torch.no_grad()
    def redraw(self, number: int) -> None:
        """Replace the vectors by those of a draw; the first is number 0."""
        self.vectors.copy_(self.drawn(number))

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features, [R, H, L, D] → [R, H, L, F], divided by the largest of each token, and its exponent.

        So they cannot all underflow, however long the token's vector is. Exponents have no gradient: attention divides
        by what they multiply.
        """
        states = wide(states) * self.head_dim**-0.25
        exponents = states @ self.vectors.to(states.dtype).mT - states.square().sum(-1, keepdim=True) / 2
        largest = exponents.detach().amax(-1, keepdim=True)
        return (exponents - largest).exp(), largest.squeeze(-1) - math.log(self.vectors.shape[0]) / 2


class RedrawsFeatures:
    """Mixin of models whose layers may have random features."""

    def redraw_features(self, number: int) -> None:
        """Replace the random features of all layers by those of a draw, the same in all processes; the first is 0."""
        for module in self.modules():  # type: ignore[attr-defined]
            if isinstance(module, PositiveRandomFeatures):
                module.redraw(number)


def wide(states: Tensor) -> Tensor:
    """Return states in float32, or as they are if they are wider."""
    return states.to(torch.promote_types(states.dtype, torch.float32))
