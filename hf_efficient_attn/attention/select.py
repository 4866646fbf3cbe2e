"""Which backend computes a call: the one that was asked for, or the fastest that can."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf

from hf_efficient_attn.backends import reference, sdpa
from hf_efficient_attn.backends.blocked import backend as blocked
from hf_efficient_attn.backends.flash import backend as flash
from hf_efficient_attn.backends.flex import backend as flex
from hf_efficient_attn.backends.gathered import backend as gathered
from hf_efficient_attn.backends.protocol import Backend
from hf_efficient_attn.errors import UnsupportedBackendError
from hf_efficient_attn.layout.cache import MEBIBYTE
from hf_efficient_attn.layout.call import AttentionCall
from hf_efficient_attn.layout.onnx import is_written
from hf_efficient_attn.layout.tracing import shown

AUTO = "auto"
BACKENDS: dict[str, Backend] = {module.NAME: module for module in (blocked, flash, flex, gathered, reference, sdpa)}
# backends that use only standard operators, which ONNX has
WRITTEN = (sdpa.NAME, reference.NAME)
# the memory in bytes that a backend chosen by "auto" may take besides inputs and output, or, where that is more,
# MORE_THAN_LEAST times the least memory of all backends that can compute the call
MAX_WORKING_BYTES, MAX_WORKING_BYTES_OFF_CPU = 256 * MEBIBYTE, 2048 * MEBIBYTE
MORE_THAN_LEAST = 2
# the same limit if no other backend can compute the call
MAX_WORKING_BYTES_ALONE = 4096 * MEBIBYTE


@dataclass(frozen=True, eq=False)
class Preference:
    """One `with use_backend` block, equal to no other."""

    name: str


# the innermost block comes last; a plain list, since a compiler cannot read context variables
_preferred = [Preference(AUTO)]


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Compute every attention call within the block with the backend `name`, even inside models and in other threads.

    Raises:
        UnsupportedBackendError: there is no backend of this name.
    """
    check_name(name)
    own = Preference(name)
    _preferred.append(own)
    try:
        yield
    finally:
        # blocks of several threads may overlap, so each removes its own
        _preferred.remove(own)


def preferred_backend() -> str:
    """Return the name that `use_backend` has set, or "auto" outside of it."""
    return _preferred[-1].name


def check_name(name: str) -> None:
    """Raise UnsupportedBackendError if `name` is neither a backend nor "auto"."""
    if not isinstance(name, str) or (name != AUTO and name not in BACKENDS):
        raise UnsupportedBackendError(
            f"backend={shown(name)} does not exist. Use {shown(AUTO)} or one of: {', '.join(sorted(BACKENDS))}."
        )


def select(call: AttentionCall, name: str = AUTO) -> Backend:
    """Return the backend for a call.

    Args:
        name: the name of a backend, which is then used or refused, never replaced; or "auto".

    Raises:
        UnsupportedBackendError: there is no such backend, or it cannot compute the call; the message says why.
    """
    check_name(name)
    name = fastest(call) if name == AUTO else name
    reason = BACKENDS[name].why_not(call)
    if reason is not None:
        raise UnsupportedBackendError(
            f"backend='{name}' cannot compute this: {reason} Use backend='auto', which chooses one that can."
        )
    return BACKENDS[name]


def fastest(call: AttentionCall) -> str:
    """Return the backend that "auto" chooses: the cheapest of those that compute the call in little memory."""
    if call.inputs.is_compiling:
        return _by_rank(call)
    return _known_fastest(call) or _cheapest(call)


def _known_fastest(call: AttentionCall) -> str | None:
    """Return the backend that no other can beat; None if costs have to be compared."""
    for name, backend in BACKENDS.items():
        if backend.is_fastest(call) and backend.why_not(call) is None:
            return name
    return None


def _cheapest(call: AttentionCall) -> str:
    able = [name for name in BACKENDS if BACKENDS[name].why_not(call) is None]
    costs = {name: cost for name in able if (cost := BACKENDS[name].cost(call)) < inf}
    light = [name for name in costs if is_light(call, name, costs)]
    return min(light, key=costs.__getitem__) if light else _by_rank(call)


def is_light(call: AttentionCall, name: str, rivals: Iterable[str]) -> bool:
    """Return whether a backend needs little memory besides inputs and output, or not much more than its rivals."""
    own, others = BACKENDS[name].working_bytes(call), [BACKENDS[other].working_bytes(call) for other in rivals]
    few = MAX_WORKING_BYTES if call.inputs.device == "cpu" else MAX_WORKING_BYTES_OFF_CPU
    most = MAX_WORKING_BYTES_ALONE if len(others) == 1 else max(few, MORE_THAN_LEAST * min(others))
    return own <= most


def _by_rank(call: AttentionCall) -> str:
    """Return the first backend by rank that can compute a call whose costs cannot be compared, or are all too high."""
    if is_written():
        return next((name for name in WRITTEN if BACKENDS[name].why_not(call) is None), WRITTEN[-1])
    ranks = [(backend.rank(call), name) for name, backend in BACKENDS.items()]
    ranked = [name for _, name in sorted((rank, name) for rank, name in ranks if rank is not None)]
    for name in ranked:
        if BACKENDS[name].why_not(call) is None:
            return name
    # `select` then raises the error of this backend
    return ranked[-1]
