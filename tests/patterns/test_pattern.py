"""What every pattern promises, against brute force on random patterns."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from patterns.relation import keys_of, pairs_of, rows_of
from patterns.strategies import atoms, compositions, extents, with_heads
from transformers import BertConfig

from hf_efficient_attn import attention, explain, sparsify
from hf_efficient_attn.errors import ConfigurationError, InputError
from hf_efficient_attn.patterns import (
    Band,
    BlockLocal,
    Blocks,
    Causal,
    Complement,
    Dilated,
    Full,
    GlobalTokens,
    Intersection,
    Pattern,
    PerHead,
    RandomBlocks,
    SpanTree,
    Strided,
    Union,
    bigbird,
    counting,
)
from hf_efficient_attn.patterns.intervals import Intervals, normalize
from hf_efficient_attn.patterns.token_order import Extent


@given(compositions, extents)
def test_allowed_is_the_same_on_integers_and_tensors(pattern: Pattern, extent: Extent) -> None:
    num_queries, num_keys, offset = extent
    pattern = pattern.resolve(num_keys)
    queries, keys = torch.arange(offset, offset + num_queries)[:, None], torch.arange(num_keys)[None]
    for same in (pattern, pattern.with_tables(torch.tensor)):
        mask = same.allowed(queries, keys)
        assert mask.dtype == torch.bool
        assert mask.shape == (num_queries, num_keys)
        assert {(query + offset, key) for query, key in mask.nonzero().tolist()} == pairs_of(pattern, *extent)
    assert isinstance(pattern.allowed(0, 0), bool)


@given(compositions, extents)
def test_intervals_are_bounds_and_exact_for_one_query(pattern: Pattern, extent: Extent) -> None:
    num_queries, num_keys, offset = extent
    pattern = pattern.resolve(num_keys)
    for first, last in {(offset, offset + num_queries - 1), (offset, offset + num_queries // 2)}:
        rows = rows_of(pattern, first, last, num_keys)
        outer, inner = (
            intervals(first, last, num_keys) for intervals in (pattern.key_intervals, pattern.full_key_intervals)
        )
        assert outer == normalize(outer)
        assert inner == normalize(inner)
        assert keys_of(outer) >= set.union(*rows)
        assert keys_of(inner) <= set.intersection(*rows)
        for query, row in enumerate(rows, start=first):
            assert keys_of(pattern.key_intervals(query, query, num_keys)) == row
            assert keys_of(pattern.full_key_intervals(query, query, num_keys)) == row
            assert pattern.num_keys_of(query, num_keys) == len(row)


@given(atoms, atoms, extents)
def test_outer_intervals_are_exact_for_atoms_and_unions(left: Pattern, right: Pattern, extent: Extent) -> None:
    num_queries, num_keys, offset = extent
    for pattern in (left.resolve(num_keys), (left | right).resolve(num_keys)):
        for last in range(offset, offset + num_queries):
            rows = rows_of(pattern, offset, last, num_keys)
            assert keys_of(pattern.key_intervals(offset, last, num_keys)) == set.union(*rows)


@given(compositions, extents)
def test_counts_and_members(pattern: Pattern, extent: Extent) -> None:
    pattern = pattern.resolve(extent.num_keys)
    pairs = pairs_of(pattern, *extent)
    assert pattern.num_pairs(*extent) == len(pairs)
    assert set.union(*(pairs_of(member, *extent) for member in pattern.members())) == pairs
    assert all(member.kind != "union" for member in pattern.members())


@given(compositions, extents)
def test_token_orders_cover_every_pair(pattern: Pattern, extent: Extent) -> None:
    pattern = pattern.resolve(extent.num_keys)
    covered = {
        (query, key)
        for order in pattern.token_orders(*extent)
        for a, query in enumerate(order.queries)
        for b, key in enumerate(order.keys)
        if order.local is None or order.local.allowed(a + order.local_query_offset, b)
    }
    assert covered >= pairs_of(pattern, *extent)


@given(compositions)
def test_properties_are_sound(pattern: Pattern) -> None:
    pattern = pattern.resolve(12)
    pairs = pairs_of(pattern, 12, 12)
    if pattern.is_causal:
        assert all(key <= query for query, key in pairs)
    if pattern.max_tokens_ahead is not None:
        assert all(key - query <= pattern.max_tokens_ahead for query, key in pairs)
    if pattern.period is not None and pattern.period < 40:
        moved = pairs_of(pattern, 12, 12 + pattern.period, pattern.period)
        assert {
            (query - pattern.period, key - pattern.period) for query, key in moved if key >= pattern.period
        } == pairs


@pytest.mark.parametrize(
    ("pattern", "limit"),
    [
        (~Band(0, None), -1),
        (~Band(-1, None), 0),
        (~Full(), -1),
        (~(Band(3, None) & Band(-1, None)), 0),
        (~(Band(-1, None) | Band(2, 2)), 0),
        (~PerHead([Band(0, None), Band(-1, None)]), 0),
        (~~(Band(-1, None) | Causal()) & ~Band(0, None), -1),
        (~Causal(), None),
        (~Strided(2), None),
    ],
    ids=str,
)
def test_complements_prove_that_they_are_causal(pattern: Pattern, limit: int | None) -> None:
    assert pattern.max_tokens_ahead == limit


@given(compositions)
def test_decoding_reach(pattern: Pattern) -> None:
    """The last of 14 tokens reads the same where those between the first ones and the last ones are dropped."""
    reach = pattern.causal().decoding_reach()
    if reach is not None and reach.left is not None and reach.num_first + reach.left < 13:
        kept = [*range(reach.num_first), *range(13 - reach.left, 14)]
        (read,) = rows_of(pattern.causal(), 13, 13, 14)
        assert read <= set(kept)
        assert [{kept.index(key) for key in read}] == rows_of(pattern.causal(), len(kept) - 1, len(kept) - 1, len(kept))


def test_global_positions_and_drawn_blocks() -> None:
    rest = Blocks(GlobalTokens([3]) | Blocks(GlobalTokens([-1]), 2), 4) | Band(1, 0)
    assert rest.global_positions() == ((3, 4), (-1, 8))
    assert RandomBlocks(2, 4, exclude=rest).global_positions() == ((3, 4), (-1, 8))
    assert RandomBlocks(2, 4, exclude=rest).drawn_blocks() == (2, 4)
    assert (RandomBlocks(2, 4) & Causal()).drawn_blocks() is None


@given(compositions)
def test_causal_form_and_subsample(pattern: Pattern) -> None:
    drawn = pattern.resolve(12)
    causal = drawn.causal()
    assert causal.is_causal
    assert pairs_of(causal, 12, 12) == {(query, key) for query, key in pairs_of(drawn, 12, 12) if key <= query}
    for step in (2, 3):
        local = drawn.subsample(step)
        if local is not None:
            pairs = pairs_of(local, 12 // step, 12 // step)
            for start in range(step):
                assert pairs == {
                    (query // step, key // step)
                    for query, key in pairs_of(drawn, 12, 12)
                    if query % step == key % step == start
                }


@settings(max_examples=50)
@given(with_heads | compositions)
def test_resolve_json_and_heads(pattern: Pattern) -> None:
    assert Pattern.from_dict(pattern.to_dict()) == pattern
    assert hash(Pattern.from_dict(pattern.to_dict())) == hash(pattern)
    heads = pattern.heads(4)
    for head, own in enumerate(heads):
        drawn = own.resolve(12, layer=2, head=head, num_heads=4)
        assert drawn == pattern.resolve(12, layer=2, head=head, num_heads=4)
        assert drawn == drawn.resolve(12)
        assert not drawn.depends_on_length
        assert Pattern.from_dict(drawn.to_dict()) == drawn
    if not pattern.depends_on_length:
        assert pairs_of(heads[0].resolve(9), 9, 9) == {
            (query, key) for query, key in pairs_of(heads[0].resolve(12), 9, 12) if key < 9
        }


def test_algebra_gives_values() -> None:
    a, b, c = Band(1, 1), GlobalTokens([0], reads_all=False), BlockLocal(4)
    assert (a | b) | c == a | (b | c) == Union([a, b, c])
    assert (a & b) & c == a & (b & c) == Intersection([a, b, c])
    assert a | a is a
    assert ~~a is a
    assert ((a | b) & c).members() == (a & c, b & c)
    assert Blocks(a | b, 4).members() == (Blocks(a, 4), Blocks(b, 4))
    assert (Band(2, 2) | GlobalTokens([0])).causal() == Band(2, 0) | (GlobalTokens([0]) & Causal())
    assert Full().causal() == Causal()
    assert len({Band(1, 1), Band(1, 1), Band(1, 0)}) == 2
    with pytest.raises(TypeError):
        a | 3  # type: ignore[operator]


def test_periods() -> None:
    assert (BlockLocal(4) | BlockLocal(6) | Band(1, 1)).period == 12
    assert Blocks(Dilated(4, 4, 2), 8).period == 8
    assert (Band(1, 1) | GlobalTokens([0])).period is None
    assert (~BlockLocal(4)).period == 4
    assert (Blocks(Band(1, 1), 4) & Causal()).granularity == 4


def test_heads_share_patterns_evenly() -> None:
    a, b, c = Band(1, 1), Causal(), BlockLocal(4)
    assert PerHead([a, b]).heads(8) == (a,) * 4 + (b,) * 4
    assert (PerHead([a, b]) | c).heads(2) == (a | c, b | c)
    assert (~PerHead([a, b])).heads(2) == (~a, ~b)
    assert PerHead([PerHead([a, b]), c]).heads(4) == (a, a, c, c)
    assert PerHead([a, b]).causal() == PerHead([Band(1, 0), b])
    with pytest.raises(ConfigurationError, match="cannot share 3 heads"):
        PerHead([a, b]).heads(3)
    with pytest.raises(ConfigurationError, match="heads\\(num_heads\\)"):
        PerHead([a, b]).allowed(0, 0)


@pytest.mark.parametrize("pattern", [RandomBlocks(1, 4), bigbird(4, 1), SpanTree(2), GlobalTokens([-1])])
def test_unresolved_patterns_say_so(pattern: Pattern) -> None:
    assert pattern.depends_on_length
    for call in (
        lambda: pattern.allowed(0, 0),
        lambda: pattern.key_intervals(0, 3, 8),
        lambda: pattern.num_pairs(8, 8),
    ):
        with pytest.raises(ConfigurationError, match="resolve\\(num_keys\\)"):
            call()


def test_draw_resolves() -> None:
    assert (Band(1, 0) | GlobalTokens([-1])).draw(3) == "■⬚■\n■■■\n■■■"
    assert Causal().draw(2, query_offset=2) == "■■■⬚\n■■■■"
    assert PerHead([Full(), Causal()]).draw(2, head=1) == "■⬚\n■■"
    with pytest.raises(InputError, match="num_queries is 0"):
        Full().draw(0)


def test_long_counts_are_closed_forms() -> None:
    tokens = 131_072
    assert Band(256, 256).num_pairs(tokens, tokens) == tokens * 513 - 256 * 257
    assert GlobalTokens([0, -1]).resolve(tokens).num_pairs(tokens, tokens) == 4 * tokens - 4
    assert BlockLocal(64).num_pairs(tokens, tokens) == 64 * tokens


def test_long_compositions_are_counted_by_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = 1 << 20
    band = tokens * 129 - 64 * 65
    # a global token reads and is read by all, but for the 129 of its own row and column that the band has, and itself
    inner = 2 * (tokens - 129)
    monkeypatch.setattr(counting, "MAX_COUNTED_INTERVALS", tokens)
    expected = {
        Full(): tokens**2,
        Strided(8): tokens * tokens // 8,
        ~Band(64, 64): tokens**2 - band,
        Band(64, 64) | GlobalTokens([500]): band + inner,
        ~(Band(64, 64) | GlobalTokens([500])): tokens**2 - band - inner,
        (Band(64, 64) | GlobalTokens([500])) & Causal(): (band + tokens + inner) // 2,
        Blocks(Band(1, 1), 64) | GlobalTokens([128]): (3 * tokens - 128) * 64 + 2 * (tokens - 192),
        Dilated(640, 640, 320) | GlobalTokens([5000]): 5 * tokens - 1920 + 2 * (tokens - 5),
    }
    assert {pattern: pattern.num_pairs(tokens, tokens) for pattern in expected} == expected
    assert Full().num_pairs(2**31 - 1, 2**31 - 1) == (2**31 - 1) ** 2
    monkeypatch.setattr(counting, "MAX_COUNTED_INTERVALS", 1000)
    with pytest.raises(InputError, match=r"union pattern would look at more than 1,000 intervals.*Use explain"):
        (Strided(8) | GlobalTokens([0])).num_pairs(900, 900)


@pytest.mark.parametrize("bad", [(), [1], Band, "band"])
def test_compositions_refuse_what_is_no_pattern(bad: object) -> None:
    for make in (Union, Intersection, PerHead, Complement, lambda value: Blocks(value, 4)):
        with pytest.raises(ConfigurationError):
            make(bad)


class WithoutKind(Pattern):
    """As a newcomer writes a pattern."""

    def allowed(self, query: Any, key: Any) -> Any:
        return query == key

    def key_intervals(self, first_query: int, last_query: int, num_keys: int) -> Intervals:
        return ((first_query, last_query + 1),)


def test_a_class_without_a_kind_is_told_of_key_tables() -> None:
    states = torch.zeros(1, 1, 4, 8)
    for use in (
        lambda: WithoutKind() | Band(1, 1),
        lambda: ~WithoutKind(),
        lambda: PerHead([WithoutKind()]),
        lambda: WithoutKind().to_dict(),
        lambda: attention(states, states, states, WithoutKind()),
        lambda: explain(WithoutKind(), 64),
        lambda: sparsify(BertConfig(), WithoutKind()),
    ):
        with pytest.raises(ConfigurationError, match=r"WithoutKind is a subclass of Pattern without a kind.*KeyTable"):
            use()


@pytest.mark.parametrize("head", [-1, -3, 2**16, 1.0, True, None])
@pytest.mark.parametrize("pattern", [Band(1, 0), PerHead([Band(1, 0), Band(3, 0)])], ids=lambda each: each.kind)
def test_heads_that_no_model_has_are_refused(pattern: Pattern, head: Any) -> None:
    with pytest.raises(InputError, match="head is .* it must be an integer from 0 to 65535"):
        pattern.draw(4, head=head)


def test_a_head_beyond_those_of_the_model_is_refused() -> None:
    with pytest.raises(InputError, match="head is 2; it must be an integer from 0 to 1, of 2 heads"):
        PerHead([Band(1, 0), Band(3, 0)]).resolve(4, head=2, num_heads=2)
