"""Labels: values, JSON, and what they count."""

import pytest
import torch

from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.layout.operator_args import read_call_text, write_call_text
from hf_efficient_attn.layout.score_terms import Distance, InterleavedRelation, Label, Slope, SoftSpan, SpanRelation
from hf_efficient_attn.models.parts.embeddings import alibi_bias, alibi_slopes
from hf_efficient_attn.patterns.bands import Band
from hf_efficient_attn.patterns.span_tree import SizedSpanTree

INDICES = [
    Distance(-3, 5),
    SpanRelation(13, 2, clip_distance=1),
    SpanRelation(8, 4, 2, left_only=True),
    InterleavedRelation(2, clip_distance=1),
    InterleavedRelation(4, 2, left_only=True),
]
LABELS = [*INDICES, Slope(), SoftSpan(32, shift=1, num_inner=7)]


@pytest.mark.parametrize("label", LABELS, ids=str)
def test_json_and_plans(label: Label) -> None:
    assert Label.from_dict(label.to_dict()) == label
    assert read_call_text(write_call_text(Band(1, 1), 3, (label,), 2, 8, True)) == (Band(1, 1), 3, (label,), 2, 8, True)


@pytest.mark.parametrize("label", INDICES, ids=str)
def test_labels_are_indices(label: Label) -> None:
    positions = torch.arange(26)
    labels = label.of(positions[:, None], positions)
    assert labels.shape == (26, 26)
    assert labels.min() >= 0
    assert labels.max() < label.num_values


def test_relations_are_those_of_the_tree() -> None:
    tree = SizedSpanTree(13, 2)
    labels = SpanRelation(13, 2, clip_distance=2).of(torch.arange(26)[:, None], torch.arange(26))
    for query in range(26):
        for key in range(26):
            if tree.allowed(query, key):
                assert labels[query, key] == tree.relation_label(query, key, clip_distance=2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_soft_span_is_the_logarithm_of_the_mask(dtype: torch.dtype) -> None:
    """Far from 0 too, where bfloat16 does not count tokens; in float64 to the last digit of the mask."""
    label, query = SoftSpan(32, shift=1), torch.tensor(4000)
    spans = torch.tensor([0.0, 0.3, 31.5, 3000.0])[:, None].to(dtype)
    keys = torch.arange(4000)
    scores = label.score(spans, label.of(query, keys))
    assert scores.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    index = 3999 - keys
    expected = ((32 + spans.double() - index) / 32).clamp(0.0, 1.0)
    torch.testing.assert_close(scores.double().exp(), expected, atol=0.0 if dtype == torch.float64 else 1e-5, rtol=1e-5)
    assert torch.equal(scores.isneginf(), expected == 0)
    assert torch.equal(scores == 0, expected == 1)


def test_gradient_of_a_soft_span_is_that_of_autograd() -> None:
    label, keys = SoftSpan(4), torch.arange(12)
    # corners of the mask and the ends of the ramp among them
    spans = torch.tensor([0.0, 2.0, 2.5, 20.0], dtype=torch.float64)[:, None].requires_grad_()
    labels = label.of(torch.tensor(11), keys)
    scores = label.score(spans, labels)
    direction = torch.rand(scores.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    (expected,) = torch.autograd.grad(scores, spans, direction)
    actual = label.gradient(spans.detach(), labels, direction)
    torch.testing.assert_close(actual.sum(-1, keepdim=True), expected)
    mask = scores.detach().exp()
    assert torch.equal(actual != 0, (mask > 0) & (mask < 1))


def test_scores_in_place_are_those_that_have_a_gradient() -> None:
    label, spans = SoftSpan(7, shift=1), torch.rand(2, 1, 5, 1) * 40
    before = (spans.clone(), label.of(torch.tensor(60), torch.arange(61)))
    labels = before[1].clone()
    for values in (spans, spans[..., :1, :].expand(2, 1, 5, 1), torch.tensor([3.0])):
        with_gradient = label.score(values.clone().requires_grad_(), labels).detach()
        assert torch.equal(label.score(values, labels), with_gradient)
    assert torch.equal(spans, before[0])
    assert torch.equal(labels, before[1])


def test_a_slope_is_that_of_alibi() -> None:
    slopes = torch.tensor(alibi_slopes(4), dtype=torch.float64)[None, :, None, None].requires_grad_()
    positions = torch.arange(7)
    labels = Slope().of(positions[:, None], positions)
    scores = Slope().score(slopes, labels)
    assert torch.equal(scores, alibi_bias(4, positions, 7).double())
    direction = torch.rand(scores.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    (expected,) = torch.autograd.grad(scores, slopes, direction)
    torch.testing.assert_close(Slope().gradient(slopes, labels, direction).sum((2, 3), keepdim=True), expected)


def test_wrong_labels_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="ramp"):
        SoftSpan(0)
    with pytest.raises(ConfigurationError, match="num_inner"):
        SoftSpan(32, num_inner=-1)
    with pytest.raises(ConfigurationError, match="last must be at least first"):
        Distance(3, 2)
    with pytest.raises(ConfigurationError, match="'bucket'"):
        Label.from_dict({"kind": "bucket"})
