"""Attention by groups of heads, and by blocks of long spans, against all pairs in float64, gradients included."""

from typing import Any

import pytest
import torch
from models.adaptive_span.dense_spans import dense_weights
from torch import Tensor

from hf_efficient_attn.layout.token_mask import NO_MASK
from hf_efficient_attn.models.spans import long_blocks
from hf_efficient_attn.models.spans.attention import attend_spans
from hf_efficient_attn.models.spans.config import SpanWindow
from hf_efficient_attn.models.spans.long_blocks import apart
from hf_efficient_attn.models.spans.module import SpanBounds

pytestmark = pytest.mark.filterwarnings("ignore:output_attentions")

LIMIT, RAMP, TOKENS, HEADS, WIDTH, SCALE = 130, 32, 150, 6, 8, 0.4
WINDOWS = {
    "causal with self": SpanWindow(LIMIT, RAMP, include_self=True, is_causal=True),
    "causal without self": SpanWindow(LIMIT, RAMP, include_self=False, is_causal=True),
    "both sides": SpanWindow(LIMIT, RAMP, include_self=True, is_causal=False),
}
# at whole numbers a key lies on a corner of the mask, where the gradient of the span is any between two slopes
SPANS = {
    "whole": torch.tensor([0.0, 31, 32, 33, 96, 97])[None, :, None],
    "ends": torch.tensor([0.0, 0, LIMIT, LIMIT, 64, 1])[None, :, None],
    "between": torch.tensor([0.25, 31.5, 32.75, 96.5, 97.5, 129.5])[None, :, None],
    "dynamic": LIMIT * torch.rand(2, HEADS, TOKENS, generator=torch.Generator().manual_seed(5)),
    "dynamic short": 12 * torch.rand(2, HEADS, TOKENS, generator=torch.Generator().manual_seed(6)),
}
HAS_SPAN_GRADIENT = ("between", "dynamic", "dynamic short")
CASES = [
    (window, has_table) for window in WINDOWS for has_table in (False, True) if not (has_table and "both" in window)
]


def leaves(has_table: bool, spans: Tensor, num_queries: int = TOKENS) -> dict[str, Tensor]:
    """Return random query, key, value, perhaps a position table, and these spans, in float64, all with gradients."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"query": (2, HEADS, num_queries, WIDTH)}
    shapes |= dict.fromkeys(("key", "value"), (2, HEADS, TOKENS, WIDTH))
    shapes |= {"position_table": (LIMIT, WIDTH)} if has_table else {}
    tensors = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    tensors["spans"] = spans.double().clone()
    return {name: tensor.requires_grad_() for name, tensor in tensors.items()}


def dense(tensors: dict[str, Tensor], window: SpanWindow) -> Tensor:
    """Return the output [B, T, H, D] by all pairs."""
    table = tensors.get("position_table")
    weights = dense_weights(tensors["query"], tensors["key"], tensors["spans"], window, SCALE, table)
    return (weights @ tensors["value"]).transpose(1, 2)


def ours(tensors: dict[str, Tensor], window: SpanWindow, **options: Any) -> Tensor:
    return attend_spans(**tensors, window=window, token_mask=NO_MASK, scale=SCALE, **options)[0]


# windows and spans meet each on one of the backends; on the other, it is thorough
@pytest.mark.parametrize(
    ("window", "has_table", "name", "backend"),
    [
        pytest.param(*case, name, backend, marks=[pytest.mark.thorough] * ((i + j + k) % 2))
        for i, case in enumerate(CASES)
        for j, name in enumerate(SPANS)
        for k, backend in enumerate(["reference", "blocked"])
    ],
)
def test_groups_of_heads_equal_all_pairs(window: str, has_table: bool, name: str, backend: str) -> None:
    """The spec's test 3: nothing that is left out had any weight, and nothing that has weight is left out."""
    tensors = leaves(has_table, SPANS[name])
    expected = dense(tensors, WINDOWS[window])
    actual = ours(tensors, WINDOWS[window], backend=backend)
    torch.testing.assert_close(actual, expected, atol=1e-10, rtol=1e-10)
    direction = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wanted = {key: x for key, x in tensors.items() if key != "spans" or name in HAS_SPAN_GRADIENT}
    theirs = torch.autograd.grad((expected * direction).sum(), list(wanted.values()))
    gradients = torch.autograd.grad((actual * direction).sum(), list(wanted.values()))
    for key, gradient, other in zip(wanted, gradients, theirs, strict=True):
        torch.testing.assert_close(gradient, other, atol=1e-9, rtol=1e-9, msg=lambda text, key=key: f"{key}: {text}")
    assert "spans" not in wanted or float(gradients[-1].abs().max()) > 1e-6


@pytest.mark.parametrize("num_queries", [1, 20])
@pytest.mark.parametrize(("window", "has_table"), CASES)
def test_queries_behind_cached_keys(window: str, has_table: bool, num_queries: int) -> None:
    spans = SPANS["between"]
    tensors = leaves(has_table, spans, num_queries)
    expected, actual = dense(tensors, WINDOWS[window]), ours(tensors, WINDOWS[window])
    torch.testing.assert_close(actual, expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("name", ["ends", "between", "dynamic"])
def test_weights_are_those_of_the_formula(name: str) -> None:
    """The spec's test 2: they sum to one, but for the first query, which without itself reads nothing."""
    window, tensors = WINDOWS["causal without self"], leaves(True, SPANS[name])
    with torch.no_grad():
        _, weights = attend_spans(**tensors, window=window, token_mask=NO_MASK, scale=SCALE, need_weights=True)
        table = tensors["position_table"]
        expected = dense_weights(tensors["query"], tensors["key"], tensors["spans"], window, SCALE, table)
    # weights are computed in float32
    torch.testing.assert_close(weights, expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(weights[:, :, 1:].sum(-1), torch.ones_like(weights[:, :, 1:, 0]), atol=1e-6, rtol=0)
    assert not weights[:, :, 0].any()


def test_uniform_scores_at_span_zero_give_the_normalised_ramp() -> None:
    """The spec's test 2: m / Σ m with Σ m = 16.5 at R = 32."""
    tensors = leaves(False, torch.zeros(1, HEADS, 1))
    tensors["query"] = torch.zeros_like(tensors["query"])
    with torch.no_grad():
        _, weights = attend_spans(
            **tensors, window=WINDOWS["causal without self"], token_mask=NO_MASK, scale=SCALE, need_weights=True
        )
    expected = (32 - torch.arange(32).double()) / 32 / 16.5
    torch.testing.assert_close(weights[0, 0, -1].flip(0)[1:33], expected, atol=1e-7, rtol=1e-6)
    assert not weights[0, 0, -1, :-33].any()


def test_all_of_the_limit_equals_no_mask() -> None:
    """The spec's test 8: at z = S the mask is 1 everywhere, so that fixed spans compute the same."""
    tensors = leaves(True, torch.full((1, HEADS, 1), float(LIMIT)))
    window = WINDOWS["causal without self"]
    assert torch.equal(ours(tensors, window), ours({**tensors, "spans": None}, window))


@pytest.mark.parametrize("has_table", [False, True])
@pytest.mark.parametrize("num_keys", [3, 40, TOKENS])
@pytest.mark.parametrize("name", ["whole", "ends", "between"])
def test_a_step_within_lasting_spans(name: str, num_keys: int, has_table: bool) -> None:
    """Masks that are kept from step to step, and keys that heads between others read for nothing, change no output."""
    window, tensors = WINDOWS["causal without self"], leaves(has_table, SPANS[name], 1)
    tensors |= {key: tensors[key][:, :, -num_keys:] for key in ("key", "value")}
    spans = tuple(SPANS[name].flatten().tolist())
    with torch.no_grad():
        expected = dense(tensors, window)
        for _ in range(2):
            actual = ours(tensors, window, bounds=SpanBounds(spans, spans, are_constant=True))
            torch.testing.assert_close(actual, expected, atol=1e-10, rtol=1e-10)


LONG_LIMIT, LONG_RAMP, LONG_HEADS, LONG_WIDTH, LONG_SCALE = 400, 32, 3, 8, 0.4


def window_of(include_self: bool) -> SpanWindow:
    return SpanWindow(LONG_LIMIT, LONG_RAMP, include_self, is_causal=True)


def spans_of(num_queries: int) -> Tensor:
    """Return short spans but for one token of each head and example, and a head whose spans are all long."""
    spans = 12 * torch.rand(2, LONG_HEADS, num_queries, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
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
    shapes = {"query": (2, LONG_HEADS, num_queries, LONG_WIDTH)}
    shapes |= dict.fromkeys(("key", "value"), (2, LONG_HEADS, num_keys, LONG_WIDTH))
    shapes |= {"position_table": (LONG_LIMIT, LONG_WIDTH)} if has_table else {}
    tensors = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    tensors["spans"] = spans_of(num_queries)
    assert apart(tensors["spans"], window, num_keys - num_queries) is not None
    leaves = {name: tensor.requires_grad_() for name, tensor in tensors.items()}
    table = leaves.get("position_table")
    weights = dense_weights(leaves["query"], leaves["key"], leaves["spans"], window, LONG_SCALE, table)
    expected = (weights @ leaves["value"]).transpose(1, 2)
    actual, _ = attend_spans(**leaves, window=window, token_mask=NO_MASK, scale=LONG_SCALE)
    torch.testing.assert_close(actual, expected, atol=1e-10, rtol=1e-10)
    direction = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    theirs = torch.autograd.grad((expected * direction).sum(), list(leaves.values()))
    ours = torch.autograd.grad((actual * direction).sum(), list(leaves.values()))
    for name, gradient, other in zip(leaves, ours, theirs, strict=True):
        torch.testing.assert_close(gradient, other, atol=1e-9, rtol=1e-9, msg=lambda text, name=name: f"{name}: {text}")
    assert float(ours[-1].abs().max()) > 1e-6
