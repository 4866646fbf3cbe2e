"""How a call of attention would be computed, without computing it: the backend and why, the pairs, the cost."""

from dataclasses import dataclass
from math import isfinite

import torch

from hf_efficient_attn.attention.checks import check_dtype, check_numbers
from hf_efficient_attn.attention.select import AUTO, BACKENDS, preferred_backend, select
from hf_efficient_attn.backends.protocol import Backend
from hf_efficient_attn.errors import InputError, WorkLimitError
from hf_efficient_attn.layout.blocks.compile import compile_layout
from hf_efficient_attn.layout.cache import cached
from hf_efficient_attn.layout.call import AttentionCall, Inputs
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.messages import shown
from hf_efficient_attn.patterns.checks import check_length
from hf_efficient_attn.patterns.pattern import Pattern

CPU = torch.device("cpu")
MEBIBYTE = 2**20
PATTERN_LETTERS = 100
COUNT_BLOCK_TOKENS = 32


@dataclass(frozen=True)
class Explanation:
    """How one call of attention would be computed; it prints as a small table.

    Attributes:
        call: without tensors.
        backend: the name of the backend that computes it.
        reasons: for every other backend, one sentence on why it cannot compute the call, or was not chosen.
        allowed_pairs: pairs (query, key) that the pattern allows, in all heads of one example.
        computed_pairs: scores that the backend computes for them, allowed or not.
        total_pairs: all pairs of queries and keys, in all heads.
        relative_cost: estimated time over that of dense attention without a mask.
        memory_bytes: estimated peak memory of one example, beyond its inputs.
    """

    call: AttentionCall
    backend: str
    reasons: dict[str, str]
    allowed_pairs: int
    computed_pairs: int
    total_pairs: int
    relative_cost: float
    memory_bytes: int

    @property
    def density(self) -> float:
        """Share of all pairs that is allowed."""
        return self.allowed_pairs / self.total_pairs

    @property
    def block_density(self) -> float:
        """Share of all pairs that is computed."""
        return self.computed_pairs / self.total_pairs

    def _elsewhere(self) -> str:
        """Return what "auto" chooses where more is installed than here, if that differs."""
        device = self.call.inputs.device
        lacking = {name: backend.missing(self.call) for name, backend in BACKENDS.items()}
        found = next(((name, what) for name, what in lacking.items() if what is not None), None)
        if device == "cpu" or found is None:
            return ""
        return f" (on {device}, auto may take {found[0]} where {found[1]} is installed; here it is not)"

    def __str__(self) -> str:
        layout, inputs = self.call.layout, self.call.inputs
        rows = {
            "pattern": shown(layout.pattern, PATTERN_LETTERS),
            "call": f"{layout.num_heads} heads, {layout.num_queries:,} queries, {layout.num_keys:,} keys, "
            f"{str(inputs.dtype).removeprefix('torch.')} on {inputs.device}"
            f"{', with gradients' if inputs.needs_grad else ''}{', of two sequences' if layout.is_cross else ''}",
            "backend": self.backend + self._elsewhere(),
            "allowed": f"{self.allowed_pairs:,} pairs, {self.density:.2%} of all",
            "computed": f"{self.computed_pairs:,} pairs, {self.block_density:.2%} of all",
            "cost": f"{self.relative_cost:.3f} × dense attention (estimated)",
            "memory": f"{self.memory_bytes / MEBIBYTE:,.1f} MiB beyond q, k and v (estimated, one example)",
            **{f"not {name}": reason for name, reason in self.reasons.items()},
        }
        width = max(map(len, rows))
        return "\n".join(f"{name.ljust(width)}  {text}" for name, text in rows.items())


def explain(
    pattern: Pattern,
    query_tokens: int = 8192,
    key_tokens: int | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    num_heads: int = 8,
    num_key_heads: int | None = None,
    head_dim: int = 64,
    training: bool = False,
    dropout: float = 0.0,
    backend: str = AUTO,
    layer: int = 0,
    cross: bool = False,
) -> Explanation:
    """Return which backend would compute a call of `attention` with this pattern, why, and what it would cost.

    Nothing is computed, and the device need not exist here. Costs are estimates; `hf-efficient-attn bench attention`
    measures them.

    >>> from hf_efficient_attn.patterns.bands import Band
    >>> explanation = explain(Band(256, 256))
    >>> explanation.backend, f"{explanation.density:.1%}"
    ('blocked', '6.2%')

    Args:
        query_tokens, key_tokens: length of the queries and of the keys; the queries are the last positions. None: as
            many keys as queries.
        num_key_heads: heads of the keys and values; None: as many as `num_heads`.
        training: whether gradients are needed.
        dropout, backend, layer, cross: as for `attention`.

    Raises:
        InputError, ConfigurationError: lengths or heads that the pattern cannot have.
        UnsupportedBackendError: `backend` cannot compute the call.
    """
    num_keys = query_tokens if key_tokens is None else key_tokens
    check_numbers(pattern, None, dropout, None, layer)
    check_dtype(dtype)
    num_key_heads = num_heads if num_key_heads is None else num_key_heads
    sizes = {"query_tokens": query_tokens, "key_tokens": num_keys, "num_heads": num_heads, "head_dim": head_dim}
    for name, count in {**sizes, "num_key_heads": num_key_heads}.items():
        check_length(name, count)
    if num_heads % num_key_heads:
        raise InputError(f"num_key_heads={num_key_heads} does not divide num_heads={num_heads}.")
    offset = 0 if cross else num_keys - query_tokens
    call = AttentionCall(
        layout=Layout(pattern, num_heads, query_tokens, num_keys, offset, layer, is_cross=cross),
        inputs=Inputs(_device_type(device), dtype, head_dim, head_dim, num_key_heads, 1, needs_grad=training),
        dropout=dropout,
    )
    wanted = preferred_backend() if backend == AUTO else backend
    chosen = select(call, wanted)
    computed, total, cost = chosen.computed_pairs(call), call.layout.num_pairs, chosen.cost(call)
    return Explanation(
        call=call,
        backend=chosen.NAME,
        reasons={name: _reason(call, name, wanted) for name in sorted(BACKENDS) if name != chosen.NAME},
        allowed_pairs=allowed_pairs(call.layout),
        computed_pairs=computed,
        total_pairs=total,
        relative_cost=(cost if isfinite(cost) else computed) / total,
        memory_bytes=_memory(call, chosen),
    )


def _device_type(device: str | torch.device) -> str:
    try:
        return torch.device(device).type
    except RuntimeError as error:
        raise InputError(f"device={shown(device)} is not one that torch knows; use 'cpu' or 'cuda'.") from error


def allowed_pairs(layout: Layout) -> int:
    """Return how many pairs a layout allows, in all heads.

    >>> from hf_efficient_attn.patterns.bands import Causal
    >>> allowed_pairs(Layout(Causal(), num_heads=2, num_queries=3, num_keys=3))
    12
    """
    return _num_allowed(layout)


@cached()
def _num_allowed(layout: Layout) -> int:
    try:
        return compile_layout(layout, COUNT_BLOCK_TOKENS, CPU).num_allowed
    except WorkLimitError as refusal:
        try:
            return sum(count * pattern.num_pairs(*layout.extent) for _, count, pattern in layout.head_groups())
        except WorkLimitError:
            raise refusal from None


def _reason(call: AttentionCall, name: str, wanted: str) -> str:
    """Return one sentence on why a backend does not compute a call."""
    cannot = BACKENDS[name].why_not(call)
    if cannot is not None:
        return cannot
    return f"{wanted} was asked for." if wanted != AUTO else BACKENDS[name].remark(call)


def _memory(call: AttentionCall, backend: Backend) -> int:
    """Return the estimated bytes of the output, of gradients, and of what the backend needs besides them."""
    layout, inputs = call.layout, call.inputs
    rows, width = layout.num_heads * layout.num_queries, inputs.dtype.itemsize
    total = rows * (inputs.value_dim * width + 4)
    if inputs.needs_grad:
        total += width * (rows + inputs.num_key_heads * layout.num_keys) * (inputs.head_dim + inputs.value_dim)
    return total + backend.working_bytes(call)
