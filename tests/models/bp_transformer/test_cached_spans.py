"""Spans appear in a cache where they end: decoding equals the whole text, and reads few nodes a token."""

import pytest
import torch
import transformers
from models.bp_transformer.tiny_models import build
from models_cases import TOLERANCE, random_ids
from pretended_cuda import on_cuda, pretended_cuda, unwrap

import hf_efficient_attn as hea
from hf_efficient_attn.integration.forward_context import CACHE_ARGUMENT
from hf_efficient_attn.models.tree.attention import write_spans
from hf_efficient_attn.models.tree.nodes import next_nodes

ROWS = [range(40), range(13, 40), range(1, 40)]


def left_padded() -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and a mask of rows of these lengths, one of them with a hole of a whole span."""
    mask = torch.zeros(3, 40, dtype=torch.long)
    for row, columns in zip(mask, ROWS, strict=True):
        row[list(columns)] = 1
    mask[2, 9:17] = 0
    return random_ids(3, 40), mask


@pytest.mark.parametrize("chunk", [1, 3, 16])
@pytest.mark.parametrize("is_static", [False, True])
@torch.no_grad()
def test_any_steps_equal_the_whole_text(chunk: int, is_static: bool) -> None:
    model = build(is_causal=True, num_nodes=1, clip_distance=3)
    ids, mask = left_padded()
    full = model(ids, attention_mask=mask, use_cache=False).logits
    cache = transformers.StaticCache(config=model.config, max_cache_len=45) if is_static else None
    parts = []
    for start in range(0, 40, chunk):
        stop = min(start + chunk, 40)
        out = model(ids[:, start:stop], attention_mask=mask[:, :stop], **{CACHE_ARGUMENT: cache}, use_cache=True)
        cache = out.past_key_values
        parts.append(out.logits)
    real = mask.bool()
    torch.testing.assert_close(torch.cat(parts, 1)[real], full[real], atol=TOLERANCE, rtol=TOLERANCE)


@torch.no_grad()
def test_a_compiled_step_computes_the_same() -> None:
    """With a static cache, whose length so far the compiler does not know."""
    torch.compiler.reset()
    model = build(is_causal=True, num_nodes=2, num_hidden_layers=1)
    ids, mask = left_padded()
    full = model(ids, attention_mask=mask, use_cache=False).logits
    cache = transformers.StaticCache(config=model.config, max_cache_len=40)
    model(ids[:, :36], attention_mask=mask, **{CACHE_ARGUMENT: cache})
    step = torch.compile(model, backend="eager", fullgraph=True, dynamic=False)
    for place in range(36, 40):
        table = model.create_masks_for_generate(model.config, full[:, :1], mask[:, : place + 1], cache)
        logits = step(ids[:, place : place + 1], attention_mask=table, **{CACHE_ARGUMENT: cache}).logits
        torch.testing.assert_close(logits[:, 0], full[:, place], atol=TOLERANCE, rtol=TOLERANCE)


def test_a_step_reads_as_many_nodes_as_the_tree_says() -> None:
    """About k · log2(n) of them, those that the pattern lists for the token."""
    config = hea.BPTransformerConfig(is_causal=True, num_nodes=3)
    for place in (0, 1, 6, 31, 32, 1000):
        real = torch.ones(1, place + 1, dtype=torch.bool)
        nodes = next_nodes(config.pattern, 2, torch.tensor(place), real, 1, False)
        assert nodes.read.shape[2] == 4 * (place + 1).bit_length()
        expected = config.pattern.num_keys_of(2 * place, 2 * place + 1) - 1
        assert int(nodes.is_read.sum()) == expected
        # the spans that end with this token
        assert nodes.sizes == tuple(2**level for level in range(1, 12) if (place + 1) % 2**level == 0)
    assert nodes.num_spans == 0


def test_caches_without_room_for_spans_are_refused() -> None:
    model = build(is_causal=True)
    with pytest.raises(hea.ConfigurationError, match="attention_pattern"):
        hea.PatternCache(model.config)
    cache = transformers.DynamicCache()
    for layer in range(2):
        cache.update(*torch.zeros(2, 1, 4, 3, 8).unbind(0), layer)
    with pytest.raises(hea.UnsupportedBackendError, match="keys of 4 heads"):
        model(random_ids(1, 2), **{CACHE_ARGUMENT: cache})
    sliding = transformers.DynamicCache(config=transformers.MistralConfig(sliding_window=4, num_hidden_layers=2))
    model(random_ids(1, 2), **{CACHE_ARGUMENT: sliding})
    with pytest.raises(hea.UnsupportedBackendError, match="DynamicSlidingWindowLayer"):
        model(random_ids(1, 2), **{CACHE_ARGUMENT: sliding})


def test_few_new_spans_are_written_alike_on_a_device_without_a_wait() -> None:
    held, new = torch.randn(2, 3, 6, 4), torch.randn(2, 3, 2, 4)
    # in the second row one that does not exist shares the column of one that does
    columns, is_new = torch.tensor([[1, 4], [2, 2]]), torch.tensor([[True, False], [False, True]])
    expected = held.clone()
    expected[0, :, 1], expected[1, :, 2] = new[0, :, 0], new[1, :, 1]
    with pretended_cuda() as waits:
        on_device = on_cuda(held)
        write_spans(on_device, *(on_cuda(each) for each in (new, columns, is_new)))
        assert waits.total() == 0
    write_spans(held, new, columns, is_new)
    assert torch.equal(held, expected)
    assert torch.equal(unwrap(on_device), expected)
