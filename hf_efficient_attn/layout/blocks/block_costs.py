"""How long the blocks of queries are: long ones are computed faster, short ones read fewer keys in vain."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class BlockCosts:
    """The time of one score in blocks of each length, in scores of dense attention without a mask.

    Attributes:
        per_score: (queries in a block, time), the shortest blocks first.
    """

    per_score: tuple[tuple[int, float], ...]

    @classmethod
    def only(cls, block_tokens: int, per_score: float = 1.0) -> "BlockCosts":
        """Return the costs of a kernel that is used with blocks of one length."""
        return cls(((block_tokens, per_score),))

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths of blocks to choose from."""
        return tuple(tokens for tokens, _ in self.per_score)

    def of_score(self, block_tokens: int) -> float:
        """Return the time of a score in blocks of any length: that of the longest listed ones that are no longer.

        >>> BlockCosts(((32, 1.2), (192, 1.0))).of_score(100)
        1.2
        """
        shorter = [time for tokens, time in self.per_score if tokens <= block_tokens]
        return shorter[-1] if shorter else self.per_score[0][1]

    def cheapest(self, lengths: set[int], num_keys: Callable[[int], int]) -> int:
        """Return the length in whose blocks the scores of a query take the least time, the shorter one if in doubt.

        Args:
            num_keys: returns how many keys a block of a length reads.

        >>> BlockCosts(((32, 1.2), (192, 1.0))).cheapest({32, 192}, lambda tokens: 512 + tokens)
        32
        """
        if len(lengths) == 1:
            return min(lengths)
        return min(sorted(lengths), key=lambda tokens: self.of_score(tokens) * num_keys(tokens))
