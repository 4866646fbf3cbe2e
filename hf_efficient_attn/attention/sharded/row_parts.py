"""Which queries of a process read no key that is still on its way, and can be computed before it arrives."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from hf_efficient_attn.attention.sharded.held_keys import sides
from hf_efficient_attn.attention.sharded.key_exchange import Text, document_patterns, read_keys, shifted, without
from hf_efficient_attn.layout.cache import cached
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.layout.token_mask import Document
from hf_efficient_attn.patterns.intervals import Intervals, intersect, union
from hf_efficient_attn.patterns.pattern import Pattern


@dataclass(frozen=True)
class RowPart:
    """Neighbouring queries of one document that are computed at once.

    Attributes:
        first, stop: their positions in the text.
        keys: intervals of positions that hold what they read of the keys at hand.
        is_inner: whether these are keys of the process itself, and such as travel first.
    """

    document: Document
    first: int
    stop: int
    keys: Intervals
    is_inner: bool


@cached()
def row_parts(
    layout: Layout, text: Text, own: tuple[int, int], received: Intervals, early: Intervals = ()
) -> tuple[RowPart, ...]:
    """Return the parts of a process's queries of a text, in their order.

    Args:
        layout: of whole texts.
        own: the tokens that the process holds.
        received: intervals of positions whose keys it gets from others.
        early: those of them that travel first.
    """
    parts = []
    late = without(received, early)
    (before, after), (early_before, early_after) = sides(received, own), sides(early, own)
    for document in text.documents:
        first, stop = max(document.start, own[0]), min(document.stop, own[1])
        if first >= stop:
            continue
        read = partial(read_by, document_patterns(layout, document), document, text.tokens)
        start, end = inner_rows(first, stop, lambda *rows, read=read: bool(intersect(read(*rows), late)))
        for rows, is_inner in (((first, start), False), ((start, end), True), ((end, stop), False)):
            if rows[0] < rows[1]:
                held = (early_before, (own,), early_after) if is_inner else (before, (own,), after)
                # with the rows themselves, whose places among keys backends count
                keys = hull_of_each(union(read(*rows), (rows,)), [intersect(text.tokens, each) for each in held])
                parts.append(RowPart(document, *rows, keys, is_inner))
    return tuple(parts)


def read_by(patterns: Sequence[Pattern], document: Document, tokens: Intervals, first: int, stop: int) -> Intervals:
    """Return intervals that hold every key, of a document and not masked, which some of the queries may read."""
    found = read_keys(patterns, ((first - document.start, stop - document.start),), document)
    return intersect(shifted(found, document.start), intersect(tokens, ((document.start, document.stop),)))


def inner_rows(first: int, stop: int, reads_others: Callable[[int, int], bool]) -> tuple[int, int]:
    """Return from where to where, around the middle, rows need nothing of other processes.

    These are no rows, `first` to `first`, where they would be fewer than half of all.

    >>> inner_rows(0, 20, lambda start, end: start < 3 or end > 18)
    (3, 18)
    """
    middle = (first + stop) // 2
    if reads_others(middle, middle + 1):
        return first, first
    low, high = first, middle
    while low < high:
        between = (low + high) // 2
        low, high = (between + 1, high) if reads_others(between, middle + 1) else (low, between)
    start, low, high = low, middle + 1, stop
    while low < high:
        between = (low + high + 1) // 2
        low, high = (low, between - 1) if reads_others(middle, between) else (between, high)
    return (start, low) if 2 * (low - start) >= stop - first else (first, first)


def hull_of_each(read: Intervals, held: Sequence[Intervals]) -> Intervals:
    """Return, of every set of positions, those from the first to the last one that is read.

    More than is read, but whole neighbourhoods, for which backends are fastest.
    """
    found = []
    for positions in held:
        common = intersect(read, positions)
        if common:
            found.append(intersect(positions, ((common[0][0], common[-1][1]),)))
    return union(*found)
