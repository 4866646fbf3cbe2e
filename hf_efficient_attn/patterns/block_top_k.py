"""Blocks of keys chosen by content: every query reads its own block and the past blocks that fit it best."""

from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.patterns.checks import check_integer
from hf_efficient_attn.patterns.intervals import Intervals
from hf_efficient_attn.patterns.pattern import Pattern


@dataclass(frozen=True)
class BlockTopK(Pattern, kind="block_top_k"):
    """Every query reads, causally, its own block and the `num_chosen` - 1 past blocks whose mean keys fit it best.

    Mixture of block attention (MoBA, Lu et al., arXiv:2502.13189, equations 3 to 6): a block scores the product of the
    query, after rotary positions, with the mean of its keys; the lowest block wins a tie. Every head chooses for
    itself, also where heads share keys. Blocks are counted from the first token of a document. No gradient passes
    through the choice. Texts of up to `num_chosen` · `block_tokens` tokens are read like `Causal()`.

    Which keys a query reads is known only once there are queries and keys, so that this pattern cannot be drawn, or be
    a part of another one: it stands for whole layers. Pretrained models need further training with it (MoBA: 90% of the
    tokens with blocks, 10% with full attention; the last layers full for fine-tuning).

    block_tokens: the length of a block in tokens; the paper's models have 512 to 4,096.
    num_chosen: how many blocks a query reads, its own included; the paper's models have 3 to 12.

    >>> BlockTopK(block_tokens=512, num_chosen=3).num_keys_of(query=8191, num_keys=8192)
    1536

    Raises:
        ConfigurationError: a block of less than one token, or fewer than one block.
    """

    block_tokens: int
    num_chosen: int
    chooses_by_content: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_integer(self.kind, "block_tokens", self.block_tokens, at_least=1)
        check_integer(self.kind, "num_chosen", self.num_chosen, at_least=1)

    def allowed(self, query: Any, key: Any) -> Any:
        self._needs_content()

    def key_intervals(self, first_query: int, last_query: int, num_keys: int) -> Intervals:
        self._needs_content()

    def num_keys_of(self, query: int, num_keys: int) -> int:
        block, place = divmod(query, self.block_tokens)
        return min(block, self.num_chosen - 1) * self.block_tokens + place + 1

    def num_pairs(self, num_queries: int, num_keys: int, query_offset: int = 0) -> int:
        return self._pairs_before(query_offset + num_queries) - self._pairs_before(query_offset)

    @property
    def granularity(self) -> int:
        return self.block_tokens

    @property
    def max_tokens_ahead(self) -> int | None:
        return 0

    def reads_all_up_to(self) -> int:
        """Return the length in tokens up to which every query reads all tokens before it."""
        return self.num_chosen * self.block_tokens

    def _pairs_before(self, stop: int) -> int:
        """Return how many pairs the queries 0 … stop - 1 have."""
        blocks, rest = divmod(stop, self.block_tokens)
        # of whole blocks before these queries: block b reads min(b, num_chosen - 1) of them
        few = min(blocks, self.num_chosen)
        read = few * (few - 1) // 2 + (blocks - few) * (self.num_chosen - 1)
        own = blocks * self.block_tokens * (self.block_tokens + 1) // 2 + rest * (rest + 1) // 2
        return read * self.block_tokens**2 + rest * min(blocks, self.num_chosen - 1) * self.block_tokens + own

    def _needs_content(self) -> NoReturn:
        raise ConfigurationError(
            f"{self.kind} chooses keys by their content, so that nothing but attention(q, k, v, ...) itself says what "
            "a query reads. Use Causal() for what it may read at most, or BlockLocal(block_tokens) & Causal() for what "
            "it always reads."
        )
