"""The gains of every block: their names, the paper's values, and which of them are trained.

Source: He & Hofmann, "Simplifying Transformer Blocks" (arXiv:2311.01906), section 4 and appendix D; where the paper is
silent, the authors' published configuration. Letters: α identity, β softmax, γ centring (one per head);
β_SA attention, β_FF MLP, α_SA / α_FF / α_comb the skips (one per block); a_V, b_V, a_P, b_P of W = a·W_init + b·ΔW.
"""

import math
from dataclasses import dataclass, replace

# config field -> the paper's letter
GAIN_SYMBOLS = {
    "identity_gain": "α",
    "softmax_gain": "β",
    "centering_gain": "γ",
    "attention_skip_gain": "α_SA",
    "attention_gain": "β_SA",
    "mlp_skip_gain": "α_FF",
    "mlp_gain": "β_FF",
    "combined_skip_gain": "α_comb",
    "value_skip_gain": "a_V",
    "value_gain": "b_V",
    "projection_skip_gain": "a_P",
    "projection_gain": "b_P",
}
HEAD_GAINS = ("identity_gain", "softmax_gain", "centering_gain")
SEQUENTIAL_GAINS = ("attention_skip_gain", "mlp_skip_gain")
PARALLEL_GAINS = ("combined_skip_gain",)
REPARAMETERIZATION_GAINS = ("value_skip_gain", "value_gain", "projection_skip_gain", "projection_gain")


@dataclass(frozen=True)
class BlockStyle:
    """What distinguishes one block from another: layout, norms, gains, and the form of W^V and W^P."""

    parallel: bool
    normalized: bool
    gains: dict[str, float | None]  # None: by depth, see `depth_scaled_mlp_gain`
    trainable: tuple[str, ...]
    reparameterized: bool
    matrix_init: str


_PLAIN_ATTENTION = {"identity_gain": 0.0, "softmax_gain": 1.0, "centering_gain": 0.0}
_SHAPED_ATTENTION = {"identity_gain": 1.0, "softmax_gain": 1.0, "centering_gain": 1.0}
_WITH_SKIPS = {"attention_skip_gain": 1.0, "attention_gain": 1.0, "mlp_skip_gain": 1.0, "mlp_gain": 1.0}
_SKIPLESS = {"attention_skip_gain": 0.0, "attention_gain": 1.0, "mlp_skip_gain": 1.0, "mlp_gain": None}
_SKIPLESS_PARALLEL = {"combined_skip_gain": 0.0, "attention_gain": 1.0, "mlp_gain": None}
_IDENTITY_MATRICES = {"value_skip_gain": 1.0, "value_gain": 0.0, "projection_skip_gain": 1.0, "projection_gain": 0.0}
_TRAINED = (*HEAD_GAINS, "attention_gain", "mlp_gain")

_SAS_P = BlockStyle(
    parallel=True,
    normalized=True,
    gains={**_SHAPED_ATTENTION, **_SKIPLESS_PARALLEL, **_IDENTITY_MATRICES},
    trainable=(*_TRAINED, *REPARAMETERIZATION_GAINS),
    reparameterized=True,
    matrix_init="identity",
)
BLOCK_STYLES: dict[str, BlockStyle] = {
    "pre_ln": BlockStyle(
        parallel=False,
        normalized=True,
        gains={**_PLAIN_ATTENTION, **_WITH_SKIPS},
        trainable=(),
        reparameterized=False,
        matrix_init="normal",
    ),
    "parallel": BlockStyle(
        parallel=True,
        normalized=True,
        gains={**_PLAIN_ATTENTION, "combined_skip_gain": 1.0, "attention_gain": 1.0, "mlp_gain": 1.0},
        trainable=(),
        reparameterized=False,
        matrix_init="normal",
    ),
    "v_skipinit": BlockStyle(
        parallel=False,
        normalized=True,
        gains={**_SHAPED_ATTENTION, **_SKIPLESS},
        trainable=(*_TRAINED, "mlp_skip_gain"),
        reparameterized=False,
        matrix_init="orthogonal",
    ),
    "sas": BlockStyle(
        parallel=False,
        normalized=True,
        gains={**_SHAPED_ATTENTION, **_SKIPLESS, **_IDENTITY_MATRICES},
        trainable=(*_TRAINED, "mlp_skip_gain", *REPARAMETERIZATION_GAINS),
        reparameterized=True,
        matrix_init="identity",
    ),
    "sas_p": _SAS_P,
    "sas_p_no_norm": replace(_SAS_P, normalized=False),
}


def depth_scaled_mlp_gain(num_hidden_layers: int, hidden_size: int, intermediate_size: int) -> float:
    """Return the default β_FF, which shrinks as 1/√depth and grows as the MLP narrows.

    The paper asks for O(1/√L) (section 4.1). Anchored at its value for 18 layers and an MLP of 4·hidden_size, this
    also gives the two values of its depth study (MLP of 2·hidden_size). Its BERT uses 0.05, which the preset sets.

    >>> [round(depth_scaled_mlp_gain(layers, 768, width), 3) for layers, width in ((18, 3072), (18, 1536), (72, 1536))]
    [0.1, 0.2, 0.1]
    """
    return 0.1 * math.sqrt(18 / num_hidden_layers) * (4 * hidden_size / intermediate_size)
