"""Keys that stand for several tokens each, and may be read from the last of these tokens on."""

from dataclasses import dataclass
from typing import Any

from hf_efficient_attn.patterns.checks import check_integer
from hf_efficient_attn.patterns.intervals import Intervals, clip
from hf_efficient_attn.patterns.pattern import Pattern


@dataclass(frozen=True)
class CompressedKeys(Pattern, kind="compressed_keys"):
    """Every query reads the compressed keys of tokens up to itself (Yuan et al., Native Sparse Attention, 2025).

    Key c stands for the tokens step · c … step · c + block_tokens - 1, and is read from the last of them on. Queries
    count tokens and keys count compressed keys: two axes, `cross=True` for `attention`. A query before the end of the
    first block reads nothing.

    block_tokens: how many tokens a key stands for.
    step: tokens from one key to the next.

    >>> print(CompressedKeys(block_tokens=3, step=2).draw(6, num_keys=3))
    ⬚⬚⬚
    ⬚⬚⬚
    ■⬚⬚
    ■⬚⬚
    ■■⬚
    ■■⬚

    Raises:
        ConfigurationError: a block or a step of less than one token.
    """

    block_tokens: int
    step: int

    def __post_init__(self) -> None:
        check_integer(self.kind, "block_tokens", self.block_tokens, at_least=1)
        check_integer(self.kind, "step", self.step, at_least=1)

    def allowed(self, query: Any, key: Any) -> Any:
        return key <= (query - self.block_tokens + 1) // self.step

    def key_intervals(self, first_query: int, last_query: int, num_keys: int) -> Intervals:
        return clip([(0, self._num_ended(last_query))], num_keys)

    def full_key_intervals(self, first_query: int, last_query: int, num_keys: int) -> Intervals:
        return clip([(0, self._num_ended(first_query))], num_keys)

    def num_pairs(self, num_queries: int, num_keys: int, query_offset: int = 0) -> int:
        stop = query_offset + num_queries
        # keys that all queries read, and keys that some of them read
        every, some = (min(num_keys, self._num_ended(query)) for query in (query_offset, stop - 1))
        left = (some - every) * (stop - self.block_tokens + 1)
        return every * num_queries + left - self.step * (some - every) * (every + some - 1) // 2

    @property
    def needs_two_axes(self) -> bool:
        return True

    @property
    def max_tokens_ahead(self) -> int | None:
        # the index of a key is at most that of the last token it stands for
        return max(-1, 1 - self.block_tokens)

    def _num_ended(self, query: int) -> int:
        """Return how many keys stand only for tokens up to the query."""
        return max(0, (query - self.block_tokens + 1) // self.step + 1)
