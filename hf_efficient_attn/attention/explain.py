"""What a call of attention would do, without doing it: which backend and why, how many pairs, at what cost."""

from dataclasses import dataclass
from textwrap import shorten

import torch

from hf_efficient_attn.attention.checks import check_numbers
from hf_efficient_attn.attention.costs import ESTIMATE_BLOCK_TOKENS, blocked_cost, is_dense_light
from hf_efficient_attn.attention.select import AUTO, BACKENDS, preferred_backend, select
from hf_efficient_attn.backends import flex, reference, sdpa
from hf_efficient_attn.backends.blocked import backend as blocked
from hf_efficient_attn.errors import InputError
from hf_efficient_attn.layout.block_table import block_table
from hf_efficient_attn.layout.compile import compile_layout
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.layout.request import Request
from hf_efficient_attn.messages import shown
from hf_efficient_attn.patterns.checks import check_length
from hf_efficient_attn.patterns.pattern import Pattern

CPU = torch.device("cpu")
MEBIBYTE = 2**20
PATTERN_LETTERS = 100
# scores twice, where the softmax is kept beside them, and a mask
REFERENCE_BYTES_PER_SCORE = 9


@dataclass(frozen=True)
class Explanation:
    """How one call of attention would be computed; printed, it is a small table.

    Attributes:
        request: the call.
        backend: the name of the backend that computes it.
        reasons: every other backend → one sentence that says why it cannot, or why it was not taken.
        allowed_pairs: pairs (query, key) that the pattern allows, in all heads of one example.
        computed_pairs: scores that the backend computes for them, allowed or not.
        total_pairs: all pairs of queries and keys, in all heads.
        relative_cost: estimated time over that of dense attention without a mask.
        memory_bytes: estimated memory at the highest, of one example, beyond its inputs.
    """

    request: Request
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
        """Return what "auto" takes where more is installed than here, if it is something else."""
        device, missing = self.request.device, flex.missing_compiler(self.request)
        if device == "cpu" or missing is None or self.backend == flex.NAME:
            return ""
        return f" (on {device}, auto takes flex where {missing} is installed; here it is not)"

    def __str__(self) -> str:
        layout = self.request.layout
        rows = {
            "pattern": shorten(str(layout.pattern), PATTERN_LETTERS, placeholder=" …"),
            "call": f"{layout.num_heads} heads, {layout.num_queries:,} queries, {layout.num_keys:,} keys, "
            f"{str(self.request.dtype).removeprefix('torch.')} on {self.request.device}"
            f"{', with gradients' if self.request.needs_grad else ''}",
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
) -> Explanation:
    """Return which backend would compute a call of `attention` with this pattern, why, and what it would cost.

    Nothing is computed and no such device need be there. Costs are estimates; `hf-efficient-attn bench attention`
    measures.

    >>> from hf_efficient_attn.patterns.bands import Band
    >>> explanation = explain(Band(256, 256))
    >>> explanation.backend, f"{explanation.density:.1%}"
    ('blocked', '6.2%')

    Args:
        query_tokens, key_tokens: length of the queries and of the keys; the queries are the last positions. None: as
            many keys as queries.
        num_key_heads: None: as many as `num_heads`.
        training: gradients are asked for.
        dropout, backend, layer: as for `attention`.

    Raises:
        InputError, ConfigurationError: lengths or heads that the pattern cannot have.
        UnsupportedBackendError: `backend` cannot compute the call.
    """
    num_keys = query_tokens if key_tokens is None else key_tokens
    check_numbers(pattern, None, dropout, None, layer)
    num_key_heads = num_heads if num_key_heads is None else num_key_heads
    sizes = {"query_tokens": query_tokens, "key_tokens": num_keys, "num_heads": num_heads, "head_dim": head_dim}
    for name, count in {**sizes, "num_key_heads": num_key_heads}.items():
        check_length(name, count)
    if num_heads % num_key_heads:
        raise InputError(f"num_key_heads={num_key_heads} does not divide num_heads={num_heads}.")
    request = Request(
        layout=Layout(pattern, num_heads, query_tokens, num_keys, num_keys - query_tokens, layer),
        device=_device_type(device),
        dtype=dtype,
        head_dim=head_dim,
        value_dim=head_dim,
        num_key_heads=num_key_heads,
        batch_size=1,
        needs_grad=training,
        dropout=dropout,
    )
    wanted = preferred_backend() if backend == AUTO else backend
    chosen: str = select(request, wanted).NAME
    total = num_heads * query_tokens * num_keys
    computed = computed_pairs(request, chosen)
    return Explanation(
        request=request,
        backend=chosen,
        reasons={name: _reason(request, name, wanted, total) for name in sorted(BACKENDS) if name != chosen},
        allowed_pairs=allowed_pairs(request.layout),
        computed_pairs=computed,
        total_pairs=total,
        relative_cost=(blocked_cost(request.layout).time if chosen == blocked.NAME else computed) / total,
        memory_bytes=_memory(request, chosen),
    )


def _device_type(device: str | torch.device) -> str:
    try:
        return torch.device(device).type
    except RuntimeError as error:
        raise InputError(f"device={shown(device)} is none that torch knows; use 'cpu' or 'cuda'.") from error


def allowed_pairs(layout: Layout) -> int:
    """Return how many pairs a layout allows, in all heads.

    >>> from hf_efficient_attn.patterns.bands import Causal
    >>> allowed_pairs(Layout(Causal(), num_heads=2, num_queries=3, num_keys=3))
    12
    """
    if blocked_cost(layout).refusal is None:
        return compile_layout(layout, ESTIMATE_BLOCK_TOKENS, CPU).num_allowed
    place = (layout.num_queries, layout.num_keys, layout.query_offset)
    return sum(count * pattern.num_pairs(*place) for _, count, pattern in layout.head_groups())


def computed_pairs(request: Request, backend: str) -> int:
    """Return how many scores a backend computes for one example, allowed or not, in all heads."""
    layout = request.layout
    if backend == blocked.NAME:
        return compile_layout(layout, ESTIMATE_BLOCK_TOKENS, CPU).num_pairs
    if backend == flex.NAME:
        block_size = flex.BLOCK_SIZES[request.device]
        table = block_table(layout, None, block_size, CPU)
        num_blocks = int(table.num_partial.sum() + table.num_full.sum())
        # one table may stand for all heads
        heads = layout.num_heads // table.num_full.shape[1]
        scores = num_blocks * heads * block_size[0] * block_size[1]
        return min(scores, layout.num_heads * layout.num_queries * layout.num_keys)
    return layout.num_heads * layout.num_queries * layout.num_keys


def _reason(request: Request, name: str, wanted: str, total: int) -> str:
    """Return one sentence that says why a backend does not compute a request."""
    cannot: str | None = BACKENDS[name].why_not(request)
    if cannot is not None:
        return cannot
    if wanted != AUTO:
        return f"{wanted} was asked for."
    if name == blocked.NAME and request.device != "cpu":
        return f"blocked is taken on {request.device} only for what flex cannot compute."
    costs = blocked_cost(request.layout)
    if name == blocked.NAME and costs.refusal is not None:
        return costs.refusal
    if name == sdpa.NAME and not is_dense_light(request):
        needed = f"{sdpa.num_pair_bytes(request) / MEBIBYTE:,.0f} MiB"
        return f"sdpa would take {needed} for masks and scores of all pairs; ask for it by its name if you have them."
    cost = f"{costs.time / total:.3f}"
    return {
        blocked.NAME: f"blocked is estimated at {cost} times the time of dense attention, the better one here.",
        flex.NAME: "flex compiles a kernel for seconds at its first call; on cpu it is taken only when asked for.",
        reference.NAME: "reference keeps all scores in memory; the other backends are checked against it.",
        sdpa.NAME: f"sdpa computes all pairs; blocked is estimated at {cost} times its time.",
    }[name]


def _memory(request: Request, backend: str) -> int:
    """Return the estimated bytes of the output, of gradients, and of what the backend keeps beside them."""
    layout, width = request.layout, request.dtype.itemsize
    rows, pairs = layout.num_heads * layout.num_queries, layout.num_queries * layout.num_keys
    total = rows * (request.value_dim * width + 4)
    if request.needs_grad:
        keys = request.num_key_heads * layout.num_keys
        total += width * (rows * (request.head_dim + request.value_dim) + keys * (request.head_dim + request.value_dim))
    if backend == sdpa.NAME:
        total += sdpa.num_pair_bytes(request)
    elif backend == reference.NAME:
        total += REFERENCE_BYTES_PER_SCORE * pairs * layout.num_heads
    elif backend == blocked.NAME:
        total += blocked_cost(layout).num_mask_bytes
    return total
