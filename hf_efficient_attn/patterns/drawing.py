"""A pattern drawn with one character per pair, or per square of pairs."""

from typing import TYPE_CHECKING

from hf_efficient_attn.errors import InputError
from hf_efficient_attn.patterns.checks import check_head, check_length
from hf_efficient_attn.patterns.intervals import Intervals, complement, normalize
from hf_efficient_attn.patterns.work import bounded

if TYPE_CHECKING:
    from hf_efficient_attn.patterns.pattern import Pattern

MAX_DRAWN_PAIRS = 1 << 22


def drawn(
    pattern: "Pattern", num_queries: int, num_keys: int | None, layer: int, head: int, query_offset: int, step: int = 1
) -> str:
    """Return what `Pattern.draw` returns; with a step, a sign for so many queries and keys: ■ if any reads any."""
    check_head(head)
    check_length("step", step)
    num_keys = query_offset + num_queries if num_keys is None else num_keys
    check_length("num_queries", num_queries)
    check_length("num_keys", num_keys)
    num_signs = -(-num_keys // step)
    # every query is looked at, whatever the step
    if num_queries * num_signs > MAX_DRAWN_PAIRS:
        raise InputError(
            f"{num_queries} queries × {num_signs} signs are more than {MAX_DRAWN_PAIRS} to draw; take fewer, or a "
            "larger step."
        )
    for named in pattern.global_positions():
        if not named.is_within(num_keys):
            raise InputError(
                f"The pattern has the global position {named.position}{named.unit}, which {num_keys} tokens do not "
                f"reach, so that the drawing would lack it. Draw at least {_tokens_to(*named)} tokens."
            )
    num_heads = pattern.num_head_patterns * (1 + head // pattern.num_head_patterns)
    resolved = pattern.resolve(num_keys, layer, head, num_heads)
    queries = range(query_offset, query_offset + num_queries)
    lines = []
    with bounded("Drawing this pattern"):
        for first in range(0, num_queries, step):
            read = [resolved.key_intervals(query, query, num_keys) for query in queries[first : first + step]]
            signs = [(start // step, -(-stop // step)) for each in read for start, stop in each]
            lines.append(_line(normalize(signs), num_signs))
    return "\n".join(lines)


def _line(intervals: Intervals, num_signs: int) -> str:
    unread = complement(intervals, num_signs)
    signs = sorted([(start, stop, "■") for start, stop in intervals] + [(start, stop, "⬚") for start, stop in unread])
    return "".join(sign * (stop - start) for start, stop, sign in signs)


def _tokens_to(position: int, block_tokens: int) -> int:
    """Return how many tokens a text needs to have a global position; negative ones count from its end."""
    return (position if position >= 0 else -position - 1) * block_tokens + 1
