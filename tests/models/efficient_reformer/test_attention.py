"""LSH attention against its definition, in every choice and precision; cached decoding; transformers' Reformer."""

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import transformers
from families import BY_NAME
from models_cases import random_ids
from torch import Tensor

import hf_efficient_attn as hea
from hf_efficient_attn.integration.forward_context import CACHE_ARGUMENT
from hf_efficient_attn.layout.grouped_reference import unit
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.models.efficient_reformer.attention import LSHAttention
from hf_efficient_attn.models.inputs import LayerInputs


def read_counts(buckets: Tensor, config: Any) -> Tensor:
    """Return how often each token reads each, itself included: [tokens, tokens], from the buckets [rounds, tokens]."""
    rounds, tokens = buckets.shape
    size, before, after = config.lsh_attn_chunk_length, config.lsh_num_chunks_before, config.lsh_num_chunks_after
    counts = torch.zeros(tokens, tokens, dtype=torch.float64)
    if config.chunk_by_bucket:
        for of_round in buckets:
            shares = of_round[:, None] == of_round
            chunk = shares.tril(-1).sum(1) // size
            steps = chunk - chunk[:, None]
            counts += shares & (-before <= steps) & (steps <= after)
    else:
        place = buckets.argsort(stable=True).argsort()
        chunks = -(-tokens // size)
        # of every token in every round, on the ring
        number = place // size + chunks * torch.arange(rounds)[:, None]
        shares = (buckets[:, None, :, None] == buckets[None, :, None]) & torch.eye(rounds).bool()[..., None, None]
        for step in range(-before, after + 1) if chunks > 1 else [0]:
            meets = (number[:, None, :, None] + step) % (rounds * chunks) == number[None, :, None]
            counts += (meets & (shares | config.attend_across_buckets)).sum((0, 1))
    counts = counts if config.count_duplicates else counts.clamp(max=1)
    return counts.tril() if config.is_causal else counts


def attend(query: Tensor, value: Tensor, counts: Tensor) -> Tensor:
    """Return the output [tokens, D] of one head, in float64."""
    key = query * (query.square().mean(-1, keepdim=True) + 1e-6).rsqrt() / query.shape[-1] ** 0.5
    others = counts * (1 - torch.eye(len(counts), dtype=torch.float64))
    counts = torch.where(others.sum(-1, keepdim=True) > 0, others, counts)
    scores = query @ key.T + counts.log()
    return torch.softmax(scores, -1) @ value


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


# every pair of them; all three are thorough
@pytest.mark.parametrize(
    ("rounds", "chunks", "backend"),
    [
        pytest.param(rounds, chunks, backend, marks=[pytest.mark.thorough] * ((i + j + k) % 2))
        for i, rounds in enumerate([1, 3])
        for j, chunks in enumerate([(1, 0), (2, 1)])
        for k, backend in enumerate(["gathered", "sdpa"])
    ],
)
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


CAUSAL = BY_NAME["reformer-causal"]
# chunks as the authors cut them
AUTHORS = {"chunk_by_bucket": False, "num_hashes": 2}


def test_a_new_token_reads_what_it_would_read_if_the_text_ended_with_it() -> None:
    """In one layer, whose keys and values do not depend on what other tokens read, nothing else differs."""
    model = CAUSAL.model(attn_layers=["lsh"], num_hidden_layers=1, **AUTHORS)
    ids = random_ids(2, 15)
    with torch.no_grad():
        cache = None
        for stop in range(1, 16):
            out = model(ids[:, stop - 1 : stop], **{CACHE_ARGUMENT: cache}, use_cache=True)
            cache = out.past_key_values
            expected = model(ids[:, :stop], use_cache=False).logits[:, -1]
            torch.testing.assert_close(out.logits[:, 0], expected, atol=1e-5, rtol=1e-5)


def test_text_within_a_chunk_decodes_as_the_full_forward() -> None:
    model = CAUSAL.model(lsh_attn_chunk_length=16, **AUTHORS)
    ids = random_ids(2, 15)
    with torch.no_grad():
        cache = model(ids[:, :9], use_cache=True).past_key_values
        rest = model(ids[:, 9:], **{CACHE_ARGUMENT: cache}).logits
        torch.testing.assert_close(rest, model(ids, use_cache=False).logits[:, 9:], atol=1e-5, rtol=1e-5)


def test_rows_of_a_batch_generate_as_they_do_alone() -> None:
    """In transformers all rows read the cached states of the first."""
    model = CAUSAL.model(**AUTHORS)
    ids, short = random_ids(1, 11), random_ids(1, 6, seed=3)
    padded = torch.cat((torch.zeros(1, 5, dtype=torch.long), short), 1)
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[1, :5] = 0
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    together = model.generate(torch.cat((ids, padded)), attention_mask=mask, **options)
    for row, alone in enumerate((ids, short)):
        expected = model.generate(alone, attention_mask=torch.ones_like(alone), **options)
        assert torch.equal(together[row, -8:], expected[0, -8:])


REFORMER: dict[str, Any] = {
    "attn_layers": ["local", "lsh", "lsh"],
    "hidden_size": 32,
    "attention_head_size": 8,
    "num_attention_heads": 2,
    "feed_forward_size": 24,
    "axial_pos_shape": (8, 8),
    "axial_pos_embds_dim": (8, 24),
    "max_position_embeddings": 64,
    "local_attn_chunk_length": 4,
    "lsh_attn_chunk_length": 8,
    "num_buckets": [2, 4],
    "num_hashes": 3,
    "vocab_size": 61,
    "hash_seed": 5,
    "initializer_range": 0.2,
}
HEADS = {
    "ModelWithLMHead": {"is_decoder": True},
    "ForMaskedLM": {"num_buckets": 6, "num_hashes": 1},
    "ForSequenceClassification": {"axial_pos_embds": False},
    "ForQuestionAnswering": {"local_num_chunks_before": 2, "local_num_chunks_after": 1, "lsh_num_chunks_after": 1},
    "Model": {"is_decoder": True, "attn_layers": ["lsh", "lsh"]},
}


def source(head: str, **fields: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.ReformerConfig(**{**REFORMER, **HEADS[head], **fields})
    return getattr(transformers, f"Reformer{head}")(config).double().eval()


def their_rotations(layer: LSHAttention, *_: Any) -> torch.Tensor:
    """Return what transformers draws with its `hash_seed`, in every layer the same."""
    config = layer.config
    torch.manual_seed(config.hash_seed)
    shape = (config.num_attention_heads, layer.head_dim, config.num_hashes, sum(layer.factors) // 2)
    return torch.randn(shape, dtype=torch.float64)


# in encoders there, the first chunk reads padding instead of the last tokens if a whole chunk of padding is appended
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("tokens", [48, 46, 3])
# of the bias of the vocabulary, and of the rotations, which differ
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_outputs_are_equal(head: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = source(head)
    ours = hea.convert(theirs)
    monkeypatch.setattr(LSHAttention, "rotations", their_rotations)
    ids = torch.randint(3, 61, (2, tokens), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, actual = theirs(ids), ours(ids)
    name = next(name for name in ("logits", "start_logits", "last_hidden_state") if name in expected)
    torch.testing.assert_close(actual[name], expected[name], atol=1e-10, rtol=1e-8)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_defects_there_are_none_here() -> None:
    """The bias of the vocabulary acts; training takes any length, and is repeated by the same seed."""
    theirs = source("ModelWithLMHead", hash_seed=None)
    with torch.no_grad():
        theirs.lm_head.bias.fill_(3.0)
    ours = hea.convert(theirs)
    ids = torch.randint(3, 61, (2, 43), generator=torch.Generator().manual_seed(1))
    ours.train()
    with pytest.raises(ValueError, match="multiple of"):
        theirs.train()(ids)
    loss = ours(ids, labels=ids).loss
    assert torch.autograd.grad(loss, ours.lm_head.bias)[0].any()
