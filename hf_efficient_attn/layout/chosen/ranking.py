"""Which scores are highest, when some of them are equal but for rounding.

Equal tokens have equal scores where no position has entered yet: in the first layer of a model with relative positions,
or without any. But their states are equal only up to rounding, which differs between shapes, kernels and processors. If
scores were compared to the last bit, batch mates and padding would so decide which of equal tokens are chosen. Scores
within `tie_width` of the last one that is chosen are therefore taken for equal to it, and the first of them are chosen.

Nothing is rounded to a grid, whose edges would part equal scores again: what is compared with is a score of the row
itself. Two scores that do differ decide by rounding only if they lie within that rounding of each other, as everywhere.
"""

import torch
from torch import Tensor

# how far sums of products that a kernel adds up in another order may be apart, in units of rounding
ROUNDINGS_OF_SUMS = 64
# up to so many are found one after the other on CPUs, in less time than by `topk`
FEW_HIGHEST = 8


def tie_width(dtype: torch.dtype) -> float:
    """Return how far apart scores of equal states of a dtype may be, relative to the size of scores.

    Sums are in float32 or wider; states of a narrow dtype have been rounded to it, by half a unit in the last place.
    """
    wide = torch.promote_types(dtype, torch.float32)
    width = ROUNDINGS_OF_SUMS * torch.finfo(wide).eps
    return width if wide == dtype else width + torch.finfo(dtype).eps / 2


def highest(scores: Tensor, count: int, width: float | Tensor = 0.0) -> Tensor:
    """Return which scores are the `count` highest of their row [..., n], the first of equal ones: bool [..., n].

    width: scores are equal to the last one that is chosen if they are at most so far from it; a number, or [..., 1].

    >>> highest(torch.tensor([[1.0, 3.0, 1.0001, 1.0, 2.0]]), 3, 1e-3).tolist()
    [[True, True, False, False, True]]
    """
    return _highest(scores, scores.topk(count, sorted=False).values.amin(-1, keepdim=True), count, width)


def _highest(scores: Tensor, least: Tensor, count: int, width: float | Tensor) -> Tensor:
    is_above = scores > least + width
    is_level = (scores >= least - width) & ~is_above
    room = count - is_above.sum(-1, keepdim=True)
    return is_above | (is_level & (is_level.cumsum(-1, dtype=torch.int32) <= room))


def listed(is_listed: Tensor, count: int) -> Tensor:
    """Return the indices of true entries in ascending order, before them -1 for each that is missing to `count`.

    >>> listed(torch.tensor([[True, False, True]]), 3).tolist()
    [[-1, 0, 2]]
    """
    number = is_listed.cumsum(-1)
    # what is not listed goes to a place in front, which is cut off
    place = torch.where(is_listed, number + (count - number[..., -1:]), 0)
    index = torch.arange(is_listed.shape[-1], device=is_listed.device).expand(place.shape)
    found = torch.full((*place.shape[:-1], count + 1), -1, device=is_listed.device)
    return found.scatter(-1, place, index)[..., 1:]


def first_highest(scores: Tensor, count: int, relative_width: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return the indices of the highest scores in ascending order, the first of equal ones, and which are not -inf.

    The scores are written over.

    relative_width: how far apart equal ones may be, in units of the largest of those chosen; see `tie_width`.

    >>> first_highest(torch.tensor([[1.0, 3.0, 1.0, 1.0, 2.0]]), 3)[0].tolist()
    [[0, 1, 4]]
    """
    if count <= FEW_HIGHEST and scores.device.type == "cpu":
        return _few_highest(scores, count, relative_width)
    top = scores.topk(count, sorted=False).values
    least = top.amin(-1, keepdim=True)
    width = _width(top.amax(-1, keepdim=True), least, relative_width)
    index = listed(_highest(scores, least, count, width) & (scores > -torch.inf), count)
    return index.clamp(min=0), index >= 0


def _width(largest: Tensor, least: Tensor, relative_width: float) -> Tensor:
    """Return how far from the least of those chosen others are equal to it; they may be -inf."""
    finite = torch.finfo(largest.dtype).max
    sizes = torch.maximum(largest.abs(), least.abs().where(least > -torch.inf, 0))
    return relative_width * sizes.clamp(max=finite)


def _few_highest(scores: Tensor, count: int, relative_width: float) -> tuple[Tensor, Tensor]:
    """Return `first_highest`, found one after the other; of equal numbers, `max` returns the first."""
    size, values, found = scores.shape[-1], [], []
    for _ in range(count):
        value, index = scores.max(-1, keepdim=True)
        scores.scatter_(-1, index, -torch.inf)
        values.append(value)
        found.append(index)
    width = _width(values[0], values[-1], relative_width)
    top, index = torch.cat(values, -1), torch.cat(found, -1)
    places = torch.where(top > -torch.inf, index, size).sort(-1).values
    # rows in which another score is equal to the last one that was found
    best_left = scores.amax(-1, keepdim=True)
    is_tied = ((best_left >= values[-1] - width) & (best_left > -torch.inf))[..., 0]
    if bool(is_tied.any()):
        rows = scores[is_tied].scatter(-1, index[is_tied], top[is_tied])
        places[is_tied] = listed(_highest(rows, values[-1][is_tied], count, width[is_tied]), count)
    return places.clamp(max=size - 1), places < size
