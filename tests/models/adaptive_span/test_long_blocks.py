"""Blocks of long dynamic spans that are computed apart, against all pairs in float64, gradients included."""

import pytest
import torch
from models.adaptive_span.dense_spans import dense_weights
from torch import Tensor

from hf_efficient_attn.layout.token_mask import NO_MASK
from hf_efficient_attn.models.spans import long_blocks
from hf_efficient_attn.models.spans.attention import attend_spans
from hf_efficient_attn.models.spans.config import SpanWindow
from hf_efficient_attn.models.spans.long_blocks import apart

LIMIT, RAMP, HEADS, WIDTH, SCALE = 400, 32, 3, 8, 0.4


def window_of(include_self: bool) -> SpanWindow:
    return SpanWindow(LIMIT, RAMP, include_self, is_causal=True)


def spans_of(num_queries: int) -> Tensor:
    """Return short spans but for one token of each head and example, and a head whose spans are all long."""
    spans = 12 * torch.rand(2, HEADS, num_queries, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    spans[0, 0, num_queries - 1], spans[1, 0, 70], spans[0, 1, 10], spans[1, 1, 131] = 250.25, 350.5, 100.75, 399.75
    spans[:, 2] += 300.0
    return spans


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute blocks apart however little that saves."""
    monkeypatch.setattr(long_blocks, "CALL_KEYS", 0)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("has_table", [False, True])
@pytest.mark.parametrize("include_self", [False, True])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(330, 330), (192, 592), (150, 600)])
def test_long_blocks_equal_all_pairs(num_queries: int, num_keys: int, include_self: bool, has_table: bool) -> None:
    window, generator = window_of(include_self), torch.Generator().manual_seed(0)
    shapes = {"query": (2, HEADS, num_queries, WIDTH)}
    shapes |= dict.fromkeys(("key", "value"), (2, HEADS, num_keys, WIDTH))
    shapes |= {"position_table": (LIMIT, WIDTH)} if has_table else {}
    tensors = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    tensors["spans"] = spans_of(num_queries)
    assert apart(tensors["spans"], window, num_keys - num_queries) is not None
    leaves = {name: tensor.requires_grad_() for name, tensor in tensors.items()}
    table = leaves.get("position_table")
    weights = dense_weights(leaves["query"], leaves["key"], leaves["spans"], window, SCALE, table)
    expected = (weights @ leaves["value"]).transpose(1, 2)
    actual, _ = attend_spans(**leaves, window=window, token_mask=NO_MASK, scale=SCALE)
    torch.testing.assert_close(actual, expected, atol=1e-10, rtol=1e-10)
    direction = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    theirs = torch.autograd.grad((expected * direction).sum(), list(leaves.values()))
    ours = torch.autograd.grad((actual * direction).sum(), list(leaves.values()))
    for name, gradient, other in zip(leaves, ours, theirs, strict=True):
        torch.testing.assert_close(gradient, other, atol=1e-9, rtol=1e-9, msg=lambda text, name=name: f"{name}: {text}")
    assert float(ours[-1].abs().max()) > 1e-6


def test_a_few_long_spans_leave_the_others_short() -> None:
    """1 token of 2,048 reads the limit: its block of 64 does, and the others of the head read what they need."""
    spans = torch.full((1, 2, 2048), 20.0)
    spans[0, 0, 1000], spans[0, 1, 1500] = 1000.0, 900.0
    found = apart(spans, SpanWindow(1024, 32, include_self=True, is_causal=True), 1024)
    assert found is not None
    bounds, calls = found
    assert (bounds.lowest, bounds.highest) == ((20.0, 20.0), (32.0, 32.0))
    (call,) = calls
    assert (call.group.num_keys, call.num_before, call.rows) == (1024, 1023, (1000 // 64, 32 + 1500 // 64))


def test_spans_of_one_length_are_computed_together() -> None:
    window = window_of(include_self=True)
    assert apart(torch.full((2, HEADS, 512), 200.0), window, 0) is None
    # what little is saved is worth no call
    assert apart(spans_of(150), window, 0) is None


def test_what_is_behind_the_last_token_shortens_no_span() -> None:
    spans = torch.full((1, 2, 2047), 20.0)
    spans[0, :, 1000] = 1000.0
    found = apart(spans, SpanWindow(1024, 32, include_self=True, is_causal=True), 1024)
    assert found is not None
    assert found[0].lowest == (20.0, 20.0)
