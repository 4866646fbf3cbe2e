"""Attention of the package linformer, whose matrices belong to a layer, in float64."""

import pytest
import torch
from models.compressed_transformer.tiny_models import build
from torch.nn.attention import SDPBackend, sdpa_kernel

LinformerSelfAttention = pytest.importorskip("linformer.linformer").LinformerSelfAttention
N, K, WIDTH, HEADS = 64, 4, 32, 4


@pytest.mark.parametrize("tokens", [1, 50, N])
def test_attention_of_the_package(tokens: int) -> None:
    """Its maps have no bias but that of the output, and a text that is shorter takes the first rows."""
    torch.manual_seed(0)
    theirs = LinformerSelfAttention(WIDTH, N, k=K, heads=HEADS).double().eval()
    ours = build("AutoModel", attention_bias=False).double().layers[0].self_attn
    names = {"to_q": "q_proj", "to_k": "k_proj", "to_v": "v_proj", "to_out": "o_proj"}
    with torch.no_grad():
        for name, own in names.items():
            getattr(ours, own).load_state_dict(getattr(theirs, name).state_dict())
        ours.length_maps.key_map.copy_(theirs.proj_k.T)
        ours.length_maps.value_map.copy_(theirs.proj_v.T)
    text = torch.randn(2, tokens, WIDTH, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, tokens, WIDTH, dtype=torch.float64)
    with sdpa_kernel(SDPBackend.MATH):
        found, expected = ours.o_proj(ours.attend(text, None, False)[0]), theirs(text)
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-9)
        maps = ours.length_maps
        own = torch.autograd.grad((found * weight).sum(), [text, ours.q_proj.weight, maps.key_map, maps.value_map])
    given = [text, theirs.to_q.weight, theirs.proj_k, theirs.proj_v]
    other = torch.autograd.grad((expected * weight).sum(), given)
    for slope, wanted in zip(own, other, strict=True):
        torch.testing.assert_close(slope, wanted if slope.shape == wanted.shape else wanted.T, atol=1e-11, rtol=1e-8)
