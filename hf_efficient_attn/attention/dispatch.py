"""Calls by plans: the first call checks its arguments and chooses a backend, and later calls find this plan by a key.

Short calls spend less time on their scores than on checks and on the choice of a backend, and models repeat them. So do
decoding steps, each with another length.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_efficient_attn.attention.build_call import (
    LayerPattern,
    build_call,
    checked_states,
    compute,
    with_selected_keys,
    with_unit_keys,
)
from hf_efficient_attn.attention.joined import with_lse_gradient
from hf_efficient_attn.attention.select import AUTO, BACKENDS, preferred_backend, select
from hf_efficient_attn.backends import sdpa
from hf_efficient_attn.backends.machine_costs import Machine, machine_of
from hf_efficient_attn.errors import InputError
from hf_efficient_attn.layout.cache import SMALL_BYTES, BoundedCache
from hf_efficient_attn.layout.call import AttentionCall
from hf_efficient_attn.layout.score_terms import Term
from hf_efficient_attn.layout.selected_keys import MEAN, ChosenKeys
from hf_efficient_attn.layout.token_mask import NO_MASK, TokenMask
from hf_efficient_attn.layout.tracing import autocast_off, autocast_states, is_autocast, refuse_tracing

Key = tuple[Any, ...]
# token mask, terms, sinks, chosen keys
Tensors = tuple[TokenMask, Sequence[Term], Tensor | None, ChosenKeys | None]
NO_CONTEXT = nullcontext()
NUMBERS = frozenset((int, float, bool, type(None)))


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer_spec: LayerPattern,
    query_offset: int | Tensor | None = None,
    tokens: TokenMask = NO_MASK,
    terms: Sequence[Term] = (),
    sinks: Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    chosen: ChosenKeys | None = None,
    backend: str = AUTO,
    need_lse: bool = False,
    lse_gradient: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return the output [B, H, Nq, Dv] and, if needed, its log-sum-exp; see `attention` for the arguments.

    Raises:
        ConfigurationError, InputError, UnsupportedBackendError: as for `attention`.
    """
    if getattr(layer_spec.pattern, "chooses_by_content", False):
        q, k, v = checked_states(q, k, v, layer_spec.is_cross)
        layer_spec, chosen = with_selected_keys(layer_spec, chosen, q, k, tokens, query_offset, backend)
    if need_lse and isinstance(chosen, ChosenKeys) and chosen.join == MEAN:
        raise InputError("A mean over groups (join='mean') has no log-sum-exp. Leave return_lse out.")
    place = (layer_spec.layer, layer_spec.first_head, layer_spec.num_model_heads, layer_spec.is_cross)
    numbers = (query_offset, softcap, scale, dropout, lse_gradient, lse_gradient and need_lse, *place)
    tensors = (tokens, terms, sinks, chosen)
    key = plan_key(q, k, v, layer_spec.pattern, numbers, tensors, backend)
    try:
        entry = None if key is None else _plans.find(key)
    except TypeError:
        # arguments that cannot be hashed are refused by the checks, or computed without a plan
        key = entry = None
    if entry is not None:
        return entry.value.run(q, k, v, tensors, need_lse)
    q, k, v = checked_states(q, k, v, layer_spec.is_cross)
    call = build_call(q, k, v, layer_spec, query_offset, tokens, terms, sinks, softcap, scale, dropout, chosen)
    call = with_lse_gradient(call, need_lse) if lse_gradient else call
    if key is None:
        return compute(q, k, v, call, backend, need_lse)
    plan = plan_of(call, key[0], q.device)
    # if the machine was changed after the key was made, the plan is not kept
    plan = _plans.get(key, lambda: plan) if id(plan.machine) == key[1] else plan
    return plan.run(q, k, v, tensors, need_lse)


@dataclass(frozen=True, eq=False)
class Plan:
    """A call that was checked, and what computes it.

    Attributes:
        call: the call without its tensors; for a decoding step, with an arbitrary number of keys.
        backend: the name of the backend; for a decoding step, the requested name, since its backend may depend on the
            number of keys.
        is_step: whether this is a plan for a single query that is the last of any number of keys.
        has_tensors: whether the call has masks, terms, sinks or chosen keys.
        machine: the machine by whose costs the backend was chosen; kept alive, so that no other gets its id.
        is_cast: whether the states are cast for autocast.
        direct: the direct call of torch's SDPA, if the call needs nothing else.
    """

    call: AttentionCall
    backend: str
    is_step: bool
    has_tensors: bool
    machine: Machine
    is_cast: bool
    direct: sdpa.DirectCall | sdpa.DirectStep | None

    def run(self, q: Tensor, k: Tensor, v: Tensor, tensors: Tensors, need_lse: bool) -> tuple[Tensor, Tensor | None]:
        """Return the output and, if needed, its log-sum-exp."""
        if self.is_cast:
            q, k, v = autocast_states(q, k, v)
        with autocast_off(q.device.type) if self.is_cast else NO_CONTEXT:
            if self.direct is not None and not need_lse:
                out = self.direct.run(q, k, v)
                if out is not None:
                    return out, None
            call, backend = self.call, self.backend
            if self.is_step or self.has_tensors:
                call = self._call(k.shape[2], *tensors)
            if self.is_step:
                backend = select(call, backend).NAME
            if call.chosen is not None:
                k, call = with_unit_keys(q, k, call, backend)
            return BACKENDS[backend].attend(q, k, v, call, need_lse=need_lse)

    def _call(
        self, num_keys: int, tokens: TokenMask, terms: Sequence[Term], sinks: Tensor | None, chosen: ChosenKeys | None
    ) -> AttentionCall:
        """Return the call with its tensors."""
        call = self.call
        layout = call.layout.at_step(num_keys) if self.is_step else call.layout
        for term in terms:
            term.label.check(term.values)
        if sinks is not None and len(sinks) != layout.num_heads:
            sinks = sinks[layout.first_head : layout.first_head + layout.num_heads]
        numbers = (call.softcap, call.scale, call.dropout, None)
        return AttentionCall(layout, call.inputs, tokens, tuple(terms), sinks, *numbers, chosen, call.lse_needs_grad)


# plans hold no tensors except the short masks of direct calls
_plans: BoundedCache[Plan] = BoundedCache(SMALL_BYTES)


def plan_of(call: AttentionCall, name: str, device: torch.device) -> Plan:
    """Return the plan of a call on a device.

    Args:
        name: "auto" or the name of a backend.

    Raises:
        UnsupportedBackendError: the backend that was asked for cannot compute the call.
    """
    is_step = call.layout.num_queries == 1 and not call.layout.is_cross
    direct: sdpa.DirectCall | sdpa.DirectStep | None = None
    if is_step:
        # "auto" also computes a step with consecutive keys this way
        direct = sdpa.direct_step(call) if name in (AUTO, sdpa.NAME) else None
    else:
        name = select(call, name).NAME
        direct = sdpa.direct_call(call, device) if name == sdpa.NAME else None
    has_tensors = not (call.tokens.is_empty and not call.terms and call.sinks is None and call.chosen is None)
    call = replace(call, tokens=NO_MASK, terms=(), sinks=None, chosen=None)
    return Plan(call, name, is_step, has_tensors, machine_of(device.type), is_autocast(device.type), direct)


def plan_key(
    q: Tensor, k: Tensor, v: Tensor, pattern: Any, numbers: tuple[Any, ...], tensors: Tensors, backend: str
) -> Key | None:
    """Return everything that a plan depends on, the name of its backend first; None if the call has no plan.

    Args:
        numbers: all other arguments that are not tensors, the position of the first query first.

    Raises:
        UnsupportedBackendError: under `torch.jit.trace`.
    """
    # no plans under compilers and transforms; C functions are called, since every line of Python costs time here
    if torch.compiler.is_compiling():
        return None
    if torch._C._is_tracing():
        refuse_tracing()
    if torch._C._functorch.peek_interpreter_stack() is not None or not isinstance(backend, str):
        return None
    # types are part of the key, since 1 equals True and 1.0, which may be refused; tensors are not kept or compared
    types = tuple(map(type, numbers))
    if not (type(q) is Tensor and type(k) is Tensor and type(v) is Tensor and NUMBERS.issuperset(types)):
        return None
    tokens, terms, sinks, chosen = tensors
    shape, key_shape, value_shape, device = q.shape, k.shape, v.shape, q.device
    if not len(shape) == len(key_shape) == len(value_shape) == 4 or 0 in shape or 0 in key_shape:
        return None
    lengths: tuple[Any, ...] = (key_shape, value_shape)
    if shape[2] == 1 and not numbers[-1]:
        # a decoding step has one plan for all numbers of keys, and none if the caller gives the position of its query
        if numbers[0] is not None or chosen is not None or key_shape[:3] != value_shape[:3]:
            return None
        lengths = (key_shape[:2], key_shape[3], value_shape[3])
    needs_grad, others = q.requires_grad or k.requires_grad or v.requires_grad, None
    if not (tokens.is_empty and sinks is None and chosen is None and type(terms) is tuple and not terms):
        others = _kinds(tokens, terms, sinks, chosen, key_shape)
        if others is None:
            return None
        needs_grad = needs_grad or others[0]
    needs_grad = needs_grad and torch.is_grad_enabled()
    cast = torch.get_autocast_dtype(device.type) if is_autocast(device.type) else None
    is_ordered = torch._C._get_deterministic_algorithms() and not torch._C._get_deterministic_algorithms_warn_only()
    kinds = (q.dtype, k.dtype, v.dtype, device, k.device, v.device, needs_grad, cast, is_ordered)
    name = preferred_backend() if backend == AUTO else backend
    return name, id(machine_of(device.type)), shape, lengths, kinds, pattern, numbers, types, others


def _kinds(
    tokens: TokenMask, terms: Sequence[Term], sinks: Any, chosen: Any, key_shape: torch.Size
) -> tuple[Any, ...] | None:
    """Return whether terms or sinks need a gradient, then the properties of tensors on which a plan depends.

    These are the properties of masks, terms, sinks and chosen keys. None if they have to be checked.
    """
    if not isinstance(terms, tuple | list) or not (chosen is None or isinstance(chosen, ChosenKeys)):
        return None
    masks, given, learned = tokens.tensors, [] if chosen is None else chosen.tensors, [] if sinks is None else [sinks]
    kinds: list[Any] = [sinks is None]
    for term in terms:
        if type(term) is not Term:
            return None
        learned.append(term.values)
        kinds.append(term.label)
    for each in (*learned, *given, *masks):
        if each is not None and type(each) not in (Tensor, nn.Parameter):
            return None
    kinds.append(None if chosen is None else (chosen.traits, *map(type, chosen.numbers)))
    needs_grad = False
    for each in (*learned, *given):
        kinds.append(None if each is None else (each.dtype, each.device, each.shape))
        needs_grad = needs_grad or (each is not None and each.requires_grad)
    for number, mask in enumerate(masks):
        # masks of keys are as long as the keys, and a decoding step has one plan for all lengths
        if mask is not None and number < 3 and mask.shape != (key_shape[0], key_shape[2]):
            return None
        kinds.append(None if mask is None else (mask.dtype, mask.device, None if number < 3 else mask.shape))
    return needs_grad, len(terms), *kinds
