"""Bounds that patterns know about themselves, and how to join those of a pattern's parts."""

from collections.abc import Iterable, Sequence
from math import lcm
from typing import NamedTuple


class DecodingReach(NamedTuple):
    """What a token reads in causal decoding: at most the first `num_first` tokens and the `left` tokens before itself.

    Such a pattern reads the same if the tokens in between are dropped and the others close up. `left` None: all tokens
    before itself.
    """

    num_first: int
    left: int | None


class GlobalPosition(NamedTuple):
    """A position that a pattern names, in blocks of `block_tokens` tokens; negative ones count from the end."""

    position: int
    block_tokens: int

    @property
    def unit(self) -> str:
        """What a sentence says behind the position."""
        return f" in blocks of {self.block_tokens} tokens" if self.block_tokens > 1 else ""

    def is_within(self, num_tokens: int) -> bool:
        """Return whether a text of this length has it."""
        num_blocks = -(-num_tokens // self.block_tokens)
        return -num_blocks <= self.position < num_blocks


class DrawnBlocks(NamedTuple):
    """How many blocks each row of blocks draws at random, and the length of a block in tokens."""

    num_blocks: int
    block_tokens: int


# every query reads all tokens before itself
ALL_BEFORE = DecodingReach(0, None)


def joined_reach(reaches: Iterable[DecodingReach | None]) -> DecodingReach | None:
    """Return the reach of a pattern that reads what any of these reads; None: one of them is unknown.

    >>> joined_reach([DecodingReach(2, 0), DecodingReach(0, 8)])
    DecodingReach(num_first=2, left=8)
    """
    listed = list(reaches)
    if ALL_BEFORE in listed:
        return ALL_BEFORE
    known = [reach for reach in listed if reach is not None]
    if len(known) < len(listed):
        return None
    return DecodingReach(max(reach.num_first for reach in known), farthest([reach.left for reach in known]))


def farthest(limits: Sequence[int | None]) -> int | None:
    """Return the largest of the limits; None if one of them is unknown."""
    known = [limit for limit in limits if limit is not None]
    return max(known) if len(known) == len(limits) else None


def nearest(limits: Sequence[int | None]) -> int | None:
    """Return the smallest of the known limits; None if none is known."""
    return min((limit for limit in limits if limit is not None), default=None)


def common_period(periods: Iterable[int | None]) -> int | None:
    """Return the least common multiple of the periods; None if one is unknown."""
    listed = list(periods)
    return None if None in listed else lcm(*(period for period in listed if period))
