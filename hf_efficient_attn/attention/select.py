"""Which backend computes a request: the one that was asked for, or the fastest that can."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

from hf_efficient_attn.attention.costs import has_few_scores, is_dense_faster, is_dense_light
from hf_efficient_attn.backends import flex, reference, sdpa
from hf_efficient_attn.backends.blocked import backend as blocked
from hf_efficient_attn.errors import UnsupportedBackendError
from hf_efficient_attn.layout.request import Request
from hf_efficient_attn.messages import shown

AUTO = "auto"
BACKENDS: dict[str, ModuleType] = {module.NAME: module for module in (blocked, flex, reference, sdpa)}


@dataclass(frozen=True, eq=False)
class Preference:
    """One block of `use_backend`, equal to no other."""

    name: str


# the block entered last at the end; a plain list, since a compiler can read no context variable
_preferred = [Preference(AUTO)]


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Compute every attention call within the block with the backend `name`, also those inside models, in all threads.

    Raises:
        UnsupportedBackendError: there is no backend of this name.
    """
    check_name(name)
    own = Preference(name)
    _preferred.append(own)
    try:
        yield
    finally:
        # blocks of several threads may overlap: each ends its own, and never that of another
        _preferred.remove(own)


def preferred_backend() -> str:
    """Return the name that `use_backend` has set; "auto" outside of it."""
    return _preferred[-1].name


def check_name(name: str) -> None:
    """Raise UnsupportedBackendError if `name` is neither a backend nor "auto"."""
    if name != AUTO and name not in BACKENDS:
        raise UnsupportedBackendError(
            f"backend={shown(name)} does not exist. Use {shown(AUTO)} or one of: {', '.join(sorted(BACKENDS))}."
        )


def select(request: Request, name: str = AUTO) -> ModuleType:
    """Return the backend module for a request.

    Args:
        name: of a backend, which is then used or refused, never replaced; or "auto".

    Raises:
        UnsupportedBackendError: there is no such backend, or it cannot compute the request; the message says why.
    """
    check_name(name)
    name = fastest(request) if name == AUTO else name
    reason = BACKENDS[name].why_not(request)
    if request.has_query_start and name != blocked.NAME:
        reason = f"a query_offset that is a tensor can be compiled by {shown(blocked.NAME)} only."
    if reason is not None:
        raise UnsupportedBackendError(
            f"backend={shown(name)} cannot compute this: {reason} Use backend='auto' to have one chosen that can."
        )
    return BACKENDS[name]


def fastest(request: Request) -> str:
    """Return the backend that "auto" takes.

    Dense attention where it needs no mask; off the CPU flex where it can, but for single queries; else blocked or dense
    with a mask, by cost; and never dense attention that needs far more memory than the other.
    """
    if request.has_query_start:
        return blocked.NAME
    if has_few_scores(request) and request.device == "cpu" and sdpa.why_not(request) is None:
        return sdpa.NAME
    has_no_mask = not request.has_token_mask and sdpa.maskless(request.layout) is not None
    if has_no_mask and sdpa.why_not(request) is None and is_dense_light(request):
        return sdpa.NAME
    # a step of cached decoding has a length of its own, and flex would list its blocks on the host for every one
    is_step = request.layout.num_queries == 1
    if request.device != "cpu" and not is_step and flex.why_not(request) is None:
        return flex.NAME
    if sdpa.why_not(request) is None and is_dense_faster(request) and is_dense_light(request):
        return sdpa.NAME
    return blocked.NAME if blocked.why_not(request) is None else reference.NAME
