"""The rows of a call, joined from those of tiles by their log-sum-exp, or as the mean of the groups that hold them."""

import torch
from torch import Tensor

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
            out, lse: [P, width] and [P]; a log-sum-exp below NO_KEYS is that of a row without keys.
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
            self.out[heads].mul_(factor[..., None])
            self.total[heads].mul_(factor)
        self.is_new[heads] = [False] * (bounds[1] - bounds[0])
        weight = (lse - flat[numbers]).nan_to_num_(-torch.inf, neginf=-torch.inf).exp_()
        self.out.view(-1, self.out.shape[2]).index_add_(0, numbers, out.to(self.out.dtype) * weight[:, None])
        self.total.view(-1).index_add_(0, numbers, weight)

    def finish(self) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp: 0 and -inf of rows without keys."""
        total = self.total.masked_fill(self.total == 0, 1.0)
        return self.out.div_(total[..., None]), total.log_().add_(self.largest)


class MeanRows:
    """The same for means: the sum of the outputs of all tiles of a query, divided by the number of its places."""

    def __init__(self, divisors: Tensor, width: int) -> None:
        self.divisors = divisors
        self.out = divisors.new_zeros(*divisors.shape, width)

    def join(self, numbers: Tensor, out: Tensor, lse: Tensor, bounds: tuple[int, int]) -> None:
        """Add the outputs of rows; see `JoinedRows.join`."""
        out = out.to(self.out.dtype).masked_fill((lse < NO_KEYS)[:, None], 0.0)
        self.out.view(-1, self.out.shape[2]).index_add_(0, numbers, out)

    def finish(self) -> tuple[Tensor, Tensor]:
        """Return the output, and zeros for a log-sum-exp that nobody reads."""
        return self.out.div_(self.divisors[..., None]), torch.zeros_like(self.divisors)
