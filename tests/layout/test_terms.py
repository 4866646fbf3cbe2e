"""Labels: values, JSON, and what they count."""

import pytest
import torch

from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.layout.plan import read_plan, write_plan
from hf_efficient_attn.layout.terms import Distance, Label, SpanRelation
from hf_efficient_attn.patterns.bands import Band
from hf_efficient_attn.patterns.span_tree import SizedSpanTree

LABELS = [Distance(-3, 5), SpanRelation(13, 2, clip_distance=1), SpanRelation(8, 4, 2, left_only=True)]


@pytest.mark.parametrize("label", LABELS, ids=str)
def test_json_and_plans(label: Label) -> None:
    assert Label.from_dict(label.to_dict()) == label
    assert read_plan(write_plan(Band(1, 1), 3, (label,))) == (Band(1, 1), 3, (label,))


@pytest.mark.parametrize("label", LABELS, ids=str)
def test_labels_are_indices(label: Label) -> None:
    positions = torch.arange(26)
    labels = label.of(positions[:, None], positions)
    assert labels.shape == (26, 26)
    assert labels.min() >= 0
    assert labels.max() < label.num_labels


def test_relations_are_those_of_the_tree() -> None:
    tree = SizedSpanTree(13, 2)
    labels = SpanRelation(13, 2, clip_distance=2).of(torch.arange(26)[:, None], torch.arange(26))
    for query in range(26):
        for key in range(26):
            if tree.allowed(query, key):
                assert labels[query, key] == tree.relation_label(query, key, clip_distance=2)


def test_wrong_labels_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="last must be at least first"):
        Distance(3, 2)
    with pytest.raises(ConfigurationError, match="unknown kind 'bucket'. Known kinds: distance, ramp, span_relation"):
        Label.from_dict({"kind": "bucket"})
