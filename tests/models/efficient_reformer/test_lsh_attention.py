"""LSH attention against its definition, gradients included, in every choice of the config and in every precision."""

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from models.efficient_reformer.dense_reformer import attend, read_counts

import hf_efficient_attn as hea
from hf_efficient_attn.layout.grouped_reference import unit
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.models.efficient_reformer.attention import LSHAttention
from hf_efficient_attn.models.inputs import LayerInputs

SIZES = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "attn_layers": ["lsh"]}
FLAGS = ("is_causal", "chunk_by_bucket", "attend_across_buckets", "count_duplicates")
# the documents of each row of a batch, (first token, tokens), and how many buckets they fall into; between is padding
BATCHES: list[tuple[list[list[tuple[int, int]]], int]] = [
    ([[(0, 23)], [(5, 14)], [(0, 9), (9, 3), (12, 8)]], 4),
    ([[(0, 23)]], 1),
]


def attention(**fields: Any) -> LSHAttention:
    torch.manual_seed(0)
    given = {"lsh_attn_chunk_length": 4, "num_buckets": 4, **SIZES, **fields}
    return LSHAttention(hea.EfficientReformerConfig(**given), 0).double()


def mask_of(batch: list[list[tuple[int, int]]]) -> TokenMask:
    numbers = torch.full((len(batch), 23), -1)
    for row, documents in zip(numbers, batch, strict=True):
        for number, (first, count) in enumerate(documents):
            row[first : first + count] = number
    return TokenMask(numbers >= 0, numbers.clamp(min=0)) if len(batch) > 1 else TokenMask()


@pytest.mark.parametrize("backend", ["gathered", "sdpa"])
@pytest.mark.parametrize("chunks", [(1, 0), (0, 1), (2, 1)], ids=str)
@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_outputs_and_gradients_are_those_of_the_definition(rounds: int, chunks: tuple[int, int], backend: str) -> None:
    """Every document and head alone, in every choice of the config: other rows, padding and documents say nothing."""
    sides = {"lsh_num_chunks_before": chunks[0], "lsh_num_chunks_after": chunks[1]}
    for flags, (batch, num_buckets) in product(product([False, True], repeat=len(FLAGS)), BATCHES):
        layer = attention(num_hashes=rounds, **sides, **dict(zip(FLAGS, flags, strict=True)))
        states = torch.randn(len(batch), 23, 16, dtype=torch.float64, requires_grad=True)
        buckets = torch.randint(num_buckets, (len(batch), 2, rounds, 23), dtype=torch.int32)
        with hea.use_backend(backend):
            out, _ = layer(states, LayerInputs(mask_of(batch)), kept={"buckets": buckets})
        query, value = (layer.heads(each(states)) for each in (layer.qk_proj, layer.v_proj))
        actual, expected = [], []
        for row, (first, count) in ((row, each) for row, documents in enumerate(batch) for each in documents):
            tokens = slice(first, first + count)
            heads = [
                attend(query[row, head, tokens], value[row, head, tokens], read_counts(each, layer.config))
                for head, each in enumerate(buckets[row, ..., tokens])
            ]
            actual.append(out[row, tokens])
            expected.append(layer.o_proj(torch.cat(heads, -1)))
        found, wanted = torch.cat(actual), torch.cat(expected)
        torch.testing.assert_close(found, wanted, atol=1e-12, rtol=1e-10, msg=partial("{}: {}".format, flags))
        weights, of = torch.randn_like(found), [states, *layer.parameters()]
        found, wanted = (torch.autograd.grad((each * weights).sum(), of, retain_graph=True) for each in (found, wanted))
        torch.testing.assert_close(found, wanted, atol=1e-10, rtol=1e-8, msg=partial("{}: {}".format, flags))


@pytest.mark.filterwarnings("ignore:output_attentions")
def test_weights_are_those_of_the_output() -> None:
    layer, states = attention(num_hashes=2), torch.randn(2, 11, 16, dtype=torch.float64)
    out, weights = layer(states, output_attentions=True)
    assert weights is not None
    read = weights @ layer.heads(layer.v_proj(states))
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
