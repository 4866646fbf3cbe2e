"""The first tokens of a text, read by all."""

from dataclasses import dataclass
from typing import Any

from hf_efficient_attn.patterns.checks import check_integer
from hf_efficient_attn.patterns.intervals import Intervals, clip
from hf_efficient_attn.patterns.pattern import Pattern


@dataclass(frozen=True)
class Prefix(Pattern, kind="prefix"):
    """Every query reads the first `num_tokens` tokens; with `| Causal()` that is a prefix language model."""

    num_tokens: int

    def __post_init__(self) -> None:
        check_integer(self.kind, "num_tokens", self.num_tokens, at_least=1)

    def allowed(self, query: Any, key: Any) -> Any:
        return (key < self.num_tokens) & (query >= 0)

    def key_intervals(self, first_query: int, last_query: int, num_keys: int) -> Intervals:
        return clip([(0, self.num_tokens)], num_keys)

    def full_key_intervals(self, first_query: int, last_query: int, num_keys: int) -> Intervals:
        return self.key_intervals(first_query, last_query, num_keys)
