"""What every pattern promises, against brute force on random patterns."""

import pytest
import torch
from hypothesis import assume, given, settings
from patterns.relation import Pairs, keys_of, pairs_of, rows_of
from patterns.strategies import atoms, compositions, extents, with_heads

from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.patterns import (
    Band,
    BlockLocal,
    Blocks,
    Causal,
    Dilated,
    Full,
    GlobalTokens,
    Intersection,
    Pattern,
    PerHead,
    RandomBlocks,
    Strided,
    Union,
)
from hf_efficient_attn.patterns.intervals import normalize
from hf_efficient_attn.patterns.pattern import Extent


@given(compositions, extents)
def test_it_keeps_its_promises(pattern: Pattern, extent: Extent) -> None:
    pattern = pattern.resolve(extent.num_keys)
    pairs = pairs_of(pattern, *extent)
    check_allowed_of_tensors(pattern, extent, pairs)
    check_intervals(pattern, extent, pairs)
    assert pattern.num_pairs(*extent) == len(pairs)
    assert set.union(*(pairs_of(member, *extent) for member in pattern.members())) == pairs
    assert all(member.kind != "union" for member in pattern.members())
    check_token_orders(pattern, extent, pairs)


def check_allowed_of_tensors(pattern: Pattern, extent: Extent, pairs: Pairs) -> None:
    """`pairs` are those of integers."""
    num_queries, num_keys, offset = extent
    queries, keys = torch.arange(offset, offset + num_queries)[:, None], torch.arange(num_keys)[None]
    for same in (pattern, pattern.with_tables(torch.tensor)):
        mask = same.allowed(queries, keys)
        assert mask.dtype == torch.bool
        assert mask.shape == (num_queries, num_keys)
        assert {(query + offset, key) for query, key in mask.nonzero().tolist()} == pairs
    assert isinstance(pattern.allowed(0, 0), bool)


def check_intervals(pattern: Pattern, extent: Extent, pairs: Pairs) -> None:
    """They are bounds, and exact for one query."""
    num_queries, num_keys, offset = extent
    for first, last in {(offset, offset + num_queries - 1), (offset, offset + num_queries // 2)}:
        rows = [{key for query, key in pairs if query == each} for each in range(first, last + 1)]
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


def check_token_orders(pattern: Pattern, extent: Extent, pairs: Pairs) -> None:
    covered = {
        (query, key)
        for order in pattern.token_orders(*extent)
        for a, query in enumerate(order.queries)
        for b, key in enumerate(order.keys)
        if order.local is None or order.local.allowed(a + order.local_query_offset, b)
    }
    assert covered >= pairs


@given(atoms, atoms, extents)
def test_outer_intervals_are_exact_for_atoms_and_unions(left: Pattern, right: Pattern, extent: Extent) -> None:
    num_queries, num_keys, offset = extent
    for pattern in (left.resolve(num_keys), (left | right).resolve(num_keys)):
        for last in range(offset, offset + num_queries):
            rows = rows_of(pattern, offset, last, num_keys)
            assert keys_of(pattern.key_intervals(offset, last, num_keys)) == set.union(*rows)


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


def has_causal_form(pattern: Pattern) -> bool:
    """Whether none of its random blocks exclude a pattern that depends on the length."""
    try:
        pattern.causal()
    except ConfigurationError:
        return False
    return True


@given(compositions)
def test_decoding_reach(pattern: Pattern) -> None:
    """The last of 14 tokens reads the same where those between the first ones and the last ones are dropped."""
    assume(has_causal_form(pattern))
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
    # keys of an axis of their own are not counted as queries are
    assume(not drawn.needs_two_axes)
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
    a, b, c = Band(1, 1), GlobalTokens([0], attends_to_all=False), BlockLocal(4)
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


def test_draw_resolves() -> None:
    assert (Band(1, 0) | GlobalTokens([-1])).draw(3) == "■⬚■\n■■■\n■■■"
    assert Causal().draw(2, query_offset=2) == "■■■⬚\n■■■■"
    assert PerHead([Full(), Causal()]).draw(2, head=1) == "■⬚\n■■"
    for pattern in (Band(1, 0) | GlobalTokens([4]), GlobalTokens([-5])):
        assert len(pattern.draw(5)) == 29
