"""The work and the memory of a layout grow as its length and what its pattern can express, and more is refused.

Counted in numbers that torch writes, not in seconds.
"""

from dataclasses import replace
from functools import reduce
from operator import and_, or_
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_efficient_attn import attention, explain
from hf_efficient_attn.attention import select as selection
from hf_efficient_attn.attention.dispatch import _plans
from hf_efficient_attn.attention.select import select
from hf_efficient_attn.errors import InputError, MaskLimitError
from hf_efficient_attn.layout import block_rows, dense_mask
from hf_efficient_attn.layout import block_table as block_tables
from hf_efficient_attn.layout.block_layout import BlockCosts, BlockLayout
from hf_efficient_attn.layout.call import AttentionCall, Inputs
from hf_efficient_attn.layout.compile import compile_layout
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.layout.score_terms import Distance, Term
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.patterns import (
    Band,
    Causal,
    Dilated,
    GlobalTokens,
    KeyTable,
    Pattern,
    RandomBlocks,
    Strided,
    bigbird,
    intervals,
)

CPU = torch.device("cpu")


class Written(TorchDispatchMode):
    """Counts the numbers that torch writes into new memory, and the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = self.calls = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        self.calls += 1
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() not in given:
                self.numbers += leaf.numel()
                self.largest = max(self.largest, leaf.numel())
        return result


# by the number of tokens; none reads more than 600 keys a query but those that read everything
PATTERNS: dict[str, Any] = {
    "no limit before": lambda tokens: Band(None, 64),
    "causal": lambda tokens: Causal(),
    "wide": lambda tokens: Band(tokens // 2, tokens // 2),
    "outside of a band": lambda tokens: ~Band(tokens // 4, tokens // 4),
    "outside of a short band": lambda tokens: ~Band(64, 64),
    "all but a dilated band": lambda tokens: ~Dilated(640, 640, 3),
    "all but every 128th key": lambda tokens: ~Strided(128),
    "all but three strides": lambda tokens: ~(Strided(127) | Strided(131) | Strided(137)),
    "every third key": lambda tokens: Dilated(None, None, 3),
    "outside of a band and a global token": lambda tokens: ~(Band(64, 64) | GlobalTokens([0])),
    "causal and random": lambda tokens: Causal() | RandomBlocks(2, 64),
    "many dilations": lambda tokens: reduce(or_, (Dilated(300, 0, step) for step in range(2, 90))),
    "many members": lambda tokens: reduce(and_, (Band(64 + i, 0) | GlobalTokens([i]) for i in range(8))),
    "many globals": lambda tokens: GlobalTokens(range(0, 200, 2)),
    "a global half": lambda tokens: Band(64, 64) | GlobalTokens(range(tokens // 2)),
    "ragged": lambda tokens: KeyTable([range(tokens), *([key] for key in range(1, tokens))]),
    "far apart": lambda tokens: Strided(tokens // 2 + 1),
}


def compiled(pattern: Pattern, tokens: int) -> tuple[Written, BlockLayout]:
    with Written() as written:
        blocks = compile_layout.function(Layout(pattern, 2, tokens, tokens), BlockCosts.only(32), CPU)
    return written, blocks


@pytest.mark.parametrize("name", PATTERNS)
def test_twice_the_length_is_twice_the_work(name: str) -> None:
    written, blocks = compiled(PATTERNS[name](4096), 4096)
    longer, of_longer = compiled(PATTERNS[name](8192), 8192)
    # the constants are what a few rows of blocks take
    assert longer.numbers < 2.2 * written.numbers + 1_000_000
    assert longer.calls < 2.2 * written.calls + 200
    assert of_longer.num_mask_bytes < 2.2 * blocks.num_mask_bytes + 1_000_000
    assert of_longer.num_runs <= 2.5 * blocks.num_runs + 8
    # 4 bytes an entry, far below those of 8,192² pairs: 268 million
    assert of_longer.num_mask_bytes < 30_000_000
    assert longer.largest < 7_000_000


@pytest.mark.parametrize("pattern", [Band(None, 64), Causal()], ids=str)
def test_explaining_looks_at_few_pairs(pattern: Pattern) -> None:
    compile_layout.cache_clear()
    with Written() as written:
        explanation = explain(pattern, 32768)
    assert explanation.allowed_pairs == 8 * pattern.num_pairs(32768, 32768)
    assert explanation.allowed_pairs > 4_000_000_000
    assert written.numbers < 60_000_000


def test_masks_beyond_the_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout(KeyTable([[key // 2, key] for key in range(500)]), 1, 500, 500)
    monkeypatch.setattr(block_rows, "MAX_MASK_BYTES", 10_000)
    with pytest.raises(InputError, match=r"key_table pattern over 500 queries.*Use a pattern of whole blocks") as error:
        compile_layout.function(layout, BlockCosts.only(32), CPU)
    assert len(str(error.value)) <= 500


def test_what_grows_as_the_square_is_refused_before_any_work() -> None:
    layout = Layout(GlobalTokens(range(0, 32768, 2)), 1, 32768, 32768)
    refused = pytest.raises(InputError, match=r"would look at about [\d,]+ pairs.*Use a pattern")
    with Written() as written, refused as error:
        compile_layout.function(layout, BlockCosts.only(32), CPU)
    assert written.numbers < 1_000_000
    assert len(str(error.value)) <= 500


@pytest.mark.parametrize(
    "name", ["wide", *(name for name in PATTERNS if name.startswith(("outside of a short", "all but")))]
)
def test_auto_takes_no_mask_over_all_pairs_of_long_inputs(name: str) -> None:
    """These read most pairs, and would be about as fast with one."""
    q = torch.randn(1, 1, 8192, 1)
    with Written() as written:
        attention(q, q, q, PATTERNS[name](8192))
    assert written.largest < 7_000_000


@pytest.mark.parametrize("causal", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_long_inputs_may_take_long(causal: bool) -> None:
    """What grows as the rows is never refused: presets for documents of any length, in all their heads."""
    pattern, layer = bigbird(16, 3, 0, "seeded", causal), {"num_heads": 16, "num_queries": 4096, "num_keys": 4096}
    assert compile_layout(Layout(pattern, **layer), BlockCosts.only(16), CPU).num_allowed > 0


def test_every_pattern_that_is_asked_for_a_pair_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_rows, "PAIRS_PER_STEP", 1)
    monkeypatch.setattr(intervals, "MAX_STEPS", 800_000)
    alone = KeyTable([range(query % 2, 200, 2) for query in range(200)])
    twelve = reduce(or_, (Band(left, -1) for left in range(1, 12)), alone)
    compile_layout.function(Layout(alone, 1, 200, 200), BlockCosts.only(32), CPU)
    with pytest.raises(MaskLimitError, match=r"would look at about [\d,]+ pairs"):
        compile_layout.function(Layout(twelve, 1, 200, 200), BlockCosts.only(32), CPU)


def test_what_blocked_refuses_is_computed_densely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to a limit, from which on the refusal says what can be asked for."""
    monkeypatch.setattr(block_rows, "PAIRS_PER_STEP", 1)
    monkeypatch.setattr(intervals, "MAX_STEPS", 500_000)
    pattern = KeyTable([range(query % 2, 200, 2) for query in range(200)]) | GlobalTokens([5])
    q = torch.randn(1, 2, 200, 8)
    torch.testing.assert_close(attention(q, q, q, pattern), attention(q, q, q, pattern, backend="reference"))
    with pytest.raises(MaskLimitError, match=r"would look at .* backend='sdpa', with a mask over all pairs of 0.0 GiB"):
        attention(q, q, q, pattern, backend="blocked")
    explanation = explain(pattern, 200, num_heads=2)
    assert explanation.backend == "sdpa"
    assert explanation.allowed_pairs == 2 * pattern.num_pairs(200, 200)
    assert "would look at" in explanation.reasons["blocked"]
    monkeypatch.setattr(selection, "MAX_WORKING_BYTES", 1000)
    _plans.clear()
    attention(q, q, q, pattern)
    monkeypatch.setattr(selection, "MAX_WORKING_BYTES_ALONE", 1000)
    _plans.clear()
    with pytest.raises(MaskLimitError, match="would look at"):
        attention(q, q, q, pattern)


def test_auto_keeps_no_scores_of_long_inputs() -> None:
    """Dropout, and terms, have no fused kernel over all pairs."""
    layout, inputs = Layout(Causal(), 8, 8192, 8192), Inputs("cpu", torch.float32, 64, 64, 8, 1)
    plain, term = AttentionCall(layout, inputs), Term(torch.zeros(1, 8, 1, 3), Distance(-1, 1))
    assert select(plain).NAME == "sdpa"
    for change in ({"dropout": 0.1}, {"inputs": replace(inputs, value_dim=32)}, {"terms": (term,)}):
        assert select(replace(plain, **change)).NAME == "blocked"
        assert select(replace(plain, **change, layout=Layout(Causal(), 8, 64, 64))).NAME == "sdpa"


def test_a_dense_mask_is_made_of_some_queries_at_a_time() -> None:
    layout = Layout(~Band(64, 64), 2, 4096, 4096)
    tokens = TokenMask(key_mask=torch.arange(4096)[None] < 4000)
    for mask in (TokenMask(), tokens):
        with Written() as written:
            dense_mask.allowed_pairs(layout, mask, 1, CPU)
        assert written.largest <= 4096**2
        assert written.numbers < 20 * 4096**2


def test_dense_masks_beyond_the_limit_are_refused() -> None:
    with pytest.raises(InputError, match=r"131,072 queries.* takes 64 GiB.*backend='blocked'"):
        dense_mask.additive_mask(Layout(Band(8, 8), 4, 131_072, 131_072), TokenMask(), 1, CPU, torch.float32)


def test_block_tables_beyond_the_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_tables, "MAX_TABLE_BYTES", 1000)
    with pytest.raises(InputError, match=r"tables of blocks for 640 queries.*smaller batch"):
        block_tables.block_table.function(Layout(Band(8, 8), 1, 640, 640), None, (32, 64), CPU)
