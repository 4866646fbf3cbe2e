"""LSH attention against its definition, gradients included, in every choice of the config and in every precision."""

from typing import Any

import pytest
import torch
from models.efficient_reformer.dense_reformer import attend, counts_by_bucket, read_counts

import hf_efficient_attn as hea
from hf_efficient_attn.layout.chosen.unit_keys import unit
from hf_efficient_attn.models.efficient_reformer.attention import LSHAttention

SIZES = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "attn_layers": ["lsh"]}
CHOICES: list[dict[str, Any]] = [
    {"is_causal": True},
    {"num_hashes": 3, "lsh_num_chunks_after": 1},
    {"num_hashes": 2, "is_causal": True, "attend_across_buckets": False},
    {"num_hashes": 2, "count_duplicates": False},
    {"num_hashes": 2, "is_causal": True, "chunk_by_bucket": True},
    {"num_buckets": [2, 4], "lsh_num_chunks_before": 2},
    {"lsh_attn_chunk_length": 64},
]


def attention(**fields: Any) -> LSHAttention:
    torch.manual_seed(0)
    given = {"lsh_attn_chunk_length": 4, "num_buckets": 4, **SIZES, **fields}
    return LSHAttention(hea.EfficientReformerConfig(**given), 0).double()


@pytest.mark.parametrize("backend", ["gathered", "sdpa"])
@pytest.mark.parametrize("fields", CHOICES, ids=str)
def test_outputs_and_gradients_are_those_of_the_definition(fields: dict[str, Any], backend: str) -> None:
    layer = attention(**fields)
    config = layer.config
    states = torch.randn(1, 23, 16, dtype=torch.float64, requires_grad=True)
    kept: dict[str, torch.Tensor] = {}
    with hea.use_backend(backend):
        out, _ = layer(states, kept=kept)
    query, value = (layer.heads(each, states)[0] for each in (layer.qk_proj, layer.v_proj))
    heads = []
    for head in range(2):
        buckets, size = kept["buckets"][0, head], config.lsh_attn_chunk_length
        if config.chunk_by_bucket:
            counts = counts_by_bucket(buckets, size, config.is_causal)
        else:
            sides = (config.lsh_num_chunks_before, config.lsh_num_chunks_after)
            counts = read_counts(buckets, size, *sides, config.is_causal, config.attend_across_buckets)
        counts = counts if config.count_duplicates else counts.clamp(max=1)
        heads.append(attend(query[head], value[head], counts))
    expected = layer.o_proj(torch.cat(heads, -1))
    torch.testing.assert_close(out[0], expected, atol=1e-12, rtol=1e-10)
    weights = torch.randn(23, 16, dtype=torch.float64)
    of = [states, *layer.parameters()]
    found = torch.autograd.grad((out[0] * weights).sum(), of, retain_graph=True)
    for actual, wanted in zip(found, torch.autograd.grad((expected * weights).sum(), of), strict=True):
        torch.testing.assert_close(actual, wanted, atol=1e-10, rtol=1e-8)


@pytest.mark.filterwarnings("ignore:output_attentions")
def test_weights_are_those_of_the_output() -> None:
    layer, states = attention(num_hashes=2), torch.randn(2, 11, 16, dtype=torch.float64)
    out, weights = layer(states, output_attentions=True)
    assert weights is not None
    read = weights @ layer.heads(layer.v_proj, states)
    torch.testing.assert_close(layer.o_proj(read.transpose(1, 2).flatten(2)), out)
    torch.testing.assert_close(layer(states)[0], out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_token_that_reads_itself_alone_keeps_its_value_in_every_precision(dtype: torch.dtype) -> None:
    """In transformers it comes out up to twice as large for each doubling of the rounds."""
    layer = attention(num_hashes=8, is_causal=True).to(dtype)
    states = torch.randn(1, 9, 16).to(dtype)
    expected = layer.o_proj(layer.v_proj(states))
    torch.testing.assert_close(layer(states)[0][:, 0], expected[:, 0])


def test_keys_have_length_one_unless_they_vanish() -> None:
    vectors = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    torch.testing.assert_close(unit(vectors), torch.tensor([[0.6, 0.8], [0.0, 0.0]]))
    assert unit(torch.full((2, 64), 300.0).half()).isfinite().all()
    near_zero = torch.tensor([[1.0, 0.001, 0.0]], dtype=torch.float64) * torch.randn(2, 5, 3, dtype=torch.float64)
    for vectors in (near_zero, 0.002 * near_zero):
        vectors.requires_grad_()
        assert torch.autograd.gradcheck(unit, (vectors,), eps=1e-7)
        assert torch.autograd.gradgradcheck(unit, (vectors,), eps=1e-7)


def test_gradients_never_reach_later_tokens() -> None:
    """Values are causal, whatever chunks later tokens move."""
    layer = attention(num_hashes=2, is_causal=True)
    states = torch.randn(1, 23, 16, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(layer(states)[0][0, 11].sum(), states)
    assert gradient[0, :12].any(-1).sum() > 1
    assert not gradient[0, 12:].any()
