"""How a call of attention would be computed, without computing it: the backend and why, the pairs, the cost."""

from collections.abc import Mapping
from dataclasses import replace
from math import isfinite
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_efficient_attn.attention.checks import check_dtype, check_numbers
from hf_efficient_attn.attention.explanation import Explanation
from hf_efficient_attn.attention.layer_patterns import LayerPattern, is_by_part
from hf_efficient_attn.attention.layer_request import LayerRequest
from hf_efficient_attn.attention.model_parts import ENCODER
from hf_efficient_attn.attention.model_requests import layer_request
from hf_efficient_attn.attention.select import AUTO, BACKENDS, preferred_backend, select
from hf_efficient_attn.attention.sharded.layer_exchange import LayerExchange, layer_exchange
from hf_efficient_attn.attention.sharded.sequence_shards import shards_of
from hf_efficient_attn.backends import sdpa
from hf_efficient_attn.backends.protocol import Backend
from hf_efficient_attn.errors import ConfigurationError, InputError, WorkLimitError
from hf_efficient_attn.layout.blocks.compile import compile_layout
from hf_efficient_attn.layout.cache import cached
from hf_efficient_attn.layout.call import AttentionCall, Inputs
from hf_efficient_attn.layout.layout import Layout, drawn_layer
from hf_efficient_attn.layout.terms import Term
from hf_efficient_attn.messages import shown
from hf_efficient_attn.patterns.checks import check_length
from hf_efficient_attn.patterns.expressions import parse_pattern
from hf_efficient_attn.patterns.layers import patterns_per_layer
from hf_efficient_attn.patterns.pattern import Pattern

CPU = torch.device("cpu")
COUNT_BLOCK_TOKENS = 32
NUM_HEADS, HEAD_DIM = 8, 64
UNCAPPED = "The layer caps its scores (softcap), which the kernels of dense attention cannot; its cost is without caps."
BASELINES = {True: "dense causal attention", False: "dense attention"}


def explain(
    what: Any,
    query_tokens: int = 8192,
    key_tokens: int | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    num_heads: int | None = None,
    num_key_heads: int | None = None,
    head_dim: int | None = None,
    training: bool = False,
    dropout: float = 0.0,
    backend: str = AUTO,
    layer: int = 0,
    cross: bool = False,
    part: str | None = None,
    sequence_ranks: int | None = None,
) -> Explanation:
    """Return which backend would compute a call of attention, why, and what it would cost.

    Nothing is computed, and the device need not exist here. Costs are estimates, over those of dense attention, which
    is causal where the layer, or else the pattern, is causal; `hf-efficient-attn bench attention` measures them.

    >>> from hf_efficient_attn.patterns.bands import Band
    >>> explanation = explain(Band(256, 256))
    >>> explanation.backend, f"{explanation.density:.1%}", explanation.baseline
    ('blocked', '6.2%', 'dense attention')

    A model or config is asked for its heads, its pattern, and whether it is causal, as attn_implementation="efficient"
    would compute it; without an `attention_pattern` its own attention is explained:

    >>> import transformers
    >>> explanation = explain(transformers.LlamaConfig(num_hidden_layers=2), 1024)
    >>> explanation.call.layout.pattern, explanation.call.layout.num_heads, explanation.baseline
    (Causal(), 32, 'dense causal attention')

    Of processes that share a text (`shard_sequence`), it says how many bytes each sends to others in the layer:

    >>> print(explain(Band(1023, 0), 131072, num_heads=16, num_key_heads=4, sequence_ranks=8).exchange)
    halo among 8 processes: each sends at most 2.00 MiB forward and 2.00 MiB backward (with all keys at all processes: \
224.00 MiB each way)

    Args:
        what: a pattern; an expression such as "band(256, 256) | global(0)"; another form of `attention_pattern` (see
            `sparsify`); or a model or config of transformers.
        query_tokens, key_tokens: length of the queries and of the keys; the queries are the last positions. None: as
            many keys as queries.
        device, dtype: of the inputs; None: those of the model, or "cpu" and float32.
        num_heads, num_key_heads, head_dim: for patterns, 8 heads of width 64 by default, and as many key heads as
            heads; a model knows them.
        training: whether gradients are needed.
        dropout, backend, cross: as for `attention`; a model's own dropout is not looked up.
        layer: index of the layer, if layers differ.
        part: "encoder" (the default) or "decoder", for encoder-decoders.
        sequence_ranks: how many processes share the text; None: as many as `shard_sequence` was told, or one.

    Raises:
        InputError, ConfigurationError: lengths, heads, or a layer that the pattern or model cannot have.
        UnsupportedBackendError: `backend` cannot compute the call, or nothing is known about the model's attention.
    """
    num_keys = query_tokens if key_tokens is None else key_tokens
    for name, count in {"query_tokens": query_tokens, "key_tokens": num_keys}.items():
        check_length(name, count)
    heads = {"num_heads": num_heads, "num_key_heads": num_key_heads, "head_dim": head_dim}
    line = None
    if isinstance(what, PreTrainedModel | PreTrainedConfig):
        _refuse_given(what, {**heads, "cross": cross or None})
        device, dtype = _place_of(what, device, dtype)
        request, line = layer_request(what, layer, part, num_keys)
    elif isinstance(what, nn.Module):
        raise ConfigurationError(
            f"explain takes models of transformers, not {type(what).__name__}. Give the model itself where another "
            "library wraps it (model.module, model.get_base_model())."
        )
    else:
        request = _asked(spec_pattern(what, layer, part), layer, cross, heads)
    check_numbers(request.followed.pattern, None, dropout, None, request.followed.layer)
    dtype = torch.float32 if dtype is None else dtype
    check_dtype(dtype)
    call = requested_call(request, query_tokens, num_keys, _device_type(device or CPU), dtype, training, dropout)
    said = explained(call, request, request.backend if backend == AUTO else backend, line)
    return replace(said, exchange=_exchange(what, call, request, sequence_ranks))


def _exchange(what: Any, call: AttentionCall, asked: LayerRequest, ranks: int | None) -> LayerExchange | None:
    """Return what processes send that share the text; None: one has all of it."""
    shards = shards_of(what) if isinstance(what, nn.Module) else None
    if ranks is not None:
        check_length("sequence_ranks", ranks)
    elif shards is not None:
        ranks = shards.size
    if ranks is None or ranks == 1:
        return None
    return layer_exchange(call, asked.has_bias, ranks, AUTO if shards is None else shards.mode)


def _refuse_given(what: Any, given: Mapping[str, Any]) -> None:
    """Raise InputError for arguments about what a model knows itself."""
    name = next((name for name, value in given.items() if value is not None), None)
    if name is not None:
        raise InputError(
            f"{name}={shown(given[name])} is given with a {type(what).__name__}, which says itself what it computes. "
            f"Leave {name} out, or explain a pattern."
        )


def _place_of(what: Any, device: Any, dtype: torch.dtype | None) -> tuple[Any, torch.dtype | None]:
    """Return device and dtype, those of a model or config if they are not given."""
    own = getattr(what, "device", None)
    # parameters that are not loaded yet have no device
    own = None if own is None or own.type == "meta" else own
    return device or own, dtype or what.dtype


def spec_pattern(spec: Any, layer: int = 0, part: str | None = None) -> Pattern:
    """Return the pattern of a layer by an expression or any form of `attention_pattern`.

    Raises:
        ConfigurationError: another form, or the layer has no pattern.
    """
    if isinstance(spec, str):
        return parse_pattern(spec)
    if is_by_part(spec):
        spec = spec.get(part or ENCODER)
    patterns = patterns_per_layer(spec, len(spec) if isinstance(spec, list | tuple) else layer + 1)
    pattern = patterns[layer] if layer < len(patterns) else None
    if pattern is None:
        raise ConfigurationError(f"Layer {layer} has no pattern; layers are counted from 0 to {len(patterns) - 1}.")
    return pattern


def _asked(pattern: Pattern, layer: int, cross: bool, heads: Mapping[str, int | None]) -> LayerRequest:
    num_heads = NUM_HEADS if heads["num_heads"] is None else heads["num_heads"]
    num_key_heads = num_heads if heads["num_key_heads"] is None else heads["num_key_heads"]
    head_dim = HEAD_DIM if heads["head_dim"] is None else heads["head_dim"]
    for name, count in {"num_heads": num_heads, "head_dim": head_dim, "num_key_heads": num_key_heads}.items():
        check_length(name, count)
    if num_heads % num_key_heads:
        raise InputError(f"num_key_heads={num_key_heads} does not divide num_heads={num_heads}.")
    followed = LayerPattern(pattern, layer, is_own=False, is_cross=cross)
    is_causal = pattern.is_causal and not cross
    return LayerRequest(followed, num_heads, num_key_heads, head_dim, head_dim, None, is_causal=is_causal)


def requested_call(
    asked: LayerRequest,
    num_queries: int,
    num_keys: int,
    device: str,
    dtype: torch.dtype,
    training: bool,
    dropout: float,
) -> AttentionCall:
    """Return the call that a layer makes, without tensors."""
    followed = asked.followed
    offset = 0 if followed.is_cross else num_keys - num_queries
    lengths, layer = (num_queries, num_keys, offset), drawn_layer(followed.pattern, followed.layer)
    sizes = (asked.head_dim, asked.value_dim, asked.num_key_heads, 1)
    return AttentionCall(
        layout=Layout(followed.pattern, asked.num_heads, *lengths, layer, is_cross=followed.is_cross),
        inputs=Inputs(device, dtype, *sizes, needs_grad=training),
        terms=tuple(Term(torch.empty(1, 1, 1, each.num_values, device="meta"), each) for each in asked.labels),
        sinks=torch.empty(asked.num_heads, device="meta") if asked.has_sinks else None,
        softcap=asked.softcap,
        dropout=dropout,
    )


def explained(call: AttentionCall, asked: LayerRequest, wanted: str, line: str | None) -> Explanation:
    """Return what is said about a call; `wanted`: a backend, or "auto"; `line`: which layer of which model it is."""
    wanted = preferred_backend() if wanted == AUTO else wanted
    wanted = sdpa.NAME if asked.has_bias else wanted
    chosen, baseline = select(call, wanted), sdpa.dense_cost(call, asked.is_causal)
    computed, cost = chosen.computed_pairs(call), chosen.cost(call)
    said = Explanation(
        call=call,
        backend=chosen.NAME,
        reasons={name: _reason(call, name, wanted, baseline) for name in sorted(BACKENDS) if name != chosen.NAME},
        allowed_pairs=allowed_pairs(call.layout),
        computed_pairs=computed,
        total_pairs=call.layout.num_pairs,
        baseline=BASELINES[asked.is_causal],
        relative_cost=(cost if isfinite(cost) else computed) / baseline,
        memory_bytes=_memory(call, chosen),
        model=line,
        notes=asked.notes if call.softcap is None else (*asked.notes, UNCAPPED),
    )
    return _with_bias(said) if asked.has_bias else said


def _with_bias(said: Explanation) -> Explanation:
    """Return the explanation of a layer that adds a matrix to its scores, as it would without a pattern."""
    reason = "the layer adds a matrix to its scores (position_bias), which takes all pairs, whatever the pattern."
    return replace(
        said,
        reasons=dict.fromkeys(said.reasons, reason),
        computed_pairs=said.total_pairs,
        relative_cost=1.0,
        memory_bytes=said.memory_bytes + said.total_pairs * said.call.inputs.dtype.itemsize,
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


def _reason(call: AttentionCall, name: str, wanted: str, baseline: float) -> str:
    """Return one sentence on why a backend does not compute a call."""
    cannot = BACKENDS[name].why_not(call)
    if cannot is not None:
        return cannot
    if wanted != AUTO:
        return f"{wanted} was asked for."
    remark, cost = BACKENDS[name].remark(call), BACKENDS[name].cost(call)
    # costs were not compared where one is known to be the fastest
    is_compared = isfinite(cost) and not any(each.is_fastest(call) for each in BACKENDS.values())
    return f"{remark.removesuffix('.')}; its cost would be {cost / baseline:.3f}." if is_compared else remark


def _memory(call: AttentionCall, backend: Backend) -> int:
    """Return the estimated bytes of the output, of gradients, and of what the backend needs besides them."""
    layout, inputs = call.layout, call.inputs
    rows, width = layout.num_heads * layout.num_queries, inputs.dtype.itemsize
    total = rows * (inputs.value_dim * width + 4)
    if inputs.needs_grad:
        total += width * (rows + inputs.num_key_heads * layout.num_keys) * (inputs.head_dim + inputs.value_dim)
    return total + backend.working_bytes(call)
