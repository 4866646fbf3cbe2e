"""What a layer with spans asks the engine for, as `explain` shows it: one call of all heads, each with its band."""

from typing import Any

from hf_efficient_attn.attention.layer_patterns import LayerPattern
from hf_efficient_attn.attention.layer_request import LayerRequest
from hf_efficient_attn.layout.score_terms import Distance, Label
from hf_efficient_attn.models.implementations import backend_of
from hf_efficient_attn.models.spans.config import checked_window
from hf_efficient_attn.models.spans.groups import SpanGroup, span_groups
from hf_efficient_attn.models.spans.module import DYNAMIC, FIXED, Spans
from hf_efficient_attn.patterns.algebra import PerHead

RAMPS = "The ramps at the ends of spans cost more for each pair, which is not counted."
LIMITS = "A config has no learned spans: every head is taken to read up to span_limit."
MEANS = "Tokens choose their spans: the mean of the last text that was read is taken, or the start value."


def span_request(config: Any, spans: Spans, num_keys: int, has_table: bool = False) -> LayerRequest:
    """Return what a layer asks for at a length in tokens.

    Args:
        has_table: whether the scores have a table of relative positions.
    """
    window, num_heads = checked_window(config, spans), config.num_attention_heads
    found = tuple(spans.head_spans().tolist())
    if spans.kind == FIXED or spans.is_away:
        groups = [SpanGroup(tuple(range(num_heads)), window.limit, window.limit)]
    else:
        groups = span_groups(found, found, window, num_keys)
    bands = {head: window.band(group.num_keys) for group in groups for head in group.heads}
    pattern = PerHead([bands[head] for head in range(num_heads)]) if len(groups) > 1 else bands[0]
    labels: tuple[Label, ...] = ()
    if has_table:
        labels = (Distance(window.shift, window.limit - 1 + window.shift),)
    return LayerRequest(
        LayerPattern(pattern, spans.layer_idx, is_own=True, is_causal=window.is_causal),
        num_heads,
        num_heads,
        config.head_dim,
        config.head_dim,
        config,
        is_causal=window.is_causal,
        layer=spans.layer_idx,
        labels=labels,
        backend=backend_of(config),
        notes=_notes(spans, groups),
    )


def _notes(spans: Spans, groups: list[SpanGroup]) -> tuple[str, ...]:
    if spans.kind == FIXED:
        return ()
    if spans.is_away:
        return (LIMITS,)
    has_ramps = any(group.num_inner < group.num_keys for group in groups)
    return (*([MEANS] if spans.kind == DYNAMIC else []), *([RAMPS] if has_ramps else []))
