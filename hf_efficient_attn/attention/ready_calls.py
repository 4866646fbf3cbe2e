"""What calls of attention without masks, terms or chosen keys come to, found once: the call, checked, and its backend.

Short calls spend less on their scores than on checks and on the choice of a backend, and models repeat them. So do
steps of decoding, each with a length of its own.
"""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.attention.select import AUTO, BACKENDS, preferred_backend, remembered
from hf_efficient_attn.backends.direct import DirectCall, DirectStep, direct_call
from hf_efficient_attn.backends.machines.current import machine_of
from hf_efficient_attn.backends.machines.machine import Machine
from hf_efficient_attn.backends.sdpa import NAME as SDPA
from hf_efficient_attn.layout.autocast import autocast_off, autocast_states, is_autocast
from hf_efficient_attn.layout.cache import SMALL_BYTES, BoundedCache
from hf_efficient_attn.layout.call import AttentionCall

AS_IT_IS = nullcontext()


@dataclass(frozen=True, eq=False)
class ReadyCall:
    """A call that was checked, and how it is computed.

    Attributes:
        backend: its name; for steps of decoding also "auto", since it may depend on the number of keys.
        machine: the machine by whose costs the backend was chosen; kept, so that no other gets its identity.
        is_cast: whether the states are cast for autocast.
        direct: what the call passes to torch's SDPA, if it is no more than that.
    """

    call: AttentionCall
    backend: str
    machine: Machine
    is_cast: bool
    direct: DirectCall | DirectStep | None

    def run(self, q: Tensor, k: Tensor, v: Tensor, need_lse: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return the output and, if needed, its log-sum-exp."""
        if self.is_cast:
            q, k, v = autocast_states(q, k, v)
        with autocast_off(q.device.type) if self.is_cast else AS_IT_IS:
            out = None if self.direct is None or need_lse else self.direct.run(q, k, v)
            if out is not None:
                return out, None
            if self.call.layout.num_queries > 1:
                return BACKENDS[self.backend].attend(q, k, v, self.call, need_lse=need_lse)
            call = replace(self.call, layout=self.call.layout.at_step(k.shape[2]))
            return remembered(call, self.backend).attend(q, k, v, call, need_lse=need_lse)


_ready: BoundedCache[ReadyCall] = BoundedCache(SMALL_BYTES)


def call_key(
    q: Tensor, k: Tensor, v: Tensor, backend: str, absent: tuple[Any, ...], query_offset: Any, *settings: Any
) -> tuple[Any, ...] | None:
    """Return everything that a ready call depends on, the name of its backend first; None: none is kept.

    Args:
        absent: what calls that are kept ready do not have: masks, terms, and the like, each None, False or empty.
        settings: the pattern, and the other arguments of a call without further tensors.
        query_offset: of steps of decoding that have one, none is kept.
    """
    # compilers, transforms and traces see the call as it is; C functions, since each further line of Python is felt
    is_seen = torch.compiler.is_compiling() or torch._C._is_tracing()
    is_seen = is_seen or torch._C._functorch.peek_interpreter_stack() is not None
    if is_seen or not (type(q) is Tensor and type(k) is Tensor and type(v) is Tensor):
        return None
    for each in absent:
        if not (each is None or each is False or (isinstance(each, tuple | list) and len(each) == 0)):
            return None
    # no tensor is kept, nor compared
    for each in settings:
        if isinstance(each, Tensor):
            return None
    shape, key_shape, value_shape, device = q.shape, k.shape, v.shape, q.device
    if isinstance(query_offset, Tensor) or len(shape) != 4 or 0 in shape or 0 in key_shape:
        return None
    lengths: tuple[Any, ...] = (key_shape, value_shape)
    if shape[2] == 1:
        # one for all numbers of keys
        if query_offset is not None or len(key_shape) != 4 or key_shape[:3] != value_shape[:3]:
            return None
        lengths = (key_shape[:2], key_shape[3], value_shape[3])
    needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    cast = torch.get_autocast_dtype(device.type) if is_autocast(device.type) else None
    kinds = (q.dtype, k.dtype, v.dtype, device, k.device, v.device, needs_grad, cast)
    name = preferred_backend() if backend == AUTO else backend
    # 1 equals True and 1.0, but is not refused where these are
    types = tuple(map(type, settings))
    machine = id(machine_of(device.type))
    return (name, machine, shape, lengths, kinds, query_offset, type(query_offset), settings, types)


def ready_call(key: tuple[Any, ...] | None) -> ReadyCall | None:
    """Return the ready call of a key, or None."""
    if key is None:
        return None
    try:
        entry = _ready.find(key)
    except TypeError:
        # an argument that cannot be hashed is refused by the checks
        return None
    return None if entry is None else entry.value


def made_ready(key: tuple[Any, ...] | None, call: AttentionCall, device: torch.device) -> ReadyCall | None:
    """Return a call on a device made ready, and keep it for its key; None: it has none.

    Raises:
        UnsupportedBackendError: the backend that was asked for cannot compute the call.
    """
    is_step = call.layout.num_queries == 1
    if key is None or call.chosen is not None or (is_step and call.layout.is_cross):
        return None
    name = key[0]
    backend = name if is_step else remembered(call, name).NAME
    # "auto" computes a step whose keys are neighbours so
    is_direct = backend == SDPA or (is_step and backend == AUTO)
    direct = direct_call(call, device) if is_direct else None
    ready = ReadyCall(call, backend, machine_of(device.type), is_autocast(device.type), direct)
    # by another machine than that of the key if this was changed meanwhile
    return _ready.get(key, lambda: ready) if id(ready.machine) == key[1] else ready
