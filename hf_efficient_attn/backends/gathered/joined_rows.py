"""The rows of a call, joined from those of tiles by their log-sum-exp, or as the mean of the groups that hold them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_efficient_attn.backends.gathered.rows import Rows, rows_of
from hf_efficient_attn.backends.gathered.tile_masks import NO_KEYS


class JoinedRows:
    """Output and log-sum-exp of every query so far, relative to the largest log-sum-exp of its tiles.

    Attributes:
        out: [heads of all examples, queries, width], the sum of the outputs of tiles by their weights.
        total, largest: [heads of all examples, queries]; the log-sum-exp is largest + log(total).
    """

    def __init__(self, num_heads: int, num_queries: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.out = torch.zeros(num_heads, num_queries, width, dtype=dtype, device=device)
        self.total = self.out.new_zeros(num_heads, num_queries)
        self.largest = self.out.new_full((num_heads, num_queries), -torch.inf)
        self.is_new = [True] * num_heads

    def join(self, numbers: Tensor, out: Tensor, lse: Tensor, bounds: tuple[int, int]) -> None:
        """Join rows.

        Args:
            numbers: of the rows, head of all examples times queries plus query, [P].
            out, lse: [P, width] and [P], the first overwritten; a row without keys has a log-sum-exp below NO_KEYS.
            bounds: of the heads in which all rows lie.
        """
        lse = lse.masked_fill(lse < NO_KEYS, -torch.inf)
        heads = slice(*bounds)
        flat = self.largest.view(-1)
        before = None if all(self.is_new[heads]) else self.largest[heads].clone()
        flat.scatter_reduce_(0, numbers, lse, "amax")
        if before is not None:
            # 1 where nothing was, nor is
            factor = (before - self.largest[heads]).nan_to_num_(0.0, neginf=-torch.inf).exp_()
            self.rescale(heads, factor, before > -torch.inf)
        self.is_new[heads] = [False] * (bounds[1] - bounds[0])
        weight = (lse - flat[numbers]).nan_to_num_(-torch.inf, neginf=-torch.inf).exp_()
        weighted = out.to(self.out.dtype).mul_(weight[:, None])
        self.out.view(-1, self.out.shape[2]).index_add_(0, numbers, weighted)
        self.total.view(-1).index_add_(0, numbers, weight)

    def rescale(self, heads: slice, factor: Tensor, was_there: Tensor) -> None:
        """Multiply what is there of some heads by factors [heads, queries].

        Most of them are 1, and parts are many: on CPUs only the other rows are touched.
        """
        self.total[heads].mul_(factor)
        if factor.device.type != "cpu":
            self.out[heads].mul_(factor[..., None])
            return
        changed = torch.nonzero(((factor != 1) & was_there).flatten())[:, 0]
        rows = self.out[heads].view(-1, self.out.shape[2])
        rows.index_copy_(0, changed, rows.index_select(0, changed) * factor.flatten()[changed, None])

    def finish(self, heads: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return output [*heads, queries, width] and log-sum-exp [*heads, queries]: 0 and -inf of rows without keys.

        heads: the numbers of examples and of the heads of each.
        """
        total = self.total.masked_fill(self.total == 0, 1.0)
        lse = total.log().add_(self.largest)
        return self.out.div_(total[..., None]).unflatten(0, heads), lse.unflatten(0, heads)


class SingleRows:
    """The same where one tile holds all keys of a query, so that nothing is joined: rows go to where they stay.

    Attributes:
        out: [batch, heads, queries, width], zeros where no tile had keys; rows: its rows.
        largest: the log-sum-exp, [heads of all examples, queries].
    """

    def __init__(self, out: Tensor, dtype: torch.dtype) -> None:
        self.out = out.zero_()
        self.rows: Rows = rows_of(self.out)
        num_heads, num_queries = out.shape[0] * out.shape[1], out.shape[2]
        self.largest = torch.full((num_heads, num_queries), -torch.inf, dtype=dtype, device=out.device)

    def join(self, numbers: Tensor, places: Tensor, out: Tensor, lse: Tensor) -> None:
        """Take rows.

        Args:
            numbers, out, lse: as in `JoinedRows.join`; `out` is overwritten here, too.
            places: the numbers in `rows`, [P]; rows without keys may name any.
        """
        has_none = lse < NO_KEYS
        lse = lse.masked_fill(has_none, -torch.inf)
        if has_none.device.type != "cpu":
            out = out.masked_fill(has_none[:, None], 0.0)
        else:
            # few rows have no keys: only these are touched
            out = out.index_fill_(0, torch.nonzero(has_none)[:, 0], 0.0)
        self.largest.view(-1).scatter_reduce_(0, numbers, lse.to(self.largest.dtype), "amax")
        self.rows.add(places, out)

    def finish(self, heads: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp; see `JoinedRows.finish`."""
        return self.out, self.largest.unflatten(0, heads)


class MeanRows:
    """The same for means: the sum of the outputs of all tiles of a query, divided by the number of its places."""

    def __init__(self, divisors: Tensor, width: int) -> None:
        self.divisors = divisors
        self.out = divisors.new_zeros(*divisors.shape, width)

    def join(self, numbers: Tensor, out: Tensor, lse: Tensor, bounds: tuple[int, int]) -> None:
        """Add the outputs of rows; see `JoinedRows.join`."""
        out = out.to(self.out.dtype).masked_fill((lse < NO_KEYS)[:, None], 0.0)
        self.out.view(-1, self.out.shape[2]).index_add_(0, numbers, out)

    def finish(self, heads: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the output, and zeros for a log-sum-exp that nobody reads; see `JoinedRows.finish`."""
        out = self.out.div_(self.divisors[..., None])
        return out.unflatten(0, heads), torch.zeros_like(self.divisors).unflatten(0, heads)
