"""What calls of attention without masks, terms or chosen keys come to, found once: the call, checked, and its backend.

Short calls spend less on their scores than on checks and on the choice of a backend, and models repeat them. So do
steps of decoding, each with a length of its own.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.attention.direct_calls import DirectCall, DirectStep, direct_call, direct_step
from hf_efficient_attn.attention.refusals import refuse_tracing
from hf_efficient_attn.attention.select import AUTO, BACKENDS, backend_of, preferred_backend
from hf_efficient_attn.backends.machine_costs import Machine, machine_of
from hf_efficient_attn.backends.sdpa import NAME as SDPA
from hf_efficient_attn.layout.autocast import autocast_off, autocast_states, is_autocast
from hf_efficient_attn.layout.cache import SMALL_BYTES, BoundedCache
from hf_efficient_attn.layout.call import AttentionCall

AS_IT_IS = nullcontext()


@dataclass(frozen=True, eq=False)
class ReadyCall:
    """A call that was checked, and how it is computed.

    Attributes:
        backend: its name.
        machine: the machine by whose costs the backend was chosen; kept, so that no other gets its identity.
        is_cast: whether the states are cast for autocast.
        direct: what the call passes to torch's SDPA, if it is no more than that.
    """

    call: AttentionCall
    backend: str
    machine: Machine
    is_cast: bool
    direct: DirectCall | None

    def run(self, q: Tensor, k: Tensor, v: Tensor, need_lse: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return the output and, if needed, its log-sum-exp."""
        shield, (q, k, v) = _cast(self.is_cast, q, k, v)
        with shield:
            if self.direct is not None and not need_lse:
                return self.direct.run(q, k, v), None
            return BACKENDS[self.backend].attend(q, k, v, self.call, need_lse=need_lse)


@dataclass(frozen=True, eq=False)
class ReadyStep:
    """A step of decoding that was checked, its only query the last of any number of tokens.

    Attributes:
        call: the step of some number of tokens.
        name: of the backend that was asked for; which one "auto" takes may depend on the number of tokens.
        machine, is_cast, direct: as for `ReadyCall`.
    """

    call: AttentionCall
    name: str
    machine: Machine
    is_cast: bool
    direct: DirectStep | None

    def run(self, q: Tensor, k: Tensor, v: Tensor, need_lse: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return the output and, if needed, its log-sum-exp."""
        shield, (q, k, v) = _cast(self.is_cast, q, k, v)
        with shield:
            out = None if self.direct is None or need_lse else self.direct.run(q, k, v)
            if out is not None:
                return out, None
            call = replace(self.call, layout=self.call.layout.at_step(k.shape[2]))
            return backend_of(call, self.name).attend(q, k, v, call, need_lse=need_lse)


def _cast(is_cast: bool, *states: Tensor) -> tuple[AbstractContextManager[None], tuple[Tensor, ...]]:
    return (autocast_off(states[0].device.type), autocast_states(*states)) if is_cast else (AS_IT_IS, states)


_ready: BoundedCache[ReadyCall | ReadyStep] = BoundedCache(SMALL_BYTES)


@dataclass(frozen=True, slots=True)
class Extras:
    """What calls that are kept ready do not have; anything else in its place is for the checks.

    Attributes:
        tensors: masks, sinks, chosen keys and the like: None.
        terms: an empty tuple or list.
        flags: False.
    """

    tensors: tuple[Any, ...]
    terms: Any
    flags: tuple[Any, ...]

    def are_absent(self) -> bool:
        """Return whether a call has none of them."""
        for each in self.tensors:
            if each is not None:
                return False
        for each in self.flags:
            if each is not False:
                return False
        return isinstance(self.terms, tuple | list) and len(self.terms) == 0


def call_key(
    q: Tensor, k: Tensor, v: Tensor, backend: str, extras: Extras, pattern: Any, query_offset: Any, *settings: Any
) -> tuple[Any, ...] | None:
    """Return everything that a ready call depends on, the name of its backend first; None: none is kept.

    Args:
        settings: the other arguments of a call, which are no tensors.

    Raises:
        UnsupportedBackendError: under `torch.jit.trace`.
    """
    # compilers and transforms see the call as it is; C functions, since each further line of Python is felt
    is_seen = torch.compiler.is_compiling()
    if not is_seen and torch._C._is_tracing():
        refuse_tracing()
    is_seen = is_seen or torch._C._functorch.peek_interpreter_stack() is not None
    if is_seen or not (type(q) is Tensor and type(k) is Tensor and type(v) is Tensor and isinstance(backend, str)):
        return None
    # no tensor is kept, nor compared
    for each in settings:
        if isinstance(each, Tensor):
            return None
    shape, lengths = q.shape, _lengths(q.shape, k.shape, v.shape, pattern, query_offset)
    if lengths is None or isinstance(query_offset, Tensor) or not extras.are_absent():
        return None
    device = q.device
    needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    cast = torch.get_autocast_dtype(device.type) if is_autocast(device.type) else None
    kinds = (q.dtype, k.dtype, v.dtype, device, k.device, v.device, needs_grad, cast)
    name = preferred_backend() if backend == AUTO else backend
    # 1 equals True and 1.0, but is not refused where these are
    types = (type(query_offset), *map(type, settings))
    machine = id(machine_of(device.type))
    return (name, machine, shape, lengths, kinds, pattern, query_offset, settings, types)


def _lengths(
    shape: torch.Size, key_shape: torch.Size, value_shape: torch.Size, pattern: Any, query_offset: Any
) -> tuple[Any, ...] | None:
    """Return what a ready call depends on of the shapes of keys and values; None: none is kept.

    It is one for all numbers of keys in a step of decoding, unless these decide what its pattern is.
    """
    if not len(shape) == len(key_shape) == len(value_shape) == 4 or 0 in shape or 0 in key_shape:
        return None
    if shape[2] > 1:
        return key_shape, value_shape
    is_step = query_offset is None and key_shape[:3] == value_shape[:3]
    is_step = is_step and not getattr(pattern, "chooses_by_content", False)
    return (key_shape[:2], key_shape[3], value_shape[3]) if is_step else None


def ready_call(key: tuple[Any, ...] | None) -> ReadyCall | ReadyStep | None:
    """Return the ready call of a key, or None."""
    if key is None:
        return None
    try:
        entry = _ready.find(key)
    except TypeError:
        # an argument that cannot be hashed is refused by the checks
        return None
    return None if entry is None else entry.value


def made_ready(key: tuple[Any, ...] | None, call: AttentionCall, device: torch.device) -> ReadyCall | ReadyStep | None:
    """Return a call on a device made ready, and keep it for its key; None: it has none.

    Raises:
        UnsupportedBackendError: the backend that was asked for cannot compute the call.
    """
    if key is None or call.chosen is not None:
        return None
    if call.layout.num_queries == 1:
        if call.layout.is_cross:
            # its place is its own, and not behind the keys
            return None
        ready: ReadyCall | ReadyStep = _ready_step(key[0], call, device)
    else:
        backend = backend_of(call, key[0])
        direct = direct_call(call, device) if backend.NAME == SDPA else None
        ready = ReadyCall(call, backend.NAME, machine_of(device.type), is_autocast(device.type), direct)
    # by another machine than that of the key if this was changed meanwhile
    return _ready.get(key, lambda: ready) if id(ready.machine) == key[1] else ready


def _ready_step(name: str, call: AttentionCall, device: torch.device) -> ReadyStep:
    # "auto" computes a step whose keys are neighbours so
    direct = direct_step(call) if name in (AUTO, SDPA) else None
    return ReadyStep(call, name, machine_of(device.type), is_autocast(device.type), direct)
