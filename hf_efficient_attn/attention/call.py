"""From the tensors of a layer to its `AttentionCall`, and from there to the backend that computes it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.attention.checks import (
    check_axes,
    check_chosen,
    check_heads,
    check_kinds,
    check_numbers,
    check_shapes,
    check_softcap,
    check_tensors,
    check_terms,
    own_sinks,
)
from hf_efficient_attn.attention.key_tokens import unknown_start
from hf_efficient_attn.attention.layer_patterns import LayerPattern
from hf_efficient_attn.attention.notices import warn_of_keyless
from hf_efficient_attn.attention.select import AUTO, preferred_backend, select
from hf_efficient_attn.backends.gathered.backend import NAME as GATHERED
from hf_efficient_attn.layout.cache import cached
from hf_efficient_attn.layout.call import AttentionCall, inputs_of, join_sinks
from hf_efficient_attn.layout.dense_mask import lse_dtype
from hf_efficient_attn.layout.grouped_reference import unit
from hf_efficient_attn.layout.layout import Layout, drawn_layer
from hf_efficient_attn.layout.score_terms import Term
from hf_efficient_attn.layout.selected_keys import ChosenKeys
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.layout.tracing import autocast_off, autocast_states, is_autocast


def checked_states(q: Tensor, k: Tensor, v: Tensor, cross: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values in the dtype in which they are computed.

    Raises:
        InputError, UnsupportedBackendError: they do not fit together, or no backend can compute them.
    """
    check_tensors(q, k, v)
    check_shapes(q, k, v, cross)
    if is_autocast(q.device.type):
        q, k, v = autocast_states(q, k, v)
    check_kinds(q, k, v)
    return q, k, v


def build_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    followed: LayerPattern,
    query_offset: int | Tensor | None,
    tokens: TokenMask,
    terms: Sequence[Term] = (),
    sinks: Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    chosen: ChosenKeys | None = None,
) -> AttentionCall:
    """Return the call for checked states; see `attention` for the arguments.

    Raises:
        ConfigurationError: a pattern that does not fit these heads or this length.
        InputError: an argument that does not fit the states.
    """
    check_numbers(followed.pattern, scale, dropout, query_offset, followed.layer)
    check_heads(followed.first_head, followed.num_model_heads)
    check_axes(followed.is_cross, tokens, query_offset)
    check_terms(terms, q)
    check_softcap(softcap)
    check_chosen(chosen, q, k, followed.is_cross, sinks)
    layout = layout_of(followed, query_offset, q, k)
    tokens.check(q.shape[0], k.shape[2], q.device, layout.num_positions)
    sinks = own_sinks(sinks, q, followed.first_head, followed.num_model_heads)
    return AttentionCall(
        layout=layout,
        inputs=inputs_of(q, k, v, *(term.values for term in terms), *(() if sinks is None else (sinks,))),
        tokens=tokens,
        terms=tuple(terms),
        sinks=sinks,
        softcap=softcap,
        scale=q.shape[3] ** -0.5 if scale is None else scale,
        dropout=dropout,
        query_start=unknown_start(query_offset),
        chosen=chosen,
    )


def layout_of(followed: LayerPattern, query_offset: int | Tensor | None, q: Tensor, k: Tensor) -> Layout:
    """Return a layer's pattern laid over q and k; it warns of tokens that the pattern leaves without keys.

    query_offset: if None, the queries are the last positions, or the first ones on an axis of their own. That is also
        the guess for a tensor whose value is unknown while compiling: what asks where the queries are must be told
        `unknown_start`, too.
    """
    pattern, num_heads, num_queries, num_keys = followed.pattern, q.shape[1], q.shape[2], k.shape[2]
    is_compiling = torch.compiler.is_compiling()
    if query_offset is None or unknown_start(query_offset) is not None:
        query_offset = 0 if followed.is_cross else num_keys - num_queries
    place = (num_heads, num_queries, num_keys, int(query_offset), drawn_layer(pattern, followed.layer))
    heads = (followed.first_head, followed.num_model_heads, followed.is_cross)
    # lengths may be symbols to a compiler, and every step of decoding has one of its own
    return Layout(pattern, *place, *heads) if is_compiling or num_queries == 1 else _laid_out(pattern, *place, *heads)


@cached()
def _laid_out(*arguments: Any) -> Layout:
    """Return the one layout of these arguments: what is kept of it is found by its identity, and not compared."""
    layout = Layout(*arguments)
    if not layout.is_cross and 0 < layout.num_queries == layout.num_keys:
        warn_of_keyless(layout.pattern, layout.num_model_heads or layout.num_heads, layout.num_keys, layout.layer)
    return layout


def compute(
    q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, backend: str = AUTO, need_lse: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return the output [B, H, Nq, Dv] of a call and, if needed, its log-sum-exp [B, H, Nq].

    Args:
        backend: "auto" or the name of a backend.

    Raises:
        UnsupportedBackendError: the backend that was asked for cannot compute the call.
    """
    if not call.inputs.is_compiling and 0 in (call.inputs.batch_size, call.layout.num_queries, call.layout.num_keys):
        return _without_pairs(q, k, v, call)
    name = preferred_backend() if backend == AUTO else backend
    chosen_backend = select(call, name)
    with autocast_off(q.device.type):
        k, call = with_unit_keys(q, k, call, chosen_backend.NAME)
        return chosen_backend.attend(q, k, v, call, need_lse=need_lse)


def with_unit_keys(q: Tensor, k: Tensor, call: AttentionCall, backend: str) -> tuple[Tensor, AttentionCall]:
    """Return keys at length 1 if the chosen keys of a call ask for them and its backend does not see to it."""
    if call.chosen is None or not call.chosen.unit_keys or (k is q and backend == GATHERED):
        return k, call
    return unit(k), replace(call, chosen=replace(call.chosen, unit_keys=False))  # type: ignore[type-var]


def _without_pairs(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Return the outputs of no queries, or of queries without any keys; not every kernel can be called with none."""
    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
    out = torch.softmax(q @ k.transpose(-1, -2), -1) @ v
    lse = out.new_full(q.shape[:3], -torch.inf, dtype=lse_dtype(q))
    if call.sinks is not None:
        out, lse = join_sinks(out, lse, call.sinks)
        lse = lse if call.masked_queries is None else lse.masked_fill(call.masked_queries[..., 0], -torch.inf)
    return out, lse.detach()
