"""Labels that take many operations are computed once, and the cache counts them and nothing else."""

import pytest
import torch

import hf_efficient_attn as hea
from hf_efficient_attn.backends.blocked import terms as lookups
from hf_efficient_attn.layout.cache import BoundedCache
from hf_efficient_attn.patterns import InterleavedSpanTree


def test_labels_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: BoundedCache[torch.Tensor] = BoundedCache(lookups.CACHE_BYTES)
    found = []
    compute = lookups.labels_of

    def labels_of(*arguments: object) -> torch.Tensor:
        found.append(compute(*arguments))
        return found[-1]

    monkeypatch.setattr(lookups, "_labels", kept)
    monkeypatch.setattr(lookups, "labels_of", labels_of)
    label = hea.InterleavedRelation(2, 2)
    q, k, v = torch.randn(3, 1, 2, 600, 8)
    terms = (hea.Term(torch.randn(1, 2, 1, label.num_values, requires_grad=True), label),)
    outs = [hea.attention(q, k, v, InterleavedSpanTree(2), terms=terms, backend="blocked") for _ in range(2)]
    assert torch.equal(*outs)
    assert len(found) == len(kept)
    assert kept.num_bytes < 2 * sum(8 * each.numel() for each in found) + 4096 * len(found)
