"""A pattern drawn with one character per pair."""

from typing import TYPE_CHECKING

from hf_efficient_attn.errors import InputError
from hf_efficient_attn.patterns.checks import check_head, check_length
from hf_efficient_attn.patterns.intervals import Intervals, complement
from hf_efficient_attn.patterns.work import bounded

if TYPE_CHECKING:
    from hf_efficient_attn.patterns.pattern import Pattern

MAX_DRAWN_PAIRS = 1 << 22


def drawn(pattern: "Pattern", num_queries: int, num_keys: int | None, layer: int, head: int, query_offset: int) -> str:
    """Return what `Pattern.draw` returns."""
    check_head(head)
    num_keys = query_offset + num_queries if num_keys is None else num_keys
    check_length("num_queries", num_queries)
    check_length("num_keys", num_keys)
    if num_queries * num_keys > MAX_DRAWN_PAIRS:
        raise InputError(
            f"{num_queries} queries × {num_keys} keys are more than {MAX_DRAWN_PAIRS} signs to draw; take fewer."
        )
    for position, block_tokens in pattern.global_positions():
        num_blocks = -(-num_keys // block_tokens)
        if not -num_blocks <= position < num_blocks:
            unit = "tokens" if block_tokens == 1 else f"blocks of {block_tokens} tokens"
            raise InputError(
                f"{pattern.kind} has the global position {position}, which {num_blocks} {unit} do not reach, so that "
                f"the drawing would lack it. Draw at least {_tokens_to(position, block_tokens)} tokens."
            )
    num_heads = pattern.num_head_patterns * (1 + head // pattern.num_head_patterns)
    resolved = pattern.resolve(num_keys, layer, head, num_heads)
    queries = range(query_offset, query_offset + num_queries)
    with bounded("Drawing this pattern"):
        return "\n".join(_line(resolved.key_intervals(query, query, num_keys), num_keys) for query in queries)


def _line(intervals: Intervals, num_keys: int) -> str:
    unread = complement(intervals, num_keys)
    signs = sorted([(start, stop, "■") for start, stop in intervals] + [(start, stop, "⬚") for start, stop in unread])
    return "".join(sign * (stop - start) for start, stop, sign in signs)


def _tokens_to(position: int, block_tokens: int) -> int:
    """Return how many tokens a text needs to have a global position; negative ones count from its end."""
    return (position if position >= 0 else -position - 1) * block_tokens + 1
