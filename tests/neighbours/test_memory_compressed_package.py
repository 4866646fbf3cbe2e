"""Attention of the package memory-compressed-attention in float64, with outputs and gradients.

Its `input_mask` is left out: one of True alone hides all slots but the null key from all tokens.
"""

import pytest
import torch
from models.compressed_transformer.tiny_models import build

MemoryCompressedAttention = pytest.importorskip("memory_compressed_attention").MemoryCompressedAttention
WIDTH, HEADS = 32, 4


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("tokens", [3, 12])
def test_attention_of_the_package(tokens: int, is_causal: bool) -> None:
    """It has one convolution for keys and values, and divides scores by the root of the width of all heads."""
    torch.manual_seed(0)
    theirs = MemoryCompressedAttention(WIDTH, HEADS, causal=is_causal).double().eval()
    fields = {"attention_bias": False, "compression_null_key": True, "is_causal": is_causal}
    ours = build("AutoModel", mechanism="memory_compressed", **fields).double().layers[0].self_attn
    ours.scaling = WIDTH**-0.5
    with torch.no_grad():
        for project, weight in zip((ours.q_proj, ours.k_proj, ours.v_proj), theirs.to_qkv.weight.chunk(3), strict=True):
            project.weight.copy_(weight)
        ours.o_proj.load_state_dict(theirs.to_out.state_dict())
        for conv in (ours.key_conv, ours.value_conv):
            conv.load_state_dict(theirs.compress_fn.conv.state_dict())
        for null in (theirs.null_k, theirs.null_v):
            null.normal_()
        ours.null_key.copy_(theirs.null_k.flatten())
        ours.null_value.copy_(theirs.null_v.flatten())
    text = torch.randn(2, tokens, WIDTH, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, tokens, WIDTH, dtype=torch.float64)
    found, expected = ours.o_proj(ours.attend(text, None, False)[0]), theirs(text)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-9)
    given = [text, ours.null_key, ours.key_conv.weight, ours.value_conv.weight]
    own, null, of_keys, of_values = torch.autograd.grad((found * weight).sum(), given)
    given = [text, theirs.null_k, theirs.compress_fn.conv.weight]
    other, their_null, of_both = torch.autograd.grad((expected * weight).sum(), given)
    for slope, wanted in ((own, other), (null, their_null.flatten()), (of_keys + of_values, of_both)):
        torch.testing.assert_close(slope, wanted, atol=1e-11, rtol=1e-8)
    every = torch.ones(2, tokens, dtype=torch.bool)
    assert not torch.allclose(theirs(text, input_mask=every), expected)
