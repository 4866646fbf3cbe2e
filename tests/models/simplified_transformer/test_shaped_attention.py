"""Closed forms 1, 3, 4, 10 and 12, and the cheap form of shaped attention against the dense one, gradients included."""

import pytest
import torch
from models.simplified_transformer.dense_reference import (
    allowed_pairs,
    centring_matrix,
    dense_shaped_attention,
    in_float64,
    shaped_matrix,
    softmax_matrix,
)
from models_cases import TINY, randomize
from torch import nn

import hf_efficient_attn as hea
from hf_efficient_attn.models.simplified_transformer.centering import attention_allowed, build_centering
from hf_efficient_attn.models.simplified_transformer.modeling_simplified_transformer import (
    SimplifiedTransformerAttention,
    SimplifiedTransformerModel,
)

TOKENS = 21
MASKS = {
    "none": {},
    "left": {"padding": torch.tensor([[0] * 5 + [1] * 16, [1] * 21])},
    "right": {"padding": torch.tensor([[1] * 15 + [0] * 6, [1] * 20 + [0]])},
    "packed": {"documents": torch.tensor([[0] * 4 + [1] + [2] * 16, [0] * 20 + [1]])},
}


def build(block: str = "sas", layer_idx: int = 1, **fields: object) -> SimplifiedTransformerAttention:
    """Return one attention module of a tiny model, as initialised."""
    torch.manual_seed(0)
    fields = {"position_embedding_type": "none", **fields}
    return (
        SimplifiedTransformerModel(hea.SimplifiedTransformerConfig(block=block, **{**TINY, **fields}))
        .layers[layer_idx]
        .self_attn.eval()
    )


def run(
    attention: SimplifiedTransformerAttention, x: torch.Tensor, mask: dict[str, torch.Tensor], is_causal: bool
) -> torch.Tensor:
    """Run the module as its model would, under one of `MASKS`."""
    padding, documents = mask.get("padding"), mask.get("documents")
    allowed = attention_allowed(attention.config, x, padding, None, documents)
    centering = build_centering(x.shape[1], 0, padding, documents, is_causal, x.device)
    return attention(x, attention_mask=allowed, centering=centering)[0]


def inputs(dtype: torch.dtype = torch.float32, requires_grad: bool = False) -> torch.Tensor:
    x = torch.randn(2, TOKENS, TINY["hidden_size"], generator=torch.Generator().manual_seed(3), dtype=dtype)
    return x.requires_grad_(requires_grad)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("layer_idx", [0, 1])
def test_identity_at_initialisation_under_any_mask(mask: dict, is_causal: bool, layer_idx: int) -> None:
    """Closed form 1: W^Q = 0 makes A = C, and β = γ leaves α·I = I, in layer 1 too since W^V starts as I."""
    attention = build(layer_idx=layer_idx, is_causal=is_causal)
    x = inputs()
    real = mask.get("padding", torch.ones(2, TOKENS)).bool()
    torch.testing.assert_close(run(attention, x, mask, is_causal)[real], x[real], atol=2e-6, rtol=0)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("block", ["v_skipinit", "sas"])
def test_cheap_form_equals_dense_form_in_float64(mask: dict, is_causal: bool, block: str) -> None:
    """Closed form 3, outputs and every gradient."""
    attention = in_float64(randomize(build(block, layer_idx=0, is_causal=is_causal)))
    real = mask.get("padding", torch.ones(2, TOKENS)).bool()
    outputs, gradients = [], []
    for dense in (False, True):
        attention.zero_grad()
        x = inputs(torch.float64, requires_grad=True)
        if dense:
            out = dense_shaped_attention(attention, x, allowed_pairs(TOKENS, is_causal, **mask))
        else:
            out = run(attention, x, mask, is_causal)
        out[real].square().sum().backward()
        outputs.append(out[real])
        gradients.append([x.grad[real], *(parameter.grad for parameter in attention.parameters())])
    # the running mean is computed in float32 whatever the input
    torch.testing.assert_close(outputs[0], outputs[1], atol=1e-5, rtol=1e-5)
    for cheap, dense in zip(*gradients, strict=True):
        torch.testing.assert_close(cheap, dense, atol=2e-4, rtol=1e-5)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("is_causal", [True, False])
def test_zero_logits_make_softmax_equal_to_centring(mask: dict, is_causal: bool) -> None:
    """Closed form 4, for the reference itself and for the package's mean."""
    allowed = allowed_pairs(TOKENS, is_causal, **mask)
    zeros = torch.zeros(len(allowed), 1, TOKENS, TOKENS, dtype=torch.float64)
    centre = centring_matrix(allowed)
    torch.testing.assert_close(softmax_matrix(zeros, allowed.unsqueeze(1)).squeeze(1), centre)
    x = inputs()
    centering = build_centering(TOKENS, 0, mask.get("padding"), mask.get("documents"), is_causal, x.device)
    expected = (centre @ x.double()).float()
    torch.testing.assert_close(centering.mean(x).expand_as(x), expected, atol=1e-6, rtol=1e-5)


def test_row_sums_are_alpha_plus_beta_minus_gamma() -> None:
    """Closed form 3."""
    attention = in_float64(randomize(build()))
    rows = shaped_matrix(attention, inputs(torch.float64), allowed_pairs(TOKENS, True)).sum(-1)
    expected = attention.identity_gain.gain + attention.softmax_gain.gain - attention.centering_gain.gain
    torch.testing.assert_close(rows, expected.view(1, -1, 1).expand_as(rows))


def test_identity_alone_mixes_no_tokens() -> None:
    """Closed form 12: with β out of the way and γ = 0, changing a token changes that token alone."""
    config = {**TINY, "block": "sas", "softmax_gain": 0.0, "centering_gain": 0.0, "position_embedding_type": "none"}
    torch.manual_seed(0)
    model = hea.SimplifiedTransformerModel(hea.SimplifiedTransformerConfig(**config)).eval()
    ids = torch.arange(3, 13)[None]
    changed = ids.clone()
    changed[0, 4] = 40
    with torch.no_grad():
        before, after = model(ids).last_hidden_state, model(changed).last_hidden_state
    others = torch.arange(10) != 4
    assert torch.equal(before[:, others], after[:, others])
    assert not torch.equal(before[:, 4], after[:, 4])


def test_six_causal_means_collapse_random_tokens() -> None:
    """Closed form 10: C applied six times to 64 random tokens gives a mean cosine of about 0.995."""
    x = torch.randn(1, 64, 512, generator=torch.Generator().manual_seed(0))
    centering = build_centering(64, 0, None, None, True, x.device)
    for _ in range(6):
        x = centering.mean(x)
    unit = nn.functional.normalize(x[0], dim=-1)
    cosine = ((unit @ unit.T).sum() - 64) / (64 * 63)
    assert cosine.item() == pytest.approx(0.995, abs=0.004)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_identity_at_initialisation_in_low_precision(dtype: torch.dtype) -> None:
    """Rounding A·V and C·V leaves no more than one rounding of a mean of unit normals."""
    attention = build().to(dtype)
    x = inputs(dtype)
    error = (run(attention, x, {}, True).float() - x.float()).abs().max()
    assert error <= 4 * torch.finfo(dtype).eps


def test_attention_weights_are_those_of_the_softmax() -> None:
    """`output_attentions` returns A, whose rows sum to one, not the shaped matrix."""
    config = hea.SimplifiedTransformerConfig(block="sas", **TINY)
    model = randomize(hea.SimplifiedTransformerModel._from_config(config, attn_implementation="eager")).eval()
    weights = model(torch.arange(3, 12)[None], output_attentions=True).attentions
    assert len(weights) == TINY["num_hidden_layers"]
    assert weights[0].shape == (1, TINY["num_attention_heads"], 9, 9)
    torch.testing.assert_close(weights[0].sum(-1), torch.ones(1, TINY["num_attention_heads"], 9))


def test_mask_per_head_is_refused() -> None:
    model = hea.SimplifiedTransformerModel(hea.SimplifiedTransformerConfig(block="sas", **TINY))
    with pytest.raises(hea.InputError, match="one mask per head"):
        model(torch.ones(1, 4, dtype=torch.long), attention_mask=torch.ones(1, 4, 4, 4, dtype=torch.bool))
