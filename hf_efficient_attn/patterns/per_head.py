"""Different patterns for different heads."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any, NoReturn

from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.patterns.bounds import DecodingReach, common_period, farthest, joined_reach
from hf_efficient_attn.patterns.checks import check_head
from hf_efficient_attn.patterns.part_checks import check_patterns
from hf_efficient_attn.patterns.pattern import Pattern


@dataclass(frozen=True)
class PerHead(Pattern, kind="per_head"):
    """The patterns are divided evenly among the heads: with two patterns and 8 heads, heads 0-3 follow the first.

    Raises:
        ConfigurationError: no patterns.
    """

    patterns: Sequence[Pattern]

    def __post_init__(self) -> None:
        object.__setattr__(self, "patterns", check_patterns(self.kind, self.patterns))

    @property
    def parts(self) -> tuple[Pattern, ...]:
        return tuple(self.patterns)

    def with_parts(self, parts: tuple[Pattern, ...]) -> Pattern:
        return PerHead(parts)

    def heads(self, num_heads: int) -> tuple[Pattern, ...]:
        run, left_over = divmod(num_heads, len(self.patterns))
        if left_over or not run:
            raise ConfigurationError(
                f"{len(self.patterns)} patterns of {self.kind} cannot share {num_heads} heads evenly; give a number of "
                "patterns that divides the number of heads."
            )
        shares = (pattern.heads(num_heads)[i * run : (i + 1) * run] for i, pattern in enumerate(self.patterns))
        return tuple(pattern for share in shares for pattern in share)

    @property
    def num_head_patterns(self) -> int:
        return lcm(len(self.patterns), *(pattern.num_head_patterns for pattern in self.patterns))

    def resolve(self, num_keys: int, layer: int = 0, head: int = 0, num_heads: int = 1) -> Pattern:
        """Return the resolved pattern of this head.

        Raises:
            InputError: there is no such head.
        """
        check_head(head, num_heads)
        return self.heads(num_heads)[head].resolve(num_keys, layer, head, num_heads)

    @property
    def period(self) -> int | None:
        return common_period(pattern.period for pattern in self.patterns)

    @property
    def max_tokens_ahead(self) -> int | None:
        return farthest([pattern.max_tokens_ahead for pattern in self.patterns])

    @property
    def unread_tokens_ahead(self) -> int | None:
        return farthest([pattern.unread_tokens_ahead for pattern in self.patterns])

    def decoding_reach(self) -> DecodingReach | None:
        return joined_reach(pattern.decoding_reach() for pattern in self.patterns)

    def causal(self) -> Pattern:
        return PerHead(tuple(pattern.causal() for pattern in self.patterns))

    def allowed(self, query: Any, key: Any) -> Any:
        self._needs_length()

    def _needs_length(self) -> NoReturn:
        raise ConfigurationError(f"{self.kind} differs from head to head. Call heads(num_heads) and use its entries.")
