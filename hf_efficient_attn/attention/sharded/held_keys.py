"""The keys and values that a process has at hand, its own and those that it was sent, by their positions."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_efficient_attn.patterns.intervals import Intervals, intersect, size, union


@dataclass(frozen=True)
class HeldKeys:
    """Keys and values, [B, Hkv, K, ·], and the intervals of positions that they have, in this order."""

    key: Tensor
    value: Tensor
    positions: Intervals

    def slices(self, wanted: Intervals) -> list[tuple[int, int]]:
        """Return where the wanted positions are among these."""
        found, place = [], 0
        for start, stop in self.positions:
            for first, last in intersect(wanted, ((start, stop),)):
                found.append((first - start + place, last - start + place))
            place += stop - start
        return found


def keys_at(held: Sequence[HeldKeys], wanted: Intervals) -> HeldKeys:
    """Return the keys of the wanted positions that are at hand; `held` is in the order of positions."""
    pieces = [(each, slices) for each in held if (slices := each.slices(wanted))] or [(held[0], [(0, 0)])]
    keys = [cut_tokens(each.key, slices) for each, slices in pieces]
    values = [cut_tokens(each.value, slices) for each, slices in pieces]
    key, value = (each[0] if len(each) == 1 else torch.cat(each, 2) for each in (keys, values))
    return HeldKeys(key, value, union(*(intersect(wanted, each.positions) for each in held)))


def cut_tokens(states: Tensor, slices: Sequence[tuple[int, int]]) -> Tensor:
    """Return neighbouring slices of tokens of [B, H, N, ·]; a view if there is only one."""
    if len(slices) == 1:
        return states[:, :, slice(*slices[0])]
    return torch.cat([states[:, :, :0], *(states[:, :, start:stop] for start, stop in slices)], 2)


def split_received(rows: Tensor, positions: Intervals, own: tuple[int, int], head_dim: int) -> list[HeldKeys]:
    """Return the keys and values that were received, those before the tokens of the process and those after.

    rows: [tokens, B, Hkv, D + Dv], in the order of their positions.
    """
    before, after = sides(positions, own)
    states = rows.permute(1, 2, 0, 3)
    split = size(before)
    return [
        HeldKeys(part[..., :head_dim], part[..., head_dim:], where)
        for part, where in ((states[:, :, :split], before), (states[:, :, split:], after))
    ]


def sides(positions: Intervals, own: tuple[int, int]) -> tuple[Intervals, Intervals]:
    """Return the positions of other processes that come before the tokens of a process, and those that come after."""
    return intersect(positions, ((0, own[0]),)), tuple(each for each in positions if each[0] >= own[1])
