"""Attention by groups of heads against all pairs at once, in float64, gradients included; what a head computes."""

from typing import Any

import pytest
import torch
from models.adaptive_span.dense_spans import dense_weights, key_index
from torch import Tensor

from hf_efficient_attn.layout.score_terms import SoftSpan
from hf_efficient_attn.layout.token_mask import NO_MASK
from hf_efficient_attn.models.spans.attention import attend_spans, terms_of
from hf_efficient_attn.models.spans.config import SpanGroup, SpanWindow, groups_of, span_groups
from hf_efficient_attn.models.spans.long_blocks import step_plan
from hf_efficient_attn.models.spans.module import SpanBounds, bounds_of

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


@pytest.mark.parametrize("backend", ["reference", "sdpa", "blocked"])
@pytest.mark.parametrize("name", SPANS)
@pytest.mark.parametrize(("window", "has_table"), CASES)
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


@pytest.mark.parametrize("num_queries", [1, 5, 20])
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


def test_known_spans_compute_the_same() -> None:
    tensors, window = leaves(True, SPANS["between"]), WINDOWS["causal without self"]
    known = tuple(SPANS["between"].flatten().tolist())
    assert torch.equal(ours(tensors, window, bounds=SpanBounds(known, known)), ours(tensors, window))


@pytest.mark.parametrize(
    ("span", "num_inner", "num_keys"),
    # keys are z + R, rounded up to granules of 32; the first granules are inside the span
    [
        (0, 1, 32),
        (0.5, 1, 64),
        (31, 1, 64),
        (32, 33, 64),
        (33, 33, 96),
        (96, 97, 128),
        (97, 97, 160),
        (1000, 993, 1024),
        (1024, 1024, 1024),
    ],
)
def test_a_head_computes_its_own_span_in_granules(span: float, num_inner: int, num_keys: int) -> None:
    window = SpanWindow(1024, 32, include_self=False, is_causal=True)
    groups = span_groups([0.0, span, 1024.0], [0.0, span, 1024.0], window, 512)
    own = next(group for group in groups if 1 in group.heads)
    assert (own.num_inner, own.num_keys) == (num_inner, num_keys)
    assert sorted(head for group in groups for head in group.heads) == [0, 1, 2]
    assert next(group for group in groups if 0 in group.heads).num_keys == 32


@pytest.mark.parametrize("num_queries", [1, 512])
@pytest.mark.parametrize(("limit", "ramp"), [(1024, 32), (100, 32), (20, 32), (64, 1), (7, 3)])
def test_groups_cover_every_key_with_weight(limit: int, ramp: int, num_queries: int) -> None:
    window = SpanWindow(limit, ramp, include_self=True, is_causal=True)
    spans = [limit * step / 37 for step in range(38)]
    for group in span_groups(spans, spans, window, num_queries):
        for head in group.heads:
            assert min(limit, spans[head] + ramp) <= group.num_keys <= limit
            # index num_inner - 1 is the last that all of them read with weight 1
            assert group.num_inner - 1 <= spans[head]


def test_few_queries_share_a_call_but_never_read_twice_what_they_need() -> None:
    window = SpanWindow(8192, 32, include_self=False, is_causal=True)
    spans = [0.0, 10.0, 20.0, 30.0, 400.0, 700.0, 3000.0, 8192.0]
    many, few = (span_groups(spans, spans, window, queries) for queries in (9, 8))
    assert (len(many), len(few)) == (6, 4)
    for group in few:
        assert all(group.num_keys <= 2 * max(64, spans[head] + 64) for head in group.heads)


def test_learned_terms_are_looked_up_around_the_ramp_alone() -> None:
    """What lies within the span passes through the kernel that knows no terms."""
    window = SpanWindow(8192, 32, include_self=False, is_causal=True)
    query, spans = torch.zeros(1, 2, 64, 4), torch.tensor([5000.0, 8192.0])[None, :, None]
    groups = groups_of(spans, bounds_of(spans, None, layer_idx=0), window, query)
    (term,) = terms_of(query[:, :1], spans[:, :1], window, groups[0], None, 1.0)
    assert term.label == SoftSpan(window.ramp, window.shift, num_inner=4993)
    assert torch.equal(term.values, spans[:, :1, :, None])
    assert terms_of(query[:, 1:], spans[:, 1:], window, groups[1], None, 1.0) == ()


def test_neighbours_on_both_sides_have_the_same_weight() -> None:
    tensors = leaves(False, SPANS["between"])
    tensors["query"] = torch.zeros_like(tensors["query"])
    with torch.no_grad():
        _, weights = attend_spans(
            **tensors, window=WINDOWS["both sides"], token_mask=NO_MASK, scale=SCALE, need_weights=True
        )
    row = weights[0, :, 75, 1:]
    torch.testing.assert_close(row, row.flip(-1), atol=1e-7, rtol=1e-6)
    reach = key_index(TOKENS, TOKENS, WINDOWS["both sides"])[75]
    for head, span in enumerate(SPANS["between"].flatten().tolist()):
        assert torch.equal(weights[0, head, 75] > 0, reach < min(LIMIT, span + RAMP))


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
            actual = ours(tensors, window, bounds=SpanBounds(spans, spans, are_lasting=True))
            torch.testing.assert_close(actual, expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("long", [(1,), (0, 5), (2, 3, 5)])
def test_few_keys_are_read_by_all_heads_between_and_many_by_their_own(long: tuple[int, ...]) -> None:
    short = tuple(head for head in range(6) if head not in long)
    plan = step_plan((SpanGroup(short, 1, 64), SpanGroup(long, 481, 544)))
    computed = {head: each.num_keys for each in plan.ranges for head in range(each.first, each.stop)}
    assert computed == {head: 544 if head in long else 64 for head in computed}
    assert [head for _, first, stop in plan.taken for head in range(first, stop)] == list(range(6))
    for index, first, stop in plan.taken:
        assert all(plan.ranges[index].num_keys == (544 if head in long else 64) for head in range(first, stop))
