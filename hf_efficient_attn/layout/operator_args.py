"""Pattern, layer, labels and heads of a call as one line of JSON: an operator takes only tensors, numbers and text."""

import json
from operator import index
from typing import Any

from torch import Tensor

from hf_efficient_attn.layout.cache import cached
from hf_efficient_attn.layout.call import AttentionCall, inputs_of
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.layout.score_terms import Label, Term
from hf_efficient_attn.layout.selected_keys import ChosenKeys
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.patterns.pattern import Pattern
from hf_efficient_attn.patterns.serialization import written_fields


def write_call_text(
    pattern: Pattern,
    layer: int,
    labels: tuple[Label, ...],
    first_head: int = 0,
    num_model_heads: int | None = None,
    is_cross: bool = False,
) -> str:
    """Return pattern, layer, labels, which of the model's heads the call has, and its axes as JSON text.

    >>> from hf_efficient_attn.patterns.bands import Band
    >>> write_call_text(Band(2, 0), 1, ())
    '{"pattern": {"kind": "band", "left": 2, "right": 0}, "layer": 1, "labels": [], "heads": [0, null], "cross": false}'
    """
    # traced, so that the compiled graph is guarded by every field it depends on
    heads = f"[{to_text(first_head)}, {to_text(num_model_heads)}]"
    of_pattern = f'"pattern": {to_text(pattern)}, "layer": {to_text(layer)}, "labels": {to_text(labels)}'
    return "{" + f'{of_pattern}, "heads": {heads}, "cross": {to_text(is_cross)}' + "}"


def to_text(value: Any) -> str:
    """Return a pattern, a label, or a value of one of their fields as JSON text, in code that torch can trace."""
    if value is None:
        return "null"
    if value is True or value is False:
        return "true" if value else "false"
    if isinstance(value, int):
        # while compiling, an integer may be a symbol, whose text is not a number; as an index it has a value
        return str(index(value))
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple):
        return "[" + ", ".join([to_text(entry) for entry in value]) + "]"
    fields = [f'"{field.name}": {to_text(getattr(value, field.name))}' for field in written_fields(value)]
    return "{" + ", ".join([f'"kind": "{value.kind}"', *fields]) + "}"


@cached()
def read_call_text(call_text: str) -> tuple[Pattern, int, tuple[Label, ...], int, int | None, bool]:
    """Return the arguments of the `write_call_text` that wrote it."""
    data = json.loads(call_text)
    labels = tuple(Label.from_dict(label) for label in data["labels"])
    return Pattern.from_dict(data["pattern"]), data["layer"], labels, *data["heads"], data["cross"]


def read_layout(call_text: str, num_heads: int, num_queries: int, num_keys: int, query_offset: int) -> Layout:
    """Return the layout of a call with this text and these lengths."""
    pattern, layer, _, first_head, num_model_heads, is_cross = read_call_text(call_text)
    place = (query_offset, layer, first_head, num_model_heads, is_cross)
    return Layout(pattern, num_heads, num_queries, num_keys, *place)


def read_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    masks: list[Tensor | None],
    chosen: ChosenKeys | None,
    term_values: list[Tensor],
    sinks: Tensor | None,
    query_start: Tensor | None,
    call_text: str,
    query_offset: int,
    softcap: float | None,
    scale: float,
    dropout: float,
) -> AttentionCall:
    """Return the call that an operator's arguments describe, which can only be tensors, numbers and text.

    Args:
        masks: the tensors of the token mask.
        term_values: the values of the terms whose labels are in the text.
        query_start: int64 scalar that replaces `query_offset`.
    """
    query_offset = query_offset if query_start is None else int(query_start)
    layout = read_layout(call_text, q.shape[1], q.shape[2], k.shape[2], query_offset)
    labels = read_call_text(call_text)[2]
    terms = tuple(Term(values, label) for values, label in zip(term_values, labels, strict=True))
    numbers = (softcap, scale, dropout)
    return AttentionCall(layout, inputs_of(q, k, v), TokenMask(*masks), terms, sinks, *numbers, chosen=chosen)


@cached()
def read_pattern_text(text: str) -> Pattern:
    """Return the pattern that `to_text` wrote."""
    return Pattern.from_dict(json.loads(text))
