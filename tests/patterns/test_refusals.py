"""Patterns that are refused: the type of the error, and what it names."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from transformers import BertConfig

import hf_efficient_attn as hea
from hf_efficient_attn import ConfigurationError, InputError, attention, explain, sparsify
from hf_efficient_attn.patterns import (
    Band,
    BlockLocal,
    Blocks,
    BlockTopK,
    Causal,
    Complement,
    CompressedKeys,
    Dilated,
    Full,
    GlobalTokens,
    Grid,
    InterleavedSpanTree,
    Intersection,
    KeyTable,
    Pattern,
    PerHead,
    RandomBlocks,
    SizedGrid,
    SpanTree,
    Strided,
    Union,
    bigbird,
    parse_pattern,
    patterns_per_layer,
)
from hf_efficient_attn.patterns.bands import band_of_window
from hf_efficient_attn.patterns.intervals import Intervals

BAND, TOP = Band(3, 3), BlockTopK(2, 2)
LONGFORMER, LED = hea.SparseTransformerConfig.longformer, hea.SparseSeq2SeqConfig.led
TILE = {"tile": "L", "patterns": {"L": BAND}}

# what is called, and what the error names
VALUES: list[tuple[Callable[[], Any], str]] = [
    (lambda: Band(-2, 0), "left is -2"),
    (lambda: Band(1, 1.5), "right is 1.5"),
    (lambda: Band(True, 1), "left is True"),
    (lambda: Dilated(1, 1, 0), "step is 0"),
    (lambda: Strided("2"), "step is '2'"),
    (lambda: BlockLocal(0), "block_tokens is 0"),
    (lambda: Blocks(Causal(), 2.0), "block_tokens is 2.0"),
    (lambda: KeyTable([]), "rows is"),
    (lambda: KeyTable([[-1]]), "rows is"),
    (lambda: KeyTable([0]), "rows[0] is 0"),
    (lambda: KeyTable(numpy.array([[0.0]])), "rows[0] is [0.0]"),
    (lambda: KeyTable(torch.ones(2, 2, dtype=torch.bool)), "rows[0] is [True, True]"),
    (lambda: KeyTable(numpy.array(3)), "rows is"),
    (lambda: GlobalTokens(0), "positions is"),
    (lambda: GlobalTokens("0"), "positions is"),
    (lambda: GlobalTokens([0.5]), "positions is"),
    (lambda: GlobalTokens([True]), "positions is"),
    (lambda: GlobalTokens([0], attends_to_all=False, attended_by_all=False), "both false"),
    (lambda: RandomBlocks(0, 4), "num_blocks is 0"),
    (lambda: RandomBlocks(1, 4, seed=-1), "seed is -1"),
    (lambda: RandomBlocks(1, 4, exclude=3), "3 is not a pattern"),
    (lambda: RandomBlocks(1, 4, exclude=GlobalTokens([-1]), is_causal=True), "length"),
    (lambda: bigbird(plan="authors", causal=True), "causal"),
    (lambda: bigbird(plan="paper"), "seeded, authors, transformers"),
    (lambda: bigbird(num_random_blocks=-1), "num_random_blocks is -1"),
    *((lambda given=given: BlockTopK(*given), "integer") for given in ((0, 3), (4, 0), (4, 2.0), (True, 3))),
    (lambda: TOP | Band(1, 0), "BlockTopK("),
    (lambda: Causal() & TOP, "BlockTopK("),
    (lambda: ~TOP, "BlockTopK("),
    (lambda: PerHead([TOP, Causal()]), "BlockTopK("),
    (lambda: parse_pattern("blocks(block_top_k(2, 2), 4)"), "BlockTopK("),
    (lambda: TOP.draw(8), "content"),
    (lambda: TOP.allowed(3, 1), "content"),
    (lambda: TOP.key_intervals(0, 3, 8), "content"),
    (lambda: TOP.full_key_intervals(0, 0, 8), "content"),
    (lambda: Grid([56, 56], [BAND]), "shape has 2 axes"),
    (lambda: Grid([], []), "shape is []"),
    (lambda: Grid([0, 4], [BAND, BAND]), "at least 1"),
    (lambda: Grid([4, None], [BAND, BAND]), "None"),
    (lambda: SizedGrid([None, 4], [BAND, BAND]), "shape is [None, 4]"),
    (lambda: Grid(56, [BAND]), "shape is 56"),
    (lambda: Grid("56", [BAND, BAND]), "shape is '56'"),
    (lambda: Grid([2] * 9, [BAND] * 9), "1 to 8"),
    (lambda: Grid([2**16, 2**16], [BAND, BAND]), "2147483647 tokens"),
    (lambda: Grid([4], [BAND], -1), "prefix_tokens is -1"),
    (lambda: Grid([4], [BAND], 0, "wrapped"), "borders is 'wrapped'"),
    (lambda: Grid([4], [BAND], is_causal=1), "is_causal is 1"),
    (lambda: Grid([4], [Causal()], borders="shifted"), "shifted"),
    (lambda: Grid([4], [Band(-1, 3)], borders="shifted"), "shifted"),
    (lambda: Grid([4], [CompressedKeys(2, 2)]), "different sequences"),
    (lambda: Grid([4], [3]), "patterns"),
    (lambda: Grid([5, 4], [BAND, BAND]).allowed(0, 0), "resolve(num_keys)"),
    (lambda: InterleavedSpanTree(2).allowed(0, 0), "length"),
    (lambda: InterleavedSpanTree(0), "num_nodes is 0"),
    (lambda: InterleavedSpanTree(2, num_tokens=0), "num_tokens is 0"),
    (lambda: SpanTree(0), "num_nodes is 0"),
    (lambda: SpanTree(2, builder="paper"), "fixed, release"),
    (lambda: PerHead([Band(1, 1), Causal()]).heads(3), "3 heads"),
    (lambda: PerHead([Band(1, 1), Causal()]).allowed(0, 0), "heads(num_heads)"),
    *((lambda window=window: band_of_window(window), f"attention_window={window}") for window in (-2, 0, 1, 3, 7)),
    *((lambda window=window: band_of_window(window), "integer") for window in (8.0, "512", None, True, [8])),
    *(
        (lambda preset=preset: preset(attention_window=[8.0] * 12), "attention_window=8.0")
        for preset in (LONGFORMER, LED)
    ),
    (lambda: patterns_per_layer([BAND], 4), "4 layers"),
    (lambda: patterns_per_layer({**TILE, "tile": "LG"}, 4), "'G'"),
    (lambda: patterns_per_layer({"tile": "", "patterns": {}}, 4), "tiled"),
    (lambda: patterns_per_layer({"tile": "L"}, 4), "tiled"),
    (lambda: patterns_per_layer({**TILE, "start": 1}, 4), "tiled"),
    (lambda: patterns_per_layer(None, 4), "pattern"),
    (lambda: patterns_per_layer("band", 4), "'band'"),
    (lambda: patterns_per_layer({}, 4), "kind"),
    (lambda: patterns_per_layer({"encodr": BAND}, 4), "'encodr'"),
    (lambda: patterns_per_layer({0: BAND, 1: None}, 4), "[0, 1]"),
    (lambda: Pattern.from_dict({"kind": "bnd"}), "Did you mean 'band'"),
    (lambda: Pattern.from_dict({"left": 1}), "kind"),
    (lambda: Pattern.from_dict({"kind": ["band"]}), "No pattern is called"),
    (lambda: Pattern.from_dict({"kind": "band", "lefft": 1, "right": 1}), "Did you mean 'left'"),
    (lambda: Pattern.from_dict({"kind": "band", "left": 1}), "'right'"),
    (lambda: Pattern.from_dict({"kind": "band", "left": "1", "right": 1}), "left is '1'"),
    (lambda: Pattern.from_dict({"kind": "key_table", "rows": [[0]], "columns": []}), "'columns'"),
    (lambda: Pattern.from_dict({"kind": "union", "patterns": [{"kind": "full"}, 3]}), "3 is not a pattern"),
    (lambda: Pattern.from_dict({"kind": "complement", "pattern": {"kind": "fulll"}}), "Did you mean 'full'"),
    (lambda: Pattern.from_dict([]), "dict"),
    (lambda: Pattern.from_dict("band"), "dict"),
]
LENGTHS: list[tuple[Callable[[], Any], str]] = [
    (lambda: Grid([56, 56], [BAND, BAND], 1).resolve(3136), "3136 tokens"),
    (lambda: Grid([4, 5], [Band(2, 1), BAND], 2).causal().resolve(23), "23 tokens"),
    (lambda: Grid([None, 2, 3], [Band(1, 0), Full(), Full()], 1).resolve(8), "multiple of 6"),
    (lambda: Grid([5, 4], [SpanTree(2), BAND]).resolve(20), "5 nodes"),
    (lambda: InterleavedSpanTree(2).resolve(13), "12 or 14"),
    (lambda: SpanTree(2).resolve(13), "13 nodes"),
    (lambda: SpanTree(2).resolve(0), "num_keys is 0"),
    (lambda: (Band(1, 0) | GlobalTokens([4])).draw(4), "5 tokens"),
    (lambda: Full().draw(0), "num_queries is 0"),
    *((lambda head=head: BAND.draw(4, head=head), "head is") for head in (-1, 2**16, 1.0, True, None)),
    (lambda: PerHead([BAND, Causal()]).draw(4, head=-3), "head is"),
    (lambda: PerHead([BAND, Causal()]).resolve(4, head=2, num_heads=2), "head is 2"),
]
# what is written, and what the error names
EXPRESSIONS: list[tuple[Any, str]] = [
    ("", "expression"),
    ("band(4,", "expression"),
    (3, "3 is not a pattern expression"),
    ("4", "'4' is not a pattern"),
    ("full() | 3", "'3' is not a pattern"),
    ("bnd(4, 4)", "Did you mean 'band'"),
    ("fall", "'fall'"),
    ("band(4, 4, **x)", "'x'"),
    ("__import__('os')", "'__import__'"),
    ("band", "write band(left, right)"),
    ("band(3, 3) | global", "write global([positions, ...])"),
    ("full", "write full()"),
    ("bigbird", "write bigbird()"),
    ("band(4)", "'right'"),
    ("band(4, rigth=4)", "'rigth'"),
    ("dilated(4)", "missing"),
    ("per_head(band(1, 0), band(3, 0))", "write per_head([patterns, ...])"),
    ("global(0, read=True)", "write global([positions, "),
    ("bigbird(1, 2, 3, 4, 5, 6)", "write bigbird(block_tokens=64"),
    ("band(4.0, 4)", "'4.0'"),
    ("band(1 + 1, 4)", "'1 + 1'"),
    ("band(4, 4) + full()", "'band(4, 4) + full()' is not allowed"),
    ("full().kinds", "'full().kinds' is not allowed"),
    ("(lambda: full())()", "full())()' is not allowed"),
    ("grid([4], [band(1, 1)], 0, 'shfted')", "borders is 'shfted'"),
]


@pytest.mark.parametrize(("make", "named"), VALUES)
def test_values_of_patterns(make: Callable[[], Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(named)):
        make()


@pytest.mark.parametrize(("make", "named"), LENGTHS)
def test_lengths_and_heads(make: Callable[[], Any], named: str) -> None:
    with pytest.raises(InputError, match=re.escape(named)):
        make()


@pytest.mark.parametrize(("text", "named"), EXPRESSIONS)
def test_expressions(text: Any, named: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(named)):
        parse_pattern(text)


@pytest.mark.parametrize("pattern", [RandomBlocks(1, 4), bigbird(4, 1), SpanTree(2), GlobalTokens([-1])])
def test_unresolved_patterns(pattern: Pattern) -> None:
    assert pattern.depends_on_length
    for call in (
        lambda: pattern.allowed(0, 0),
        lambda: pattern.key_intervals(0, 3, 8),
        lambda: pattern.num_pairs(8, 8),
    ):
        with pytest.raises(ConfigurationError, match="resolve\\(num_keys\\)"):
            call()


@pytest.mark.parametrize("bad", [(), [1], Band, "band"])
def test_compositions_of_what_is_no_pattern(bad: object) -> None:
    for make in (Union, Intersection, PerHead, Complement, lambda value: Blocks(value, 4)):
        with pytest.raises(ConfigurationError):
            make(bad)


class WithoutKind(Pattern):
    """As a newcomer writes a pattern."""

    def allowed(self, query: Any, key: Any) -> Any:
        return query == key

    def key_intervals(self, first_query: int, last_query: int, num_keys: int) -> Intervals:
        return ((first_query, last_query + 1),)


def test_a_class_without_a_kind() -> None:
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
        with pytest.raises(ConfigurationError, match="WithoutKind"):
            use()


def test_classes_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pattern, "kinds", dict(Pattern.kinds))

    class Undecorated(WithoutKind, kind="undecorated"):
        pass

    @dataclass(frozen=True)
    class WithoutIntervals(Pattern, kind="without_intervals"):
        def allowed(self, query: Any, key: Any) -> Any:
            return query == key

    @dataclass(frozen=True)
    class Listed(WithoutIntervals, kind="listed"):
        intervals: tuple[tuple[int, int], ...]

        def key_intervals(self, first_query: int, last_query: int, num_keys: int) -> Intervals:
            return self.intervals

    states = torch.zeros(1, 1, 2048, 8)
    cases: list[tuple[Pattern, str]] = [(Undecorated(), "dataclass"), (WithoutIntervals(), "key_intervals")]
    # not sorted, overlapping, empty, before the first key, behind the last
    wrong = (((4, 5), (0, 1)), ((0, 2), (1, 3)), ((2, 2),), ((-1, 2),), ((0, 4096),))
    cases += [(Listed(intervals), "key_intervals") for intervals in wrong]
    for pattern, named in cases:
        for use in (
            lambda pattern=pattern: attention(states, states, states, pattern, backend="blocked"),
            lambda pattern=pattern: explain(pattern, 2048),
            *((lambda pattern=pattern: pattern.draw(8),) if named != "dataclass" else ()),
        ):
            with pytest.raises(ConfigurationError, match=named):
                use()

    # in the right form, but not the keys of `allowed`: without its key, and with others
    for intervals in (((0, 1),), ((0, 2048),)):
        for pattern in (Listed(intervals), Listed(intervals) | Band(1, 1), Listed(intervals).causal()):
            with pytest.raises(ConfigurationError, match="Listed: key_intervals"):
                attention(states, states, states, pattern)
            with pytest.raises(ConfigurationError, match="Listed: key_intervals"):
                explain(pattern, 2048)

    # integers alone know `and`
    @dataclass(frozen=True)
    class Earlier(Pattern, kind="earlier"):
        def allowed(self, query: Any, key: Any) -> Any:
            return key <= query and query - key < 2

        def key_intervals(self, first_query: int, last_query: int, num_keys: int) -> Intervals:
            return ((max(0, first_query - 1), last_query + 1),)

    for backend in ("auto", "blocked", "reference"):
        with pytest.raises(ConfigurationError, match=r"Earlier\.allowed"):
            attention(states, states, states, Earlier(), backend=backend)

    with pytest.raises(ConfigurationError, match="'band'"):

        class AnotherBand(Pattern, kind="band"):
            pass
