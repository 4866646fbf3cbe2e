"""The attention call that a layer would make, and its explanation: the backend and why, the pairs, the cost."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import isfinite

import torch
from torch import Tensor

from hf_efficient_attn.attention.build_call import planned_selected_keys
from hf_efficient_attn.attention.explanation import Explanation, LayerRequest
from hf_efficient_attn.attention.select import AUTO, BACKENDS, preferred_backend, select
from hf_efficient_attn.backends import sdpa
from hf_efficient_attn.backends.machine_costs import is_there, machine_of
from hf_efficient_attn.backends.protocol import Backend
from hf_efficient_attn.errors import InputError, WorkLimitError
from hf_efficient_attn.layout.cache import cached
from hf_efficient_attn.layout.call import AttentionCall, Inputs
from hf_efficient_attn.layout.compile import compile_layout
from hf_efficient_attn.layout.dense_mask import allowed_pairs as dense_pairs
from hf_efficient_attn.layout.dense_mask import selected_pairs
from hf_efficient_attn.layout.layout import Layout, drawn_layer
from hf_efficient_attn.layout.listed_keys import ChosenTokens
from hf_efficient_attn.layout.score_terms import Label, Term
from hf_efficient_attn.layout.selected_keys import ChosenKeys, States
from hf_efficient_attn.layout.token_mask import NO_MASK

CPU = torch.device("cpu")
# the maximum number of pairs among which selected ones are counted
MOST_COUNTED = 1 << 30
UNCONFIRMED = "Costs on {device} are estimates that no measurement has confirmed: they may be far off."
IN_FLOAT32 = (
    "GPUs are slow in float32, and flash does not support it. For bfloat16, give dtype=torch.bfloat16 (--dtype)."
)
ASSUMED = "There is no GPU here. The estimate assumes one, with triton and flash-attn-4 installed."
UNCAPPED = "The layer caps its scores (softcap). Kernels of dense attention cannot, so the baseline has no caps."
WITHOUT_SINKS = "The layer has attention sinks. torch's kernels of dense attention have none, so the baseline has none."
BASELINES = {True: "dense causal attention", False: "dense attention"}


def requested_call(
    request: LayerRequest,
    num_queries: int,
    num_keys: int,
    device: str,
    dtype: torch.dtype,
    training: bool,
    dropout: float,
    backend: str = AUTO,
) -> AttentionCall:
    """Return the call that a layer makes, without tensors."""
    layer_spec = request.layer_spec
    offset = 0 if layer_spec.is_cross else num_keys - num_queries
    lengths, layer = (num_queries, num_keys, offset), drawn_layer(layer_spec.pattern, layer_spec.layer)
    sizes = (request.head_dim, request.value_dim, request.num_key_heads, 1)
    pattern, chosen = planned_selected_keys(
        layer_spec.pattern, request.num_heads, num_queries, num_keys, request.backend if backend == AUTO else backend
    )
    if request.chosen is not None:
        chosen = request.chosen
    elif request.most_keys is not None and num_keys > request.most_keys:
        # the choice of an indexer is the same for all heads
        chosen = ChosenTokens(torch.empty(1, 1, num_queries, request.most_keys, dtype=torch.int32, device="meta"))
    return AttentionCall(
        layout=Layout(pattern, request.num_heads, *lengths, layer, is_cross=layer_spec.is_cross),
        inputs=Inputs(device, dtype, *sizes, needs_grad=training),
        terms=(*terms_of(request.labels, num_queries), *terms_of(request.fixed_labels)),
        sinks=torch.empty(request.num_heads, device="meta") if request.has_sinks else None,
        softcap=request.softcap,
        dropout=dropout,
        chosen=chosen,
    )


def terms_of(labels: Iterable[Label], num_queries: int = 1) -> tuple[Term, ...]:
    """Return terms with these labels and values without contents; by default, all queries share the same values."""
    return tuple(Term(torch.empty(1, 1, num_queries, each.num_values, device="meta"), each) for each in labels)


def with_chosen(call: AttentionCall, chosen: ChosenKeys) -> AttentionCall:
    """Return the call with chosen keys.

    Raises:
        InputError: the chosen keys do not fit the call.
    """
    layout, inputs = call.layout, call.inputs
    # any device is allowed here
    found = [each for each in chosen.tensors if isinstance(each, Tensor)]
    device = found[0].device if found else CPU
    batch_size = max((each.shape[0] for each in found if each.ndim), default=1)
    sizes = (layout.num_heads, inputs.num_key_heads, layout.num_queries, layout.num_keys)
    chosen.check(States(batch_size, *sizes, device, layout.is_cross))
    return replace(call, chosen=chosen)


def explained(call: AttentionCall, request: LayerRequest, wanted: str, line: str | None = None) -> Explanation:
    """Return the explanation of a call; `wanted`: a backend, or "auto"; `line`: which layer of which model it is."""
    selected_backend = select(call, _wanted(request, wanted))
    time, baseline = _own_times(call, request, selected_backend)
    explanation = Explanation(
        pattern=request.layer_spec.pattern,
        call=call,
        backend=selected_backend.NAME,
        reasons={
            name: _reason(
                call, name, _wanted(request, wanted), selected_backend, (baseline, BASELINES[request.is_causal])
            )
            for name in sorted(BACKENDS)
            if name != selected_backend.NAME
        },
        allowed_pairs=requested_pairs(call, request),
        computed_pairs=selected_backend.computed_pairs(call),
        total_pairs=call.layout.num_pairs,
        baseline=BASELINES[request.is_causal],
        relative_cost=time / baseline,
        memory_bytes=_memory(call, selected_backend),
        costs_of=str(machine_of(call.inputs.device)),
        model=line,
        notes=(*request.notes, *_notes(call)),
    )
    explanation = _with_bias(explanation) if request.has_bias else explanation
    if request.beside is None:
        return explanation
    layout, inputs = call.layout, call.inputs
    sizes = (layout.num_queries, layout.num_keys, inputs.device, inputs.dtype, inputs.needs_grad, call.dropout)
    return with_beside(explanation, explained(requested_call(request.beside, *sizes), request.beside, wanted))


def _notes(call: AttentionCall) -> list[str]:
    """Return what the estimated cost of a call leaves out."""
    notes = [] if call.softcap is None else [UNCAPPED]
    notes += [] if call.sinks is None else [WITHOUT_SINKS]
    device = call.inputs.device
    if device.startswith("cuda") and call.inputs.dtype == torch.float32:
        notes.append(IN_FLOAT32)
    if not is_there(device):
        notes.append(ASSUMED)
    is_measured = machine_of(device).processor.device == device
    return notes if is_measured else [*notes, UNCONFIRMED.format(device=device)]


def _own_times(call: AttentionCall, request: LayerRequest, selected_backend: Backend) -> tuple[float, float]:
    """Return the estimated times of a call and of its baseline, in scores of dense attention."""
    baseline = sdpa.dense_cost(call, request.is_causal)
    if request.has_bias:
        return baseline, baseline
    cost = selected_backend.cost(call)
    return cost if isfinite(cost) else float(selected_backend.computed_pairs(call)), baseline


def with_beside(explanation: Explanation, beside: Explanation) -> Explanation:
    """Return the explanation of all heads of a layer from those of its first heads and its other heads."""
    return replace(
        explanation,
        allowed_pairs=explanation.allowed_pairs + beside.allowed_pairs,
        computed_pairs=explanation.computed_pairs + beside.computed_pairs,
        total_pairs=explanation.total_pairs + beside.total_pairs,
        memory_bytes=explanation.memory_bytes + beside.memory_bytes,
        relative_cost=joined_cost([explanation, beside]),
        beside=beside,
    )


def joined_cost(parts: Sequence[Explanation]) -> float:
    """Return the estimated time of several calls together, divided by that of their baselines."""
    baselines = [baseline_time(each) for each in parts]
    return sum(each.relative_cost * time for each, time in zip(parts, baselines, strict=True)) / sum(baselines)


def baseline_time(explanation: Explanation) -> float:
    """Return the estimated time of what would be computed without the pattern, in scores of dense attention."""
    beside = 0.0 if explanation.beside is None else baseline_time(explanation.beside)
    return sdpa.dense_cost(explanation.call, explanation.baseline == BASELINES[True]) + beside


def _wanted(request: LayerRequest, wanted: str) -> str:
    if request.has_bias:
        return sdpa.NAME
    wanted = request.backend if wanted == AUTO else wanted
    return preferred_backend() if wanted == AUTO else wanted


def _with_bias(explanation: Explanation) -> Explanation:
    """Return the explanation of a layer that computes all pairs because it adds a matrix to its scores."""
    reason = "the layer adds a matrix to its scores (position_bias), so all pairs are computed, whatever the pattern."
    return replace(
        explanation,
        reasons=dict.fromkeys(explanation.reasons, reason),
        computed_pairs=explanation.total_pairs,
        memory_bytes=explanation.memory_bytes + explanation.total_pairs * explanation.call.inputs.dtype.itemsize,
    )


def requested_pairs(call: AttentionCall, request: LayerRequest) -> int:
    """Return how many pairs are selected and allowed in all heads, also for a pattern that chooses by content."""
    pattern = request.layer_spec.pattern
    if pattern.chooses_by_content:
        return call.layout.num_heads * pattern.num_pairs(*call.layout.extent)
    if call.chosen is not None and request.most_keys is not None:
        by_query = most_pairs(call.layout, request.most_keys, call.chosen.attends_to_self_last)
        return min(by_query, call.chosen.most_pairs(call.layout, call.inputs.num_key_heads))
    return allowed_pairs(call.layout) if call.chosen is None else selected_pairs_of(call, call.chosen)


@cached()
def most_pairs(layout: Layout, most_keys: int, attends_to_self_last: bool) -> int:
    """Return how many pairs a layout allows in all heads if each query attends to at most `most_keys` keys.

    >>> from hf_efficient_attn.patterns.bands import Causal
    >>> most_pairs(Layout(Causal(), num_heads=2, num_queries=5, num_keys=5), 3, attends_to_self_last=False)
    24
    """
    queries = range(layout.query_offset, layout.query_offset + layout.num_queries)
    counts = (layout.pattern.num_keys_of(query, layout.num_keys) for query in queries)
    if attends_to_self_last:
        counts = (max(1, count - 1) for count in counts)
    return layout.num_heads * sum(min(count, most_keys) for count in counts)


@cached()
def allowed_pairs(layout: Layout) -> int:
    """Return how many pairs a layout allows, in all heads.

    >>> from hf_efficient_attn.patterns.bands import Causal
    >>> allowed_pairs(Layout(Causal(), num_heads=2, num_queries=3, num_keys=3))
    12
    """
    try:
        return compile_layout(layout, machine_of(CPU.type).costs_in("float32").forward.blocks, CPU).num_allowed
    except WorkLimitError as refusal:
        try:
            return sum(count * pattern.num_pairs(*layout.extent) for _, count, pattern in layout.head_groups())
        except WorkLimitError:
            raise refusal from None


def selected_pairs_of(call: AttentionCall, chosen: ChosenKeys) -> int:
    """Return how many pairs are selected and allowed, in all heads; for tensors without contents, the maximum."""
    layout, num_key_heads = call.layout, call.inputs.num_key_heads
    if any(each is not None and each.is_meta for each in chosen.tensors):
        return min(allowed_pairs(layout), chosen.most_pairs(layout, num_key_heads))
    if layout.num_pairs > MOST_COUNTED:
        raise InputError(
            f"Counting the selected pairs looks at all {layout.num_pairs:,} pairs; at most {MOST_COUNTED:,} are "
            "counted. Give fewer queries or heads, or tensors on the device 'meta', which have only shapes."
        )
    device = next(each.device for each in chosen.tensors if each is not None)
    allowed = dense_pairs(layout, NO_MASK, 1, device)
    read, _ = selected_pairs(chosen, allowed, layout, NO_MASK, num_key_heads)
    return int(read.expand(-1, layout.num_heads, -1, -1)[0].sum())


def _reason(call: AttentionCall, name: str, wanted: str, selected_backend: Backend, baseline: tuple[float, str]) -> str:
    """Return one sentence on why a backend does not compute a call; `baseline`: its time and its name."""
    other = BACKENDS[name]
    cannot = other.why_not(call)
    if cannot is not None:
        return cannot
    if wanted != AUTO:
        return f"{wanted} was requested."
    remark, cost = other.remark(call), other.cost(call)
    if not isfinite(cost):
        return remark
    sentence = remark.removesuffix(".")
    # costs are not compared if one backend is known to be the fastest
    if selected_backend.is_fastest(call):
        share = other.computed_pairs(call) / max(1, selected_backend.computed_pairs(call))
        sentence = f"{sentence}, here {share:.0%} as many pairs as {selected_backend.NAME}"
        if cost < selected_backend.cost(call):
            return (
                f"{sentence}; {selected_backend.NAME} is the fastest without masks, and for a single query or very few "
                "pairs."
            )
    time, what = baseline
    return f"{sentence}; its cost would be {cost / time:.3f} × {what}."


def _memory(call: AttentionCall, backend: Backend) -> int:
    """Return the estimated bytes of the output, of gradients, and of what the backend needs besides them."""
    layout, inputs = call.layout, call.inputs
    rows, width = layout.num_heads * layout.num_queries, inputs.dtype.itemsize
    total = rows * (inputs.value_dim * width + 4)
    if inputs.needs_grad:
        total += width * (rows + inputs.num_key_heads * layout.num_keys) * (inputs.head_dim + inputs.value_dim)
    return total + backend.working_bytes(call)
