"""Processes that share a text compute what one process would: outputs, all gradients, and no more is sent than is said.

Processes (gloo, CPU) run `sharded_attention_script.py`.
"""

import json
from pathlib import Path

import pytest
from distributed import run_distributed
from sharded_attention_script import CASES

from hf_efficient_attn.attention.sharded.layer import exchange_of
from hf_efficient_attn.attention.sharded.plan import HeadSizes, gather_traffic, row_parts
from hf_efficient_attn.attention.sharded.shards import TokenSequence, key_exchange, shard_bounds
from hf_efficient_attn.errors import ConfigurationError, InputError
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.layout.token_mask import Document
from hf_efficient_attn.patterns import Band, BlockLocal, Full, GlobalTokens, Pattern
from hf_efficient_attn.patterns.intervals import Intervals

SCRIPT = Path(__file__).parents[1] / "sharded_attention_script.py"
TOLERANCE = 1e-10


@pytest.mark.parametrize("size", [3, *(pytest.param(size, marks=pytest.mark.thorough) for size in (2, 4))])
def test_processes_compute_what_one_does(size: int, tmp_path: Path) -> None:
    run_distributed(SCRIPT, tmp_path, world_size=size)
    for rank in range(size):
        report = json.loads((tmp_path / f"{size}-{rank}.json").read_text())
        assert {name.rpartition(", ")[0] for name in report} == {
            name for name, case in CASES.items() if case.tokens >= size
        }
        assert not {name: found for name, found in report.items() if not max(found.values()) <= TOLERANCE}


def wanted(pattern: Pattern, num_tokens: int, num_shards: int) -> tuple[Intervals, ...]:
    """Return the keys that each process gets in a text that is one document."""
    layout, sequence = (
        Layout(pattern, 2, num_tokens, num_tokens),
        TokenSequence((Document(0, num_tokens),), ((0, num_tokens),)),
    )
    return key_exchange(layout, (sequence,), shard_bounds(num_tokens, num_shards), True, 1).wanted


def test_a_band_needs_its_neighbours_edges() -> None:
    assert wanted(Band(3, 2), 32, 4) == (((8, 10),), ((5, 8), (16, 18)), ((13, 16), (24, 26)), ((21, 24),))
    # several shards away
    assert wanted(Band(10, 0), 16, 4) == ((), ((0, 4),), ((0, 8),), ((2, 12),))


def test_whole_blocks_need_nothing() -> None:
    assert wanted(BlockLocal(8), 32, 4) == ((),) * 4
    assert wanted(BlockLocal(6), 32, 4)[1] == ((6, 8), (16, 18))


def test_global_tokens_need_what_they_are_read_by() -> None:
    """Their own rows are computed where the keys are."""
    pattern = Band(1, 1) | GlobalTokens([0])
    sequence = TokenSequence((Document(0, 32),), ((0, 32),))
    exchange = key_exchange(Layout(pattern, 2, 32, 32), (sequence,), shard_bounds(32, 4), True, 1)
    assert exchange.wanted[2] == ((0, 1), (15, 16), (24, 25))
    assert exchange.wanted[0] == ((8, 9),)
    assert exchange.wide_positions == ((0, 1),)


def test_what_travels_first() -> None:
    """Global tokens, where the others are edges; nothing apart where that would not help."""
    sequence = TokenSequence((Document(0, 64),), ((0, 64),))

    def first(pattern: Pattern) -> tuple[Intervals, ...]:
        return key_exchange(Layout(pattern, 2, 64, 64), (sequence,), shard_bounds(64, 4), True, 1).first

    tokens = ((0, 1), (13, 14))
    assert first(Band(3, 2) | GlobalTokens([0, 13])) == ((), tokens, tokens, tokens)
    assert first(Band(3, 2)) == first(Band(40, 0) | GlobalTokens([0])) == first(Full()) == ((),) * 4


def test_what_can_be_computed_while_keys_travel() -> None:
    """All but the edges of a band; nothing where every query reads a token of another process; all of whole blocks."""
    sequence = TokenSequence((Document(0, 64),), ((0, 64),))

    def parts(pattern: Pattern, received: Intervals, early: Intervals = ()) -> list[tuple[int, int, Intervals, bool]]:
        found = row_parts(Layout(pattern, 2, 64, 64), sequence, (32, 48), received, early)
        return [(part.first, part.stop, part.keys, part.is_inner) for part in found]

    # edges read what is around them alone
    assert parts(Band(3, 2), ((29, 32), (48, 50))) == [
        (32, 35, ((29, 37),), False),
        (35, 46, ((32, 48),), True),
        (46, 48, ((43, 50),), False),
    ]
    assert parts(BlockLocal(8), ()) == [(32, 48, ((32, 48),), True)]
    assert parts(Band(3, 0) | GlobalTokens([0]), ((0, 1), (29, 32))) == [(32, 48, ((0, 1), (29, 48)), False)]
    # unless that one travels first
    assert parts(Band(3, 0) | GlobalTokens([0]), ((0, 1), (29, 32)), ((0, 1),)) == [
        (32, 35, ((0, 1), (29, 35)), False),
        (35, 48, ((0, 1), (32, 48)), True),
    ]
    # fewer than half of the rows are not worth a call of their own
    assert [each[3] for each in parts(Band(10, 0), ((22, 32),))] == [False]


def test_traffic_of_a_window() -> None:
    """The example of the design: 112 times less than gathering all keys."""
    num_tokens, sizes = 131072, HeadSizes(16, 4, 64, 64)
    bounds = shard_bounds(num_tokens, 8)
    sequence = TokenSequence((Document(0, num_tokens),), ((0, num_tokens),))
    _, traffic = exchange_of(Layout(Band(1024, 0), 16, num_tokens, num_tokens), (sequence,), bounds, sizes)
    assert traffic.mode == "halo"
    assert traffic.received == (0, *[1024 * 4 * 128] * 7)
    assert gather_traffic(bounds, sizes).most == 112 * traffic.most


@pytest.mark.parametrize(
    ("pattern", "num_heads", "mode"), [(Full(), 8, "heads"), (Full(), 7, "halo"), (Band(2, 2), 8, "halo")]
)
def test_what_sends_least_is_chosen(pattern: Pattern, num_heads: int, mode: str) -> None:
    sequence = TokenSequence((Document(0, 64),), ((0, 64),))
    layout, sizes = Layout(pattern, num_heads, 64, 64), HeadSizes(num_heads, num_heads, 8, 8)
    assert exchange_of(layout, (sequence,), shard_bounds(64, 4), sizes)[1].mode == mode


def test_refusals() -> None:
    with pytest.raises(InputError, match="A text of 3 tokens cannot be split over 4 processes"):
        shard_bounds(3, 4)
    sequence = TokenSequence((Document(0, 64),), ((0, 64),))
    layout, sizes = Layout(Full(), 6, 64, 64), HeadSizes(6, 6, 8, 8)
    assert exchange_of(layout, (sequence,), shard_bounds(64, 4), sizes, "heads")[1].mode == "heads"
    with pytest.raises(ConfigurationError, match="6 heads over 8 processes"):
        exchange_of(layout, (sequence,), shard_bounds(64, 8), sizes, "heads")
