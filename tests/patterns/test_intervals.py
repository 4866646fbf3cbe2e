"""Intervals are sets: every operation against Python's sets."""

from hypothesis import given
from hypothesis import strategies as st
from patterns.relation import keys_of

from hf_efficient_attn.patterns.intervals import clip, complement, intersect, normalize, size, union

raw = st.lists(st.tuples(st.integers(-3, 20), st.integers(-3, 20)), max_size=6)


@given(raw, raw, st.integers(0, 20))
def test_operations_are_those_of_sets(first_raw: list[tuple[int, int]], second_raw: list, num_keys: int) -> None:
    first, second = normalize(first_raw), normalize(second_raw)
    everything = set(range(num_keys))
    assert keys_of(first) == keys_of(first_raw)
    assert keys_of(union(first, second)) == keys_of(first) | keys_of(second)
    assert keys_of(intersect(first, second)) == keys_of(first) & keys_of(second)
    assert keys_of(complement(first, num_keys)) == everything - keys_of(first)
    assert keys_of(clip(first, num_keys)) == everything & keys_of(first)
    assert size(first) == len(keys_of(first))
    for intervals in (first, union(first, second), intersect(first, second), complement(first, num_keys)):
        assert intervals == normalize(intervals)
