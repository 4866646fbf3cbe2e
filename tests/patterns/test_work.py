"""Questions about patterns are refused after a number of steps, whatever was asked before."""

from collections.abc import Callable
from functools import reduce
from operator import or_
from threading import Thread

import pytest

from hf_efficient_attn.errors import WorkLimitError
from hf_efficient_attn.patterns import Band, Blocks, Dilated, GlobalTokens, KeyTable, RandomBlocks
from hf_efficient_attn.patterns.intervals import MAX_STEPS, charge, work_budget


def test_steps_are_counted_to_the_last() -> None:
    with work_budget("This"):
        charge(MAX_STEPS)
        with work_budget("Another question"):
            charge(MAX_STEPS)
        with pytest.raises(WorkLimitError, match=r"^This would take more than 786,432 steps"):
            charge(1)
    charge(2 * MAX_STEPS)


def test_each_thread_has_its_own_question() -> None:
    with work_budget("This"):
        charge(MAX_STEPS)
        other = Thread(target=charge, args=(1,))
        other.start()
        other.join()


@pytest.mark.parametrize(
    "build",
    [
        lambda: GlobalTokens(range(0, 2000, 2)) & ~Band(5, 5),
        lambda: Blocks(Dilated(None, None, 3) | GlobalTokens([5]), 1),
        lambda: reduce(or_, (KeyTable([[key * step for key in range(1000)]] * 1000) for step in (3, 4))) & Band(9, 9),
    ],
    ids=["intersection", "blocks", "tables"],
)
def test_counts_of_rows_that_differ_are_refused(build: Callable[[], Blocks]) -> None:
    pattern = build()
    with pytest.raises(WorkLimitError, match="Counting the pairs") as refusal:
        pattern.num_pairs(100_000, 100_000)
    assert len(str(refusal.value)) <= 500


def test_excluded_single_keys_are_refused() -> None:
    with pytest.raises(WorkLimitError, match=r"drawing num_blocks=3 blocks .* Exclude|exclude"):
        RandomBlocks(3, 1, exclude=Dilated(None, None, 7)).resolve(16_384)
