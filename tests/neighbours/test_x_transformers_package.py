"""Attention of the package x-transformers in float64: heads that talk, residual scores, shared keys; with gradients."""

from functools import partial
from typing import Any

import pytest
import torch
from models.compressed_transformer.tiny_models import build
from torch import Tensor

from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.models.compressed_transformer.passed_states import PassedStates

Attention = pytest.importorskip("x_transformers").Attention
HEADS, DIM, WIDTH = 4, 8, 32
# the second text is padded
REAL = torch.arange(9) < torch.tensor([[9], [6]])


def attentions(mechanism: str, is_causal: bool, **fields: Any) -> list[Any]:
    """Return the attention of each layer of a tiny model, whose maps have no bias."""
    fields = {"attention_bias": False, "attention_output_bias": False, "is_causal": is_causal, **fields}
    return [layer.self_attn for layer in build("AutoModel", mechanism=mechanism, **fields).double().layers]


def copied(own: Any, groups: int = HEADS, **options: Any) -> Any:
    """Return attention of the package with the maps of ours.

    Query heads that share keys are neighbours here, and there as far apart as there are heads of keys.
    """
    options = {"dim_head": DIM, "heads": HEADS, "kv_heads": groups, "causal": own.is_causal, **options}
    # its own softmax is in float32
    options["custom_attn_fn"] = partial(torch.softmax, dim=-1)
    theirs = Attention(WIDTH, **options).double().eval()
    order = torch.arange(WIDTH).view(groups, -1, DIM).transpose(0, 1).flatten()
    with torch.no_grad():
        theirs.to_q.weight.copy_(own.q_proj.weight[order])
        theirs.to_k.weight.copy_(own.k_proj.weight)
        theirs.to_v.weight.copy_(own.v_proj.weight)
        theirs.to_out.weight.copy_(own.o_proj.weight[:, order])
    return theirs


def check_equal(found: Tensor, expected: Tensor, own: list[Tensor], theirs: list[Tensor]) -> None:
    """Check outputs of real tokens, and gradients, those of parameters of ours with those of the package."""
    found, expected = found[REAL], expected[REAL]
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-9)
    weight = torch.randn(found.shape, dtype=torch.float64)
    slopes = torch.autograd.grad((found * weight).sum(), own)
    wanted = torch.autograd.grad((expected * weight).sum(), theirs)
    for each, other in zip(slopes, wanted, strict=True):
        torch.testing.assert_close(each, other.view_as(each), atol=1e-11, rtol=1e-8)


def text() -> Tensor:
    return torch.randn(2, 9, WIDTH, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("is_causal", [False, True])
def test_heads_that_talk(is_causal: bool) -> None:
    """There, what is mixed of scores is added to them, so that P_l is 1 + their map."""
    own = attentions("talking_heads", is_causal)[0]
    theirs = copied(own, pre_talking_heads=True, post_talking_heads=True)
    of_scores = theirs.attend.pre_softmax_talking_heads.weight
    of_weights = theirs.attend.post_softmax_talking_heads.weight
    with torch.no_grad():
        of_scores.copy_((own.score_map - torch.eye(HEADS))[..., None, None])
        of_weights.copy_(own.weight_map[..., None, None])
    states = text()
    found, expected = own(states, token_mask=TokenMask(REAL, None))[0], theirs(states, mask=REAL)
    given = [states, own.k_proj.weight, own.score_map, own.weight_map]
    check_equal(found, expected, given, [states, theirs.to_k.weight, of_scores, of_weights])


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("is_causal", [False, True])
def test_scores_of_the_layer_below(is_causal: bool, groups: int) -> None:
    """What the package hands on are scores behind the mask, which is the same in all its layers."""
    layers = attentions("residual_scores", is_causal, num_key_value_heads=groups)
    theirs = [copied(each, groups) for each in layers]
    states, passed = [text(), text()], PassedStates()
    mask = TokenMask(REAL, None)
    found = [each(own, token_mask=mask, passed_states=passed)[0] for each, own in zip(layers, states, strict=True)]
    below, scores = theirs[0](states[0], mask=REAL, return_intermediates=True)
    above = theirs[1](states[1], mask=REAL, prev_attn=scores.pre_softmax_attn)
    given = [*states, layers[0].k_proj.weight, layers[1].v_proj.weight]
    check_equal(found[0] + found[1], below + above, given, [*states, theirs[0].to_k.weight, theirs[1].to_v.weight])
