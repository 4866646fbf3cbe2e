"""Random patterns for hypothesis: every atom, and the algebra on top."""

from itertools import accumulate

from hypothesis import strategies as st

from hf_efficient_attn.patterns import (
    Band,
    BlockLocal,
    Blocks,
    Causal,
    CompressedKeys,
    Dilated,
    Full,
    GatheredKeys,
    GlobalTokens,
    KeyTable,
    Pattern,
    PerHead,
    RandomBlocks,
    SizedGrid,
    Strided,
    bigbird,
)
from hf_efficient_attn.patterns.pattern import Extent

small = st.integers(1, 6)
limits = st.none() | st.integers(-1, 9)

positional = st.one_of(
    st.just(Full()),
    st.just(Causal()),
    st.builds(Band, limits, limits),
    st.builds(Dilated, limits, limits, small),
    st.builds(Strided, small),
    st.builds(GlobalTokens, st.lists(st.integers(-20, 20), max_size=4)),
    st.builds(GlobalTokens, st.lists(st.integers(0, 20), max_size=4), attends_to_all=st.just(False)),
    st.builds(GlobalTokens, st.lists(st.integers(0, 20), max_size=4), attended_by_all=st.just(False)),
    st.builds(KeyTable, st.lists(st.lists(st.integers(0, 20), max_size=4), min_size=1, max_size=20)),
    # rows so long that they are searched
    st.builds(KeyTable, st.lists(st.integers(0, 60).map(range), min_size=1, max_size=20)),
    st.builds(BlockLocal, small),
    st.builds(CompressedKeys, small, small),
)
# gaps and lengths of the intervals
gathered = st.lists(st.tuples(small, small), min_size=1, max_size=3).map(
    lambda listed: tuple(
        (stop - length, stop)
        for (_, length), stop in zip(listed, accumulate(gap + length for gap, length in listed), strict=True)
    )
)


def grid(axes: st.SearchStrategy[Pattern], is_causal: st.SearchStrategy[bool]) -> st.SearchStrategy[Pattern]:
    """Grids of one to three axes."""
    fitting = axes.filter(lambda pattern: not pattern.needs_two_axes)
    return st.builds(
        lambda listed, *fields: SizedGrid([size for size, _ in listed], [axis for _, axis in listed], *fields),
        st.lists(st.tuples(small, fitting), min_size=1, max_size=3),
        st.integers(0, 2),
        st.just("cut"),
        is_causal,
    )


atoms: st.SearchStrategy[Pattern] = st.one_of(
    positional,
    st.builds(GatheredKeys, positional.filter(lambda pattern: not pattern.depends_on_length), gathered),
    st.builds(Blocks, positional, small),
    st.builds(RandomBlocks, st.integers(1, 3), small, st.integers(0, 5), st.none() | positional),
    st.builds(RandomBlocks, st.integers(1, 3), small, is_causal=st.just(True)),
    grid(positional, st.just(False)),
)


def _algebra(parts: st.SearchStrategy[Pattern]) -> st.SearchStrategy[Pattern]:
    return st.one_of(
        st.tuples(parts, parts).map(lambda pair: pair[0] | pair[1]),
        st.tuples(parts, parts).map(lambda pair: pair[0] & pair[1]),
        parts.map(lambda part: ~part),
        st.builds(Blocks, parts, st.integers(1, 3)),
        grid(parts, st.booleans()),
    )


compositions: st.SearchStrategy[Pattern] = st.recursive(atoms, _algebra, max_leaves=4)
with_heads: st.SearchStrategy[Pattern] = st.one_of(
    st.lists(compositions, min_size=1, max_size=2).map(PerHead),
    st.tuples(st.lists(atoms, min_size=2, max_size=2).map(PerHead), atoms).map(lambda pair: pair[0] & pair[1]),
    st.builds(bigbird, small, st.integers(0, 2), st.integers(0, 5), st.sampled_from(["seeded", "authors"])),
)
extents = st.one_of(
    st.integers(1, 14).map(lambda length: Extent(length, length)),
    st.builds(Extent, st.integers(1, 8), st.integers(1, 20), st.integers(0, 12)),
)
