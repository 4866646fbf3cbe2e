"""Builds the `AttentionCall` of a layer from its tensors, and passes it to the backend that computes it."""

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.attention.select import AUTO, preferred_backend, select
from hf_efficient_attn.attention.sharded.shards import SequenceShards
from hf_efficient_attn.backends.gathered import backend as gathered
from hf_efficient_attn.backends.gathered.backend import NAME as GATHERED
from hf_efficient_attn.errors import ConfigurationError, InputError, UnsupportedBackendError, WorkLimitError
from hf_efficient_attn.layout.cache import cached
from hf_efficient_attn.layout.call import AttentionCall, inputs_of, join_sinks
from hf_efficient_attn.layout.dense_mask import lse_dtype
from hf_efficient_attn.layout.grouped_reference import unit
from hf_efficient_attn.layout.layout import Layout, drawn_layer
from hf_efficient_attn.layout.listed_keys import ChosenBlocks
from hf_efficient_attn.layout.onnx import refuse_selected_keys
from hf_efficient_attn.layout.score_terms import Label, Term
from hf_efficient_attn.layout.selected_keys import MEAN, ChosenKeys, States
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.layout.top_k import choose_blocks
from hf_efficient_attn.layout.tracing import autocast_off, autocast_states, is_autocast, shown
from hf_efficient_attn.messages import warn_once
from hf_efficient_attn.patterns.bands import Causal
from hf_efficient_attn.patterns.global_tokens import GlobalTokens
from hf_efficient_attn.patterns.intervals import SMALL_SHARE, work_budget
from hf_efficient_attn.patterns.pattern import Pattern
from hf_efficient_attn.patterns.serialization import MAX_INTEGER, check_kind, is_integer

# What one attention layer computes.


@dataclass(frozen=True)
class LayerPattern:
    """What one attention layer computes.

    Attributes:
        pattern: the pattern, causal for a causal layer.
        layer: the index of the layer, on which random patterns depend.
        is_own: whether this is the layer's own attention, not a pattern of the config.
        is_causal: whether this is the causal form of the config's pattern.
        attends_to_all: whether every query attends to every token, as in a layer's own full attention and in
            cross-attention, whose queries and keys are of different sequences.
        first_head, num_model_heads: which of the model's heads are computed; see `attention`.
        is_cross: whether queries and keys are of different sequences, whose positions the pattern relates.
        shards: the processes among which the tokens of each text are divided; None if this one has the whole text.
    """

    pattern: Pattern
    layer: int = 0
    is_own: bool = True
    is_causal: bool = False
    attends_to_all: bool = False
    first_head: int = 0
    num_model_heads: int | None = None
    is_cross: bool = False
    shards: SequenceShards | None = None

    @property
    def with_globals(self) -> "LayerPattern":
        """This layer pattern for token masks with global tokens, which follow the direction of the layer.

        A pattern that only looks back (`Band(4, 0)`) does not make a bidirectional layer causal: joined with global
        tokens, even none, it may look ahead, as it does with global tokens at given positions.
        """
        if self.is_own or self.is_causal or not self.pattern.is_causal:
            return self
        return replace(self, pattern=self.pattern | GlobalTokens(()))


# The position of the first query.


# position of the first query on the axis of the keys, a tensor if a compiler cannot know it; None if queries are the
# last keys
QueryOffset = int | Tensor | None


def unknown_start(query_offset: QueryOffset) -> Tensor | None:
    """Return the position of the first query if a compiler cannot know it, and only a tensor will; otherwise None."""
    return query_offset if isinstance(query_offset, Tensor) and torch.compiler.is_compiling() else None


# Checks of the arguments of `attention`, before any work starts.


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# beyond these limits, a factor would be infinite or 0 in kernels, which compute in float32
LARGEST_FACTOR, SMALLEST_CAP = 1e30, 1e-30


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise InputError if q, k or v is not a tensor."""
    for name, states in (("q", q), ("k", k), ("v", v)):
        if not isinstance(states, Tensor):
            raise InputError(f"{name} is a {type(states).__name__}; it must be a tensor. Use torch.as_tensor({name}).")


def check_shapes(q: Tensor, k: Tensor, v: Tensor, cross: bool = False) -> None:
    """Raise InputError if the shapes of q, k and v do not fit together."""
    q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
    if not len(q_shape) == len(k_shape) == len(v_shape) == 4:
        raise wrong_shapes(q, k, v, "all three must have four dimensions.")
    (batch_size, num_heads, num_queries, head_dim), (_, num_key_heads, num_keys, _) = q_shape, k_shape
    if not (batch_size == k_shape[0] == v_shape[0]):
        raise wrong_shapes(q, k, v, "the batch sizes (first dimension) must be equal.")
    if k_shape[1:3] != v_shape[1:3]:
        raise wrong_shapes(q, k, v, "k and v must have the same heads and tokens (second and third dimension).")
    if head_dim != k_shape[3]:
        raise wrong_shapes(q, k, v, "q and k must have the same head_dim (last dimension).")
    if not (num_heads and num_key_heads and head_dim):
        raise wrong_shapes(
            q, k, v, "there must be at least one head (second dimension) and a head_dim (last) of at least 1."
        )
    if num_queries > num_keys and not cross:
        raise wrong_shapes(
            q,
            k,
            v,
            "there are more queries (third dimension of q) than keys. Transpose tensors of [batch, tokens, heads, "
            "head_dim] by .transpose(1, 2); give cross=True if queries and keys belong to two sequences.",
        )
    if num_heads % num_key_heads:
        raise wrong_shapes(
            q, k, v, f"the {num_key_heads} key heads must divide the {num_heads} query heads (dimension 1)."
        )


def check_dtype(dtype: torch.dtype) -> None:
    """Raise InputError for a dtype that no backend computes in."""
    if dtype not in DTYPES:
        raise InputError(f"dtype={shown(dtype)} must be one of {', '.join(map(str, DTYPES))}.")


def check_axes(cross: bool, tokens: TokenMask, query_offset: int | Tensor | None) -> None:
    """Raise an error for masks that do not go with `cross`, or only with `cross`."""
    if not isinstance(cross, bool):
        raise InputError(
            f"cross={shown(cross)} must be True if queries and keys belong to different sequences, or False."
        )
    has_none_of_queries = tokens.query_mask is None and tokens.query_segment_ids is None
    if not (cross or has_none_of_queries):
        raise InputError(
            "query_mask and query_segment_ids are for queries and keys of different sequences. Give cross=True; for "
            "one sequence give only key_mask and segment_ids."
        )
    if not has_none_of_queries and unknown_start(query_offset) is not None:
        raise UnsupportedBackendError(
            "While compiling, the value of a query_offset tensor is unknown, and so is the length of query_mask and "
            "query_segment_ids. Give an integer, or leave these masks out."
        )
    if cross and tokens.global_mask is not None:
        raise InputError(
            "global_mask is for tokens that are both queries and keys, but with cross=True queries and keys are "
            "different tokens. Use Full(), or GlobalTokens(positions, attends_to_all=False) for some of the keys."
        )


def check_kinds(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise an error if q, k and v differ in dtype or device, or if no backend can compute them."""
    if not q.dtype == k.dtype == v.dtype:
        raise InputError(f"q, k and v have dtypes {q.dtype}, {k.dtype} and {v.dtype}; they must be equal.")
    if q.dtype not in DTYPES:
        raise InputError(f"q, k and v have dtype {q.dtype}; it must be one of {', '.join(map(str, DTYPES))}.")
    if not q.device == k.device == v.device:
        raise InputError(f"q, k and v are on {q.device}, {k.device} and {v.device}; move them to one device.")
    if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None:
        raise UnsupportedBackendError(
            "torch.func transforms (grad, vmap, jvp, ...) are not supported. Use torch.autograd for gradients, and the "
            "batch dimension for vmap."
        )


def check_numbers(
    pattern: Pattern, scale: float | None, dropout: float, query_offset: int | Tensor | None, layer: int
) -> None:
    """Raise an error if the pattern is not a pattern, or a number has a wrong type or is out of range."""
    if not isinstance(pattern, Pattern):
        raise ConfigurationError(
            f"pattern is {shown(pattern)}; it must be a pattern such as Band(256, 256), or an expression such as "
            "'band(256, 256)'. Pattern.from_dict reads a dict."
        )
    check_kind(pattern)
    if scale is not None and not (is_number(scale) and abs(scale) <= LARGEST_FACTOR):
        raise InputError(
            f"scale={shown(scale)} must be a finite number, from {-LARGEST_FACTOR:g} to {LARGEST_FACTOR:g}, or None "
            "for 1 / sqrt(head_dim)."
        )
    if not (isinstance(dropout, int | float) and 0.0 <= dropout < 1.0):
        raise InputError(f"dropout={shown(dropout)} must be a number of at least 0 and below 1.")
    if isinstance(query_offset, Tensor):
        kind = query_offset.dtype
        is_place = query_offset.numel() == 1 and not (kind.is_floating_point or kind.is_complex or kind == torch.bool)
    else:
        # in `torch.export`, the number of cached tokens is a symbol
        is_place = query_offset is None or is_integer(query_offset) or isinstance(query_offset, torch.SymInt)
    if not is_place:
        raise InputError(
            f"query_offset={shown(query_offset)} must be an integer, an integer tensor of one element, or None."
        )
    if not is_integer(layer) or not 0 <= layer <= MAX_INTEGER:
        raise InputError(f"layer={shown(layer)} must be the index of a layer, an integer from 0 to {MAX_INTEGER}.")


def is_number(value: Any) -> bool:
    """Return whether a value is an integer or a float; True and False are not."""
    return isinstance(value, float) or is_integer(value)


def check_heads(first_head: int, num_model_heads: int | None) -> None:
    """Raise InputError if the numbers of the heads are not integers; `Layout` checks their range."""
    if not is_integer(first_head) or not (num_model_heads is None or is_integer(num_model_heads)):
        raise InputError(
            f"first_head={shown(first_head)} and num_model_heads={shown(num_model_heads)} must be integers, or None "
            "for num_model_heads if there are no other heads."
        )


def check_softcap(softcap: float | None) -> None:
    """Raise InputError if the bound of the scores is not a positive number by which float32 can divide."""
    if softcap is not None and not (is_number(softcap) and SMALLEST_CAP <= softcap <= LARGEST_FACTOR):
        raise InputError(
            f"softcap={shown(softcap)} must be a positive number, from {SMALLEST_CAP:g} to {LARGEST_FACTOR:g}, or None "
            "for scores without a bound."
        )


def check_selected_keys(chosen: ChosenKeys | None, q: Tensor, k: Tensor, is_cross: bool, sinks: Tensor | None) -> None:
    """Raise an error for chosen keys that do not fit q and k, for a mean of groups with sinks, and in ONNX export."""
    if chosen is None:
        return
    refuse_selected_keys()
    if not isinstance(chosen, ChosenKeys):
        raise InputError(
            f"chosen is a {type(chosen).__name__}; it must be ChosenTokens, ChosenBlocks, KeyGroups or ChunkedOrder, "
            "of integer tensors. Use hea.ChosenTokens(tokens) for indices of keys."
        )
    states = States(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.device, is_cross)
    chosen.check(states)
    if sinks is not None and chosen.join == MEAN:
        raise InputError(
            "A mean over groups (join='mean') has one softmax per group, which sinks cannot join. Leave sinks out."
        )


def own_sinks(sinks: Tensor | None, q: Tensor, first_head: int, num_model_heads: int | None) -> Tensor | None:
    """Return the sinks of the heads of q; None if there are none.

    Raises:
        InputError: the sinks are for other heads, or not a floating-point tensor on the device of q.
    """
    if sinks is None:
        return None
    if not isinstance(sinks, Tensor) or not sinks.is_floating_point() or sinks.device != q.device:
        found = f"{sinks.dtype} on {sinks.device}" if isinstance(sinks, Tensor) else type(sinks).__name__
        raise InputError(
            f"sinks is {found}; it must be a floating-point tensor on {q.device}, with one value per query head."
        )
    num_heads = q.shape[1]
    if sinks.shape == (num_heads,):
        return sinks
    if sinks.shape == (num_model_heads,):
        return sinks[first_head : first_head + num_heads]
    raise InputError(
        f"sinks has shape {list(sinks.shape)}; it must be [{num_heads}], one logit per query head"
        f"{'' if num_model_heads is None else f', or [{num_model_heads}], one for each head of the model'}."
    )


def wrong_shapes(q: Tensor, k: Tensor, v: Tensor, problem: str) -> InputError:
    """Return the error that says what is wrong with the shapes of q, k and v."""
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    return InputError(f"{shapes}: {problem} The dimensions are (batch, heads, tokens, head_dim).")


def check_terms(terms: Sequence[Term], q: Tensor) -> None:
    """Raise InputError if these are not terms, or if values do not broadcast to [B, H, Nq, values of a query]."""
    if not isinstance(terms, tuple | list) or not all(
        isinstance(term, Term) and isinstance(term.values, Tensor) and isinstance(term.label, Label) for term in terms
    ):
        raise InputError(f"terms={shown(terms)} must be a list of Term(values, label), with a tensor and a Label each.")
    for term in terms:
        shape, num_values = tuple(term.values.shape), term.label.num_values
        fits = len(shape) == 4 and shape[3] == num_values
        if not fits or any(size not in (1, full) for size, full in zip(shape, q.shape[:3], strict=False)):
            raise InputError(
                f"A term of {term.label} has values of shape {list(shape)}; they must be [batch or 1, heads or 1, "
                f"queries or 1, values] = [{q.shape[0]} or 1, {q.shape[1]} or 1, {q.shape[2]} or 1, {num_values}]."
            )
        if not torch.compiler.is_compiling():
            term.label.check(term.values)


# Patterns that choose keys by content: they become a choice of keys once the queries and keys are known.


def with_selected_keys(
    layer_spec: LayerPattern,
    chosen: ChosenKeys | None,
    query: Tensor,
    key: Tensor,
    tokens: TokenMask,
    query_offset: int | Tensor | None,
    backend: str = AUTO,
) -> tuple[LayerPattern, ChosenKeys | None]:
    """Return the layer's pattern of positions and the chosen keys; the arguments, if it does not choose by content.

    Args:
        query, key: [B, H, Nq, D] and [B, Hkv, Nk, D], after rotary positions.
        query_offset, backend: as for `attention`.

    Raises:
        InputError: keys are already chosen, or masks do not fit.
        UnsupportedBackendError: queries and keys are of different sequences.
    """
    pattern: Any = layer_spec.pattern
    # a value that is not a pattern is refused when the call is built
    if not getattr(pattern, "chooses_by_content", False):
        return layer_spec, chosen
    if chosen is not None:
        raise InputError(f"{shown(pattern)} selects the keys itself. Leave chosen out, or give it with Causal().")
    if layer_spec.is_cross:
        raise UnsupportedBackendError(f"{shown(pattern)} is for self-attention. Leave cross=True out.")
    # lengths may be symbols to a compiler
    is_short = not torch.compiler.is_compiling() and key.shape[2] <= pattern.attends_to_all_up_to()
    if is_short and not needs_selected_keys(backend):
        return replace(layer_spec, pattern=Causal()), None
    tokens.check(query.shape[0], key.shape[2], query.device)
    start = unknown_start(query_offset)
    if query_offset is None or start is not None:
        query_offset = key.shape[2] - query.shape[2]
    sizes = (pattern.block_tokens, pattern.num_chosen)
    blocks = choose_blocks(query.detach(), key.detach(), list(tokens.tensors), *sizes, int(query_offset), start)
    return replace(layer_spec, pattern=Causal()), ChosenBlocks(blocks, pattern.block_tokens)


def needs_selected_keys(backend: str) -> bool:
    """Return whether the requested backend needs a choice of keys, even if all keys are chosen."""
    return (preferred_backend() if backend == AUTO else backend) == gathered.NAME


def planned_selected_keys(
    pattern: Any, num_heads: int, num_queries: int, num_keys: int, backend: str = AUTO
) -> tuple[Pattern, ChosenKeys | None]:
    """Return the result of `with_selected_keys` for a pattern, with a choice that has a shape but no contents."""
    if not pattern.chooses_by_content:
        return pattern, None
    if num_keys <= pattern.attends_to_all_up_to() and not needs_selected_keys(backend):
        return Causal(), None
    blocks = torch.empty(1, num_heads, num_queries, pattern.num_chosen, dtype=torch.int32, device="meta")
    return Causal(), ChosenBlocks(blocks, pattern.block_tokens)


# Warnings about tokens without any key.


# if the period of a pattern is at most this, one token of each residue class is checked for attending to itself
MAX_PERIOD = 64


@cached()
def warn_of_keyless(pattern: Pattern, num_heads: int, num_tokens: int, layer: int) -> None:
    """Warn of the first position that may have no key, if there is one, once per pattern and length.

    If every token attends only to earlier ones, the first token cannot have a key and causes no warning.
    """
    layout = Layout(pattern, num_heads, num_tokens, num_tokens, 0, layer).fitted
    firsts = [_first_unexpected(drawn, layout.num_keys) for _, _, drawn in layout.head_groups()]
    found = [first for first in firsts if first is not None]
    if found:
        warn_once(
            f"attention_pattern ({pattern.kind}) leaves tokens without any key, the first at position {min(found)}. "
            "Their attention output is zero. Add `| Band(0, 0)` to let every token attend to itself."
        )


def _first_unexpected(pattern: Pattern, num_tokens: int) -> int | None:
    ahead = pattern.max_tokens_ahead
    start = 1 if ahead is not None and ahead < 0 else 0
    if start >= num_tokens:
        return None
    period = pattern.period
    if period is not None and period <= MAX_PERIOD and all(pattern.allowed(token, token) for token in range(period)):
        # every token attends to itself
        return None
    try:
        with work_budget("Looking for tokens without keys", share=SMALL_SHARE):
            return first_keyless(pattern, start, num_tokens - 1, num_tokens)
    except WorkLimitError:
        # a warning is not worth more work
        return None


def first_keyless(pattern: Pattern, first: int, last: int, num_keys: int) -> int | None:
    """Return the first query of first..last (inclusive) that may have no key; None if there is none.

    >>> from hf_efficient_attn.patterns.bands import Band
    >>> first_keyless(Band(4, -1), 0, 9, 10), first_keyless(Band(4, 0), 0, 9, 10)
    (0, None)
    """
    ranges = [(first, last)]
    while ranges:
        first, last = ranges.pop()
        if pattern.full_key_intervals(first, last, num_keys):
            continue
        if first == last:
            return first
        middle = (first + last) // 2
        ranges += [(middle + 1, last), (first, middle)]
    return None


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
    layer_spec: LayerPattern,
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
        ConfigurationError: the pattern does not fit these heads or this length.
        InputError: an argument does not fit the states.
    """
    check_numbers(layer_spec.pattern, scale, dropout, query_offset, layer_spec.layer)
    check_heads(layer_spec.first_head, layer_spec.num_model_heads)
    check_axes(layer_spec.is_cross, tokens, query_offset)
    check_terms(terms, q)
    check_softcap(softcap)
    check_selected_keys(chosen, q, k, layer_spec.is_cross, sinks)
    layout = layout_of(layer_spec, query_offset, q, k)
    tokens.check(q.shape[0], k.shape[2], q.device, layout.num_positions)
    sinks = own_sinks(sinks, q, layer_spec.first_head, layer_spec.num_model_heads)
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


def layout_of(layer_spec: LayerPattern, query_offset: int | Tensor | None, q: Tensor, k: Tensor) -> Layout:
    """Return the layout of a layer's pattern over q and k, and warn of tokens that the pattern leaves without keys.

    query_offset: if None, the queries are the last positions, or the first ones on their own axis. This is also the
        guess for a tensor whose value is unknown while compiling, so code that depends on the positions of the queries
        needs `unknown_start` as well.
    """
    pattern, num_heads, num_queries, num_keys = layer_spec.pattern, q.shape[1], q.shape[2], k.shape[2]
    is_compiling = torch.compiler.is_compiling()
    if query_offset is None or unknown_start(query_offset) is not None:
        query_offset = 0 if layer_spec.is_cross else num_keys - num_queries
    place = (num_heads, num_queries, num_keys, int(query_offset), drawn_layer(pattern, layer_spec.layer))
    heads = (layer_spec.first_head, layer_spec.num_model_heads, layer_spec.is_cross)
    # not cached if lengths may be symbols of a compiler, and for decoding steps, each of which has another length
    return Layout(pattern, *place, *heads) if is_compiling or num_queries == 1 else _laid_out(pattern, *place, *heads)


@cached()
def _laid_out(*arguments: Any) -> Layout:
    """Return the same layout object for equal arguments, so that caches find it by identity without a comparison."""
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
    selected_backend = select(call, name)
    with autocast_off(q.device.type):
        k, call = with_unit_keys(q, k, call, selected_backend.NAME)
        return selected_backend.attend(q, k, v, call, need_lse=need_lse)


def with_unit_keys(q: Tensor, k: Tensor, call: AttentionCall, backend: str) -> tuple[Tensor, AttentionCall]:
    """Return keys scaled to length 1 if the choice of keys asks for it and the backend does not do it itself."""
    if call.chosen is None or not call.chosen.unit_keys or (k is q and backend == GATHERED):
        return k, call
    return unit(k), replace(call, chosen=replace(call.chosen, unit_keys=False))  # type: ignore[type-var]


def _without_pairs(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of a call without examples, queries or keys, which not every kernel can compute."""
    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
    out = torch.softmax(q @ k.transpose(-1, -2), -1) @ v
    lse = out.new_full(q.shape[:3], -torch.inf, dtype=lse_dtype(q))
    if call.sinks is not None:
        out, lse = join_sinks(out, lse, call.sinks)
        lse = lse if call.masked_queries is None else lse.masked_fill(call.masked_queries[..., 0], -torch.inf)
    return out, lse.detach()


# What to write instead of arguments that other attention functions have.


# (advice, arguments): the advice applies to functions that have at least one of these arguments
MASK = (
    "For padding, use key_mask=mask.bool(), [B, Nk] with True for tokens. Which keys a query attends to is set by the "
    "pattern.",
    ("key_mask",),
)
CAUSAL = "Give a causal pattern: Band(n, 0) for n tokens before each, or pattern & Causal().", ("pattern", "what")
SCALE = "Use scale.", ("scale",)
# arguments of torch, transformers and flash-attn
INSTEAD = {
    "attention_mask": MASK,
    "attn_mask": MASK,
    "mask": MASK,
    "key_padding_mask": ("Use key_mask, with True for tokens and False for padding.", ("key_mask",)),
    "block_mask": ("Which keys a query attends to is set by the pattern.", ("pattern", "what")),
    "is_causal": CAUSAL,
    "causal": CAUSAL,
    "window_size": ("Use Band(left, right) as the pattern.", ("pattern", "what")),
    "sliding_window": (
        "Use Band(left, right) as the pattern; left and right do not count the query itself.",
        ("pattern", "what"),
    ),
    "dropout_p": ("Use dropout.", ("dropout",)),
    "scaling": SCALE,
    "softmax_scale": SCALE,
    "tokens": ("Use query_tokens, and key_tokens if there are more keys.", ("query_tokens",)),
    "length": ("Use query_tokens, and key_tokens if there are more keys.", ("query_tokens",)),
    "enable_gqa": ("Leave it out: k and v may have fewer heads than q.", ("k",)),
}
# inputs of models, and how similar a name must be to count as a misspelling of one; arguments of other libraries
# (`mm_token_type_ids`, `decoder_attention_mask`) are less similar
INPUTS = ("input_ids", "attention_mask", "position_ids", "inputs_embeds", "token_type_ids", "use_cache")
SIMILARITY = 0.92


def refuse_misspelt(names: Iterable[str]) -> None:
    """Raise InputError for the first of these arguments that is a misspelt input of models.

    Models accept and ignore arguments that they do not know, since libraries pass arguments of other models to them.

    >>> refuse_misspelt(["num_items_in_batch", "attention_masks"])
    Traceback (most recent call last):
    hf_efficient_attn.errors.InputError: There is no argument 'attention_masks'. Did you mean 'attention_mask'?
    """
    for name in names:
        if name not in INPUTS and (near := _misspelt(name)):
            raise InputError(f"There is no argument {name!r}. Did you mean {near!r}?")


# a compiler cannot trace the comparison
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _misspelt(name: str) -> str:
    return _near_input(name)


@functools.lru_cache(maxsize=256)
def _near_input(name: str) -> str:
    near = difflib.get_close_matches(name, INPUTS, n=1, cutoff=SIMILARITY)
    return near[0] if near else ""


def refuse_unknown(names: Iterable[str], function: Callable[..., Any]) -> None:
    """Raise InputError for the first of these names, none of which is an argument of a function.

    >>> refuse_unknown(["dropout_p"], lambda dropout: ...)
    Traceback (most recent call last):
    hf_efficient_attn.errors.InputError: There is no argument 'dropout_p'. Use dropout.
    >>> refuse_unknown(["layr"], lambda q, layer: ...)
    Traceback (most recent call last):
    hf_efficient_attn.errors.InputError: There is no argument 'layr'. Allowed are: q, layer. Did you mean 'layer'?
    """
    for name in names:
        raise InputError(_refusal(name, function))


# torch before 2.13 cannot trace it
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _refusal(name: str, function: Callable[..., Any]) -> str:
    kinds = inspect.signature(function).parameters.values()
    allowed = [each.name for each in kinds if each.kind is not each.VAR_KEYWORD]
    instead, arguments = INSTEAD.get(name, ("", ()))
    if not any(each in allowed for each in arguments):
        near = difflib.get_close_matches(name, allowed, n=1)
        instead = f"Allowed are: {', '.join(allowed)}.{f' Did you mean {shown(near[0])}?' if near else ''}"
    return f"There is no argument {shown(name)}. {instead}"
