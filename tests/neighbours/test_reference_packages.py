"""Attention of reformer-pytorch and routing-transformer, with their rotations and centroids, in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

import hf_efficient_attn as hea
from hf_efficient_attn.models.efficient_reformer.chunks import LSHRule, chunk_order
from hf_efficient_attn.models.efficient_reformer.hashing import hash_vectors
from hf_efficient_attn.models.routing_transformer.membership import balanced_groups
from hf_efficient_attn.patterns import Band, Causal, Full

LSHAttention = pytest.importorskip("reformer_pytorch").LSHAttention
KmeansAttention = pytest.importorskip("routing_transformer.routing_transformer").KmeansAttention

HEADS, TOKENS, DIM = 4, 64, 8


def states(count: int, rows: int = 2) -> list[Tensor]:
    draw = {"generator": torch.Generator().manual_seed(0), "dtype": torch.float64, "requires_grad": True}
    return [torch.randn(rows, HEADS, TOKENS, DIM, **draw) for _ in range(count)]


def check_equal(found: Tensor, expected: Tensor, given: list[Tensor], compared: Any = 1, atol: float = 1e-11) -> None:
    """Check outputs and gradients.

    compared: 1 where they are, else 0, [B, H, N, 1].
    """
    torch.testing.assert_close(found * compared, expected * compared, atol=atol, rtol=1e-9)
    weight = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=found.dtype) * compared
    slopes = [torch.autograd.grad((each * weight).sum(), given) for each in (found, expected)]
    for own, other in zip(*slopes, strict=True):
        torch.testing.assert_close(own, other, atol=10 * atol, rtol=1e-8)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"attend_across_buckets": False},
        {"allow_duplicate_attention": False},
        {"random_rotations_per_head": True, "n_hashes": 1},
    ],
    ids=["default", "within buckets", "once", "a head each"],
)
@pytest.mark.parametrize("backend", ["reference", "gathered"])
def test_hashed_attention(is_causal: bool, options: dict[str, Any], backend: str) -> None:
    """There, buckets are as long as chunks, and scores are divided by √D although keys have length 1.

    With allow_duplicate_attention=False, the rounds in which a key is read are counted one by one there. A key that
    the first chunk of a round reads in the last chunk of the round before counts 0 times, and its weight is multiplied
    by 1e9. So the tokens of first chunks are not compared.
    """
    chunk = 8
    theirs = LSHAttention(bucket_size=chunk, causal=is_causal, **{"n_hashes": 3, **options}).eval()
    query, value = given = states(2)
    torch.manual_seed(3)
    expected = theirs(query.flatten(0, 1), value.flatten(0, 1))[0].unflatten(0, (-1, HEADS))

    torch.manual_seed(3)
    sizes = (DIM, theirs.n_hashes, TOKENS // chunk // 2)
    # of a head, of all heads, or of every head of every example
    rows = len(query) * HEADS if options.get("random_rotations_per_head") else 1
    rotations = torch.randn(rows, *sizes, dtype=torch.float64).expand(len(query) * HEADS, *sizes)
    buckets = hash_vectors(query.detach().flatten(0, 1)[None], rotations, (TOKENS // chunk,)).view(
        len(query), HEADS, theirs.n_hashes, TOKENS
    )
    rule = LSHRule(
        TOKENS // chunk,
        chunk,
        before=1,
        after=0,
        attend_across_buckets=options.get("attend_across_buckets", True),
        count_duplicates=options.get("allow_duplicate_attention", True),
        chunk_by_bucket=False,
    )
    pattern = Causal() if is_causal else Full()
    call: dict[str, Any] = {"chosen": chunk_order(buckets, rule, None, None), "backend": backend, "scale": DIM**-0.5}
    found = hea.attention(query, normalize(query, dim=-1), value, pattern, **call)
    if rule.count_duplicates:
        check_equal(found, expected, given)
        return
    first = call["chosen"].order[..., :chunk].flatten(2)
    compared = torch.ones(found.shape[:3], dtype=found.dtype).scatter(2, first, 0.0)
    assert 0.5 < compared.mean() < 1
    # 1e-9 is added to the counts
    check_equal(found, expected, given, compared[..., None], atol=1e-7)


CLUSTERS, WIDTH = 4, 10


def with_centroids(vectors: Tensor, **options: Any) -> tuple[Any, Tensor]:
    """Return their attention with random centroids, and the similarity of vectors to these."""
    theirs = KmeansAttention(CLUSTERS, WIDTH, HEADS, DIM, **options).double().eval()
    generator = torch.Generator().manual_seed(2)
    means = normalize(torch.randn(HEADS, CLUSTERS, DIM, generator=generator, dtype=torch.float64), dim=-1)
    theirs.kmeans.means.copy_(means)
    theirs.kmeans.initted.fill_(True)
    return theirs, normalize(vectors.detach(), dim=-1) @ means.transpose(1, 2)


def groups_of(of_queries: Tensor, of_keys: Tensor) -> hea.KeyGroups:
    documents = torch.zeros(1, TOKENS, dtype=torch.long)
    groups = balanced_groups(of_queries, of_keys, documents, TOKENS, WIDTH, is_packed=False)
    return hea.KeyGroups(groups.queries, groups.keys, join="mean", mean_epsilon=1e-5)


@pytest.mark.parametrize("backend", ["reference", "gathered"])
def test_routed_attention_of_encoders(backend: str) -> None:
    query, key, value = given = states(3)
    theirs, similarity = with_centroids(torch.cat([query, key], 2))
    chosen = groups_of(*similarity.split(TOKENS, 2))
    found = hea.attention(query, key, value, Full(), chosen=chosen, backend=backend)
    check_equal(found, theirs(query, key, value)[0], given)


@pytest.mark.parametrize("backend", ["reference", "gathered"])
def test_routed_attention_of_decoders(backend: str) -> None:
    """There, the first token of a cluster reads itself, and no other does, as `include_self=False` of ours.

    Decoders there that do not share queries and keys also have a learned key in every cluster, which ours have not.
    """
    query, value = given = states(2)
    theirs, similarity = with_centroids(query, causal=True, shared_qk=True)
    chosen = groups_of(similarity, similarity)
    found = hea.attention(
        query, normalize(query, dim=-1), value, Band(None, -1), chosen=chosen, backend=backend, scale=DIM**-0.5
    )
    ones = torch.ones(chosen.queries.shape[:2] + (TOKENS,), dtype=torch.float64)
    # how many clusters a token is in, and of how many it is the first
    count, first = (
        torch.zeros_like(ones).scatter_add(2, each.flatten(2), torch.ones_like(each.flatten(2), dtype=torch.float64))
        for each in (chosen.queries, chosen.queries[..., :1])
    )
    found = found + (first / (count + 1e-5))[..., None] * value
    check_equal(found, theirs(query, query, value)[0], given)
