"""Block top-k through `attention` and in models of transformers: against its definition, in batches, and decoded."""

from typing import Any

import pytest
import torch
import transformers as tr
from attention_models import DECODER, padding, token_ids
from torch import Tensor

import hf_efficient_attn as hea
from hf_efficient_attn.attention.sharded.layer import exchange_of
from hf_efficient_attn.attention.sharded.plan import HeadSizes
from hf_efficient_attn.attention.sharded.shards import shard_bounds
from hf_efficient_attn.errors import ConfigurationError, InputError, UnsupportedBackendError
from hf_efficient_attn.integration.forward_context import CACHE_ARGUMENT
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.patterns import BlockTopK, Causal, Full

PATTERN = BlockTopK(block_tokens=4, num_chosen=3)


def states(num_tokens: int, num_key_heads: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    draw = {"generator": generator, "dtype": torch.float64, "requires_grad": True}
    return [torch.randn(2, heads, num_tokens, 8, **draw) for heads in (4, num_key_heads, num_key_heads)]


def by_definition(q: Tensor, k: Tensor, v: Tensor, pattern: BlockTopK) -> Tensor:
    """Return the attention of texts without padding: a softmax over the blocks with the highest gates."""
    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
    size, num_tokens = pattern.block_tokens, q.shape[2]
    means = torch.stack([block.mean(2) for block in k.split(size, 2)], 2)
    position = torch.arange(num_tokens)
    own, block = position[:, None] // size, torch.arange(means.shape[2])
    gates = (q @ means.transpose(2, 3)).masked_fill(block > own, -torch.inf).masked_fill(block == own, torch.inf)
    best = gates.topk(min(pattern.num_chosen, means.shape[2])).indices
    reads = torch.zeros_like(gates, dtype=torch.bool).scatter(3, best, True)[..., position // size]
    scores = (q @ k.transpose(2, 3) * q.shape[3] ** -0.5).masked_fill(
        ~(reads & (position <= position[:, None])), -torch.inf
    )
    return scores.softmax(-1) @ v


@pytest.mark.parametrize("backend", ["reference", "gathered", "auto"])
@pytest.mark.parametrize("pattern", [PATTERN, BlockTopK(4, 1), BlockTopK(7, 2)])
@pytest.mark.parametrize("num_tokens", [1, 4, 23])
def test_against_its_definition(num_tokens: int, pattern: BlockTopK, backend: str) -> None:
    given = states(num_tokens)
    out = hea.attention(*given, pattern, backend=backend)
    expected = by_definition(*given, pattern)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)
    weight = torch.randn_like(out)
    found, wanted = (torch.autograd.grad((each * weight).sum(), given) for each in (out, expected))
    for own, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(own, other, atol=1e-11, rtol=1e-11)


def test_short_texts_are_causal_and_one_block_is_local() -> None:
    given = states(12)
    assert torch.equal(hea.attention(*given, PATTERN), hea.attention(*given, Causal()))
    assert hea.explain(PATTERN, 12, backend="gathered").computed_pairs >= hea.explain(PATTERN, 12).allowed_pairs
    given, local = states(22), hea.patterns.BlockLocal(4) & Causal()
    torch.testing.assert_close(hea.attention(*given, BlockTopK(4, 1)), hea.attention(*given, local))


def test_packed_and_padded_texts_are_as_alone() -> None:
    q, k, v = states(40)
    ids, mask = torch.tensor([[0] * 5 + [1] * 20 + [2] * 15] * 2), torch.ones(2, 40, dtype=torch.bool)
    ids[1], mask[1, :17] = 3, False
    out = hea.attention(q, k, v, PATTERN, key_mask=mask, segment_ids=ids)
    for example, start, stop in ((0, 0, 5), (0, 5, 25), (0, 25, 40), (1, 17, 40)):
        alone = (each[example : example + 1, :, start:stop] for each in (q, k, v))
        torch.testing.assert_close(out[example : example + 1, :, start:stop], hea.attention(*alone, PATTERN))
    assert not out[1, :, :17].any()


def llama(pattern: Any = PATTERN, **options: Any) -> Any:
    torch.manual_seed(0)
    config = tr.LlamaConfig(**{**DECODER, "num_key_value_heads": 2, **options})
    model = tr.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
    return hea.sparsify(model, pattern)


@torch.no_grad()
@pytest.mark.parametrize("num_chosen", [3, 10])
def test_blocks_of_equal_tokens_tie_whatever_the_rounding(num_chosen: int) -> None:
    """Their keys are equal where scores, and not keys, know of distances."""
    q, k, v = (torch.ones(2, 2, 48, 8) for _ in range(3))
    expected = hea.attention(q, k, torch.arange(48.0)[:, None] * v, BlockTopK(4, num_chosen))
    k = k * (1 + 2e-7 * torch.randn(k.shape, generator=torch.Generator().manual_seed(0)))
    rounded = hea.attention(q, k, torch.arange(48.0)[:, None] * v, BlockTopK(4, num_chosen))
    torch.testing.assert_close(rounded, expected, atol=1e-4, rtol=1e-5)
    first = torch.arange(4 * num_chosen - 4.0)
    torch.testing.assert_close(expected[0, 0, -1, 0], (first.sum() + 44 + 45 + 46 + 47) / (4 * num_chosen))


def test_later_tokens_change_nothing() -> None:
    model, ids = llama(), token_ids(1, 40)
    changed = ids.clone()
    changed[:, 25:] += 1
    assert torch.equal(model(ids).logits[:, :25], model(changed).logits[:, :25])
    assert not torch.allclose(model(ids).logits, hea.sparsify(model, None)(ids).logits, atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("side", ["none", "left"])
def test_decoding_is_the_whole_text(side: str) -> None:
    model, ids = llama(), token_ids(2, 40)
    mask = padding(ids, side)
    whole, cache, found = model(ids, attention_mask=mask, use_cache=False).logits, tr.DynamicCache(), []
    for start, stop in ((0, 15), (15, 18), *((place, place + 1) for place in range(18, 40))):
        step = model(ids[:, start:stop], attention_mask=mask[:, :stop], **{CACHE_ARGUMENT: cache}, use_cache=True)
        found.append(step.logits)
    torch.testing.assert_close(torch.cat(found, 1)[mask.bool()], whole[mask.bool()], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"cache_implementation": "static"}])
def test_generating_is_that_without_a_cache(options: dict[str, Any]) -> None:
    model, ids = llama(), token_ids(2, 20)
    given = {"attention_mask": padding(ids, "left"), "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    plain = {name: value for name, value in options.items() if name == "num_beams"}
    expected = model.generate(ids, **given, **plain, use_cache=False, eos_token_id=-1)
    assert torch.equal(model.generate(ids, **given, **options, eos_token_id=-1), expected)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:output_attentions")
def test_weights_and_matrices_follow_the_choice() -> None:
    model, ids = llama(), token_ids(1, 30)
    plain = model(ids).logits
    with_weights = model(ids, output_attentions=True)
    torch.testing.assert_close(with_weights.logits, plain, atol=1e-5, rtol=1e-4)
    read = (with_weights.attentions[0] > 0).sum(-1)
    assert read.tolist() == [[[PATTERN.num_keys_of(query, 30) for query in range(30)]] * read.shape[1]]
    matrix = torch.ones(30, 30, dtype=torch.bool).tril()[None, None]
    torch.testing.assert_close(model(ids, attention_mask=matrix).logits, plain, atol=1e-5, rtol=1e-4)


def test_compiled() -> None:
    torch.compiler.reset()
    given = states(30)
    compiled = torch.compile(hea.attention, fullgraph=True, backend="aot_eager")
    for out in (compiled(*given, PATTERN), hea.attention(*given, PATTERN)):
        gradients = torch.autograd.grad(out.square().sum(), given)
        expected = by_definition(*given, PATTERN)
        torch.testing.assert_close(out, expected)
        for own, other in zip(gradients, torch.autograd.grad(expected.square().sum(), given), strict=True):
            torch.testing.assert_close(own, other)


def test_some_layers() -> None:
    model = llama([PATTERN, None])
    reloaded = type(model.config)(**model.config.to_dict())
    assert reloaded.attention_pattern == [PATTERN.to_dict(), None]
    assert model(token_ids(1, 30)).logits.isfinite().all()


def test_refusals() -> None:
    q, k, v = states(20)
    with pytest.raises(InputError, match="Leave chosen out"):
        hea.attention(q, k, v, PATTERN, chosen=hea.ChosenTokens(torch.zeros(1, 1, 20, 1, dtype=torch.long)))
    with pytest.raises(UnsupportedBackendError, match="is for self-attention"):
        hea.attention(q, k, v, PATTERN, cross=True)
    with pytest.raises(InputError, match="key_mask"):
        hea.attention(q, k, v, PATTERN, key_mask=torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(ConfigurationError, match="cannot hold"):
        hea.sparsify(tr.LlamaConfig(**DECODER), {"encoder": PATTERN | Full(), "decoder": None})


def test_explained() -> None:
    explanation = hea.explain(BlockTopK(64, 3), 2048, num_heads=4)
    assert explanation.pattern == BlockTopK(64, 3)
    assert explanation.allowed_pairs == 4 * BlockTopK(64, 3).num_pairs(2048, 2048)
    assert "block_top_k(64, 3)" in str(explanation)
    assert explanation.relative_cost < 1
    assert hea.explain(BlockTopK(64, 3), 150).allowed_pairs == hea.explain(Causal(), 150).allowed_pairs
    assert hea.explain(llama(), 4096, sequence_ranks=2).exchange.mode == "heads"
    assert hea.explain(BlockTopK(64, 3), 2048, num_heads=3, sequence_ranks=2).exchange.mode == "heads"
    with pytest.raises(ConfigurationError, match="3 heads over 4 processes"):
        hea.explain(BlockTopK(64, 3), 2048, num_heads=3, sequence_ranks=4)
    assert "block_top_k(4, 3)" in str(hea.hub.model_card(llama()))


@pytest.mark.parametrize(
    ("processes", "mode", "message"),
    [
        (2, "halo", "mode='halo'"),
        (5, "auto", "4 heads over 5 processes"),
        (5, "heads", "4 heads over 5 processes"),
    ],
)
def test_processes_that_cannot_share_its_heads(processes: int, mode: str, message: str) -> None:
    layout, sizes = Layout(PATTERN, 4, 20, 20), HeadSizes(4, 4, 8, 8)
    with pytest.raises(ConfigurationError, match=message):
        exchange_of(layout, (), shard_bounds(20, processes), sizes, mode)
