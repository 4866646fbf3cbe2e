"""`explain`: which backend would compute a call, a layer or a model, why, and at what cost, without computing it."""

import copy
import sys
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_efficient_attn.attention.build_call import LayerPattern, check_dtype, check_numbers, refuse_unknown
from hf_efficient_attn.attention.explain_call import BASELINES, baseline_time, explained, requested_call, with_chosen
from hf_efficient_attn.attention.explanation import AllLayers, Explanation, LayerRequest, shown_pattern
from hf_efficient_attn.attention.select import AUTO
from hf_efficient_attn.attention.sharded.layer import LayerExchange, layer_exchange
from hf_efficient_attn.attention.sharded.shards import SequenceShards, shards_of, why_whole
from hf_efficient_attn.backends.machine_costs import KNOWN_GPUS, known_gpu, on_machine
from hf_efficient_attn.errors import ConfigurationError, EfficientAttentionError, InputError, UnsupportedBackendError
from hf_efficient_attn.integration.indexer import DENSE, WARMUP
from hf_efficient_attn.integration.layer_patterns import ENCODER, NAME, PARTS, is_by_part
from hf_efficient_attn.integration.model_info import check_class
from hf_efficient_attn.integration.names import INDEXER
from hf_efficient_attn.integration.saving import stock_name
from hf_efficient_attn.integration.trial import base_class, trial_requests
from hf_efficient_attn.layout.call import AttentionCall
from hf_efficient_attn.layout.selected_keys import ChosenKeys
from hf_efficient_attn.messages import shown
from hf_efficient_attn.patterns.algebra import PerHead, Union
from hf_efficient_attn.patterns.bands import Band, Causal, Full
from hf_efficient_attn.patterns.config_spec import patterns_per_layer
from hf_efficient_attn.patterns.pattern import Pattern
from hf_efficient_attn.patterns.serialization import check_length

# What the layers of a model or config request from the engine, found without computing anything.


def layer_request(
    model_or_config: PreTrainedModel | PreTrainedConfig, layer: int | None, part: str | None, num_keys: int
) -> tuple[LayerRequest, str, dict[int, LayerRequest]]:
    """Return the request of a self-attention layer, a line that names it, and the requests of all layers of the part.

    Args:
        layer: the index of the layer in its part; in a composite model (vision and language), in the text part. None:
            the first layer that is not dense, or else the first layer.
        part: "encoder" (the default) or "decoder", for an encoder-decoder.
        num_keys: the length of the text in tokens, on which the attention of some models depends.

    Raises:
        ConfigurationError: there is no such part or layer.
        UnsupportedBackendError: the model does not use the attention interface of transformers, or no trial of it can
            be run.
    """
    name, config, numbered = numbered_requests(model_or_config, part, num_keys, layer, are_all_needed=False)
    if layer is None:
        layer = next(
            (i for i, each in numbered.items() if each.layer_spec.pattern not in DENSE_PATTERNS), min(numbered)
        )
    if layer not in numbered:
        of_part = f" of its {part or ENCODER}" if config.get_text_config().is_encoder_decoder else ""
        raise ConfigurationError(
            f"layer={shown(layer)} of {name} has no attention; the layers{of_part} with attention are "
            f"{shown(sorted(numbered))}."
        )
    request = numbered[layer]
    line = _line(name, config, request, layer, len(numbered))
    notes = (*request.notes, *_others(numbered, layer), *_beyond(config, num_keys), *_runs(model_or_config, request))
    return replace(request, notes=notes), line, numbered


def numbered_requests(
    model_or_config: PreTrainedModel | PreTrainedConfig,
    part: str | None,
    num_keys: int,
    layer: int | None = None,
    are_all_needed: bool = True,
) -> tuple[str, PreTrainedConfig, dict[int, LayerRequest]]:
    """Return the name of a model, its config, and the request of every self-attention layer of a part, by its index.

    Arguments and errors are those of `layer_request`. If `are_all_needed` is False, layers other than `layer` may be
    missing.
    """
    config = model_or_config if isinstance(model_or_config, PreTrainedConfig) else model_or_config.config
    text_config = config.get_text_config()
    if text_config is not config and config.is_encoder_decoder:
        raise ConfigurationError(
            f"{type(config).__name__} combines two models, each with its own config. Explain model.encoder or "
            "model.decoder."
        )
    part = _checked_part(part, text_config)
    model_class = saved_class(config) if model_or_config is config else type(model_or_config)
    name = type(config).__name__ if model_class is None else model_class.__name__
    requests = (
        [] if model_class is None else _requests(model_or_config, model_class, config, num_keys, layer, are_all_needed)
    )
    requests = [each for each in requests if not each.is_cross and type(each.config) is type(text_config)]
    if not requests:
        raise UnsupportedBackendError(
            f"The attention of {name} is unknown: no trial run of it is possible, or it does not use the attention "
            "interface of transformers. Explain its pattern instead, with num_heads and head_dim."
        )
    if text_config.is_encoder_decoder:
        requests = [each for each in requests if each.part == part]
    # if a module does not know its index, the order of the requests gives it
    are_counted = any(each.layer is None for each in requests)
    return name, config, {index if are_counted else each.layer: each for index, each in enumerate(requests)}  # type: ignore[misc]


def saved_class(config: PreTrainedConfig) -> Any:
    """Return the class of the model that was saved with a config, or else the base class; None: neither is known."""
    base = base_class(config)
    name = next(iter(getattr(config, "architectures", None) or ()), None)
    return base if base is None or name is None else getattr(sys.modules[base.__module__], stock_name(name), base)


def _checked_part(part: str | None, config: Any) -> str:
    if part is not None and not (part in PARTS and config.is_encoder_decoder):
        raise ConfigurationError(
            f"part={shown(part)}; it must be {' or '.join(map(repr, sorted(PARTS)))}."
            if config.is_encoder_decoder
            else f"part={shown(part)} is only for encoder-decoders; {type(config).__name__} is not one. Leave part out."
        )
    return part or ENCODER


def _requests(
    model_or_config: Any,
    model_class: Any,
    config: PreTrainedConfig,
    num_keys: int,
    layer: int | None,
    are_all_needed: bool,
) -> list[LayerRequest]:
    model: Any = model_or_config
    if model is config:
        with torch.device("meta"):
            model = model_class(copy.deepcopy(config)).eval()
    # the layers of this package's families that do not call the attention interface have this method
    own: list[Any] = [module for module in model.modules() if hasattr(module, "layer_request")]
    text_config = config.get_text_config()
    field = getattr(text_config, INDEXER, None)
    if own:
        own_requests = _own_requests(own, num_keys, getattr(model, "task", None), layer, are_all_needed)
        return [with_indexer(each, field) for each in own_requests]
    check_class(model_class, config)
    requests = trial_requests(model_class, config) or []
    notes = getattr(text_config, "attention_notes", ())
    # trials run without indexers
    found = [with_indexer(each, field) for each in requests]
    return [replace(each, notes=(*each.notes, *notes)) for each in found]


def _own_requests(
    own: list[Any], num_keys: int, task: str | None, layer: int | None, are_all_needed: bool
) -> list[LayerRequest]:
    """Return the requests of modules, with a note about modules that have none.

    Raises:
        UnsupportedBackendError: module `layer` has no request, or all requests are needed and a module has none.
    """
    requests: list[LayerRequest] = []
    silent: dict[int, UnsupportedBackendError] = {}
    for module in own:
        try:
            requests.append(module.layer_request(num_keys, task))
        except UnsupportedBackendError as refusal:
            if are_all_needed or layer == module.layer_idx:
                raise
            silent[module.layer_idx] = refusal
    if not requests:
        raise next(iter(silent.values()))
    notes = (
        (f"The costs do not include {_layers(silent)}, whose attention the engine does not compute.",) if silent else ()
    )
    return [replace(each, notes=(*each.notes, *notes)) for each in requests]


def with_indexer(request: LayerRequest, field: dict[str, Any] | None) -> LayerRequest:
    """Return the request of a layer, changed by the indexer that the config describes (set by `index`).

    Args:
        field: the config field INDEXER; None: the model has no indexers.
    """
    if field is None or field["stage"] == DENSE:
        return request
    top_k = field["top_k"]
    what = f"An indexer with {field['num_heads']} heads of {field['head_dim']} dimensions"
    request = replace(request, sends_more=True)
    if field["stage"] == WARMUP:
        return replace(request, notes=(*request.notes, f"{what} learns which {top_k:,} keys to select."))
    note = f"{what} selects up to {top_k:,} keys for each query; the time for its scores is not included."
    return replace(request, most_keys=top_k, notes=(*request.notes, note))


def _others(numbered: Mapping[Any, LayerRequest], layer: int) -> tuple[str, ...]:
    """Return a note that says how many layers have this pattern and which have others; none if all have the same."""
    by_pattern: dict[Any, list[int]] = {}
    for number, each in numbered.items():
        by_pattern.setdefault(each.layer_spec.pattern, []).append(number)
    alike = by_pattern.pop(numbered[layer].layer_spec.pattern)
    if not by_pattern:
        return ()
    rest = [number for others in by_pattern.values() for number in others]
    what = shown_pattern(next(iter(by_pattern))) if len(by_pattern) == 1 else "other patterns"
    return (
        f"{len(alike)} of {len(numbered)} layers have this pattern ({numbers(alike)}). The others "
        f"({numbers(sorted(rest))}) have {what}; layer={min(rest)} (--layer {min(rest)}) explains the first of them.",
    )


def numbers(layers: Iterable[int]) -> str:
    """Return indices as text, with consecutive ones joined into ranges.

    >>> numbers([0, 1, 2, 5])
    '0–2, 5'
    """
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _layers(indices: Iterable[int]) -> str:
    listed = [*indices]
    return f"layer{'s' * (len(listed) > 1)} {numbers(listed)}"


def _beyond(config: PreTrainedConfig, num_keys: int) -> tuple[str, ...]:
    """Return a note if the config says that the model has fewer positions than the sequence has tokens."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(limit, int) or not 0 < limit < num_keys:
        return ()
    return (f"The model has {limit:,} positions, but the sequence has {num_keys:,} tokens.",)


def _runs(model_or_config: PreTrainedModel | PreTrainedConfig, request: LayerRequest) -> tuple[str, ...]:
    """Return a note if the layer has no pattern and the model runs an implementation other than "efficient"."""
    implementation = (
        model_or_config.config._attn_implementation if isinstance(model_or_config, PreTrainedModel) else None
    )
    if implementation in (None, NAME) or not request.layer_spec.is_own:
        return ()
    return (
        f"The model now uses attn_implementation={shown(implementation)}. The table describes what it computes after "
        f'model.set_attn_implementation("{NAME}").',
    )


def _line(name: str, config: PreTrainedConfig, request: LayerRequest, layer: int, num_layers: int) -> str:
    where = f"layer {layer} of {num_layers} with attention"
    if config.get_text_config().is_encoder_decoder:
        where = f"{request.part} {where}"
    follows = "its own attention" if request.layer_spec.is_own else "attention_pattern"
    return f"{name} ({config.model_type}), {where}, {'causal' if request.is_causal else 'bidirectional'}, {follows}"


# The total cost of all layers of a model, and one explanation for each kind of layer, for model cards.


def explain_layers(
    model_or_config: PreTrainedModel | PreTrainedConfig, tokens: int, part: str | None = None
) -> list[tuple[list[int], Explanation]]:
    """Return (layer indices, explanation on a CPU) for each group of layers of a part that compute the same.

    Raises:
        InputError, ConfigurationError, UnsupportedBackendError: as in `explain`.
    """
    _, _, numbered = numbered_requests(model_or_config, part, tokens, are_all_needed=False)
    found = []
    for request, layers in _groups(numbered.items()):
        call = requested_call(request, tokens, tokens, CPU.type, torch.float32, training=False, dropout=0.0)
        found.append((layers, explained(call, request, AUTO)))
    return found


def with_all_layers(explanation: Explanation, requests: Iterable[LayerRequest], backend: str) -> Explanation:
    """Return the explanation of a layer, extended by the cost of all layers for the same lengths and inputs."""
    groups = _groups(enumerate(requests))
    try:
        return replace(explanation, all_layers=_all_layers(explanation, groups, backend))
    except EfficientAttentionError as refusal:
        return replace(
            explanation, notes=(*explanation.notes, f"The cost of all layers cannot be estimated: {refusal}")
        )


def _all_layers(explanation: Explanation, groups: list[tuple[LayerRequest, list[int]]], backend: str) -> AllLayers:
    layout, inputs = explanation.call.layout, explanation.call.inputs
    sizes = (
        layout.num_queries,
        layout.num_keys,
        inputs.device,
        inputs.dtype,
        inputs.needs_grad,
        explanation.call.dropout,
    )
    total = total_baseline = 0.0
    for request, layers in groups:
        each = explained(requested_call(request, *sizes), request, backend)
        total += len(layers) * each.relative_cost * baseline_time(each)
        total_baseline += len(layers) * baseline_time(each)
    baselines = {BASELINES[request.is_causal] for request, _ in groups}
    name = baselines.pop() if len(baselines) == 1 else "dense attention, causal in causal layers"
    return AllLayers(sum(len(layers) for _, layers in groups), total / total_baseline, name)


def _groups(numbered: Iterable[tuple[int, LayerRequest]]) -> list[tuple[LayerRequest, list[int]]]:
    """Return the groups of layers that compute the same, each as the request of its first layer and all indices."""
    groups: list[tuple[LayerRequest, list[int]]] = []
    for layer, request in sorted(numbered, key=lambda each: each[0]):
        known = next((layers for first, layers in groups if first.alike == request.alike), None)
        if known is None:
            groups.append((request, [layer]))
        else:
            known.append(layer)
    return groups


CPU = torch.device("cpu")
NUM_HEADS, HEAD_DIM = 8, 64
SELF = Band(0, 0)
DENSE_PATTERNS = (Full(), Causal())
PARTLY_CAUSAL = (
    "Part of the pattern is causal, but the whole pattern is not, so the cost is relative to bidirectional dense "
    "attention. For a causal model, explain pattern.causal(), or use --causal on the command line."
)
SENDS_MORE = (
    "Processes that share a sequence exchange more in this layer than its pattern needs. The bytes are not estimated."
)


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
    layer: int | None = None,
    cross: bool = False,
    part: str | None = None,
    sequence_ranks: int | None = None,
    chosen: ChosenKeys | None = None,
    **unknown: NoReturn,
) -> Explanation:
    """Return which backend would compute attention with a pattern or model, at what cost, and why.

    `print` shows the result as a table. Nothing is computed, and the device need not exist on this machine. A cost is
    the estimated time divided by that of dense attention, or of dense causal attention if the layer or the pattern is
    causal. Estimates serve to compare backends. They are optimistic: on a CPU, `hf-efficient-attn bench attention`
    measured 1.0 to 2.8 times the estimate.

    >>> from hf_efficient_attn.patterns.bands import Band
    >>> explanation = explain(Band(256, 256))
    >>> explanation.backend, f"{explanation.density:.1%}", explanation.baseline
    ('blocked', '6.2%', 'dense attention')

    For a model or config, the call has the heads, pattern and direction of its layers, as
    attn_implementation="efficient" computes them, and `all_layers` is the cost of all layers together. If there is no
    `attention_pattern`, the model's own attention is explained:

    >>> import transformers
    >>> explanation = explain(transformers.LlamaConfig(num_hidden_layers=2), 1024)
    >>> explanation.pattern, explanation.call.layout.num_heads, explanation.baseline
    (Causal(), 32, 'dense causal attention')

    For processes that share a sequence (`shard_sequence`), `exchange` says how many bytes each process sends to others
    in the layer, in the order of ranks:

    >>> print(explain(Band(1023, 0), 131072, num_heads=16, num_key_heads=4, sequence_ranks=4).exchange)
    halo among 4 processes, which send forward 2.00 MiB, 2.00 MiB, 2.00 MiB, 0 bytes; backward 0 bytes, 2.00 MiB, \
2.00 MiB, 2.00 MiB (with all keys at all processes: 192.00 MiB each way)

    Args:
        what: a pattern; an expression such as "band(256, 256) | global(0)"; another form of `attention_pattern` (see
            `sparsify`); or a model or config of transformers.
        query_tokens, key_tokens: length of the queries and of the keys; the queries are the last positions. None: as
            many keys as queries.
        device, dtype: device and dtype of the inputs; None: those of the model, or "cpu" and float32, on a GPU
            bfloat16. The costs of "h100", "h200" and "a100" are known, or estimated from published figures.
        num_heads, num_key_heads, head_dim: only for patterns: number of query heads (default 8) and key heads (default
            `num_heads`), and size of a head (default 64). Models have their own.
        training: whether gradients are needed.
        dropout, backend, cross: as for `attention`; the model's own dropout is not used.
        layer: index of the layer. None: the first layer that is not dense, or the first layer if all are dense.
        part: "encoder" (the default) or "decoder", for encoder-decoders.
        sequence_ranks: how many processes share the sequence; None: the number that `shard_sequence` was given, or one.
        chosen: only for patterns: keys that are selected by content; see `attention`. If the tensors have contents, the
            pairs of the first example are counted, which takes memory for all pairs. If they are on the "meta" device,
            the number of pairs is an upper bound.

    Raises:
        InputError, ConfigurationError: lengths, heads, or a layer that the pattern or model cannot have; an unknown
            argument.
        UnsupportedBackendError: `backend` cannot compute the call, or nothing is known about the model's attention.
    """
    refuse_unknown(unknown, explain)
    num_keys = query_tokens if key_tokens is None else key_tokens
    for name, count in {"query_tokens": query_tokens, "key_tokens": num_keys}.items():
        check_length(name, count)
    heads = {"num_heads": num_heads, "num_key_heads": num_key_heads, "head_dim": head_dim}
    line, layers = None, None
    if isinstance(what, PreTrainedModel | PreTrainedConfig):
        _refuse_given(what, {**heads, "cross": cross or None, "chosen": chosen})
        device, dtype = _place_of(what, device, dtype)
        request, line, layers = layer_request(what, layer, part, num_keys)
    elif isinstance(what, nn.Module):
        raise ConfigurationError(
            f"explain takes a model of transformers, not {type(what).__name__}. If another library wraps your model, "
            "give the model itself (model.module, model.get_base_model())."
        )
    else:
        layer = layer or 0
        request = _request(spec_pattern(what, layer, part), layer, cross, heads)
    check_numbers(request.layer_spec.pattern, None, dropout, None, request.layer_spec.layer)
    gpu = known_gpu(device) if isinstance(device, str) else None
    device = "cuda" if gpu is not None else _device_type(device or CPU)
    dtype = (torch.float32 if device == "cpu" else torch.bfloat16) if dtype is None else dtype
    check_dtype(dtype)
    with nullcontext() if gpu is None else on_machine(gpu):
        call = requested_call(request, query_tokens, num_keys, device, dtype, training, dropout, backend)
        call = call if chosen is None else with_chosen(call, chosen)
        return _explained(what, call, request, sequence_ranks, backend, line, layers)


def _explained(
    what: Any,
    call: AttentionCall,
    request: LayerRequest,
    sequence_ranks: int | None,
    backend: str,
    line: str | None,
    layers: Mapping[Any, Any] | None,
) -> Explanation:
    """Return the explanation of the call of a layer, with the cost of all layers if `layers` is given."""
    shards = shards_of(what) if isinstance(what, nn.Module) else None
    ranks = _ranks(shards, sequence_ranks)
    exchange, unshared = _exchange(call, request, ranks, AUTO if shards is None else shards.mode)
    request = replace(
        request,
        notes=(
            *request.notes,
            *_missing_positions(request.layer_spec.pattern, call.layout.num_keys),
            *unshared,
        ),
    )
    explanation = explained(call, request, backend, line)
    explanation = explanation if layers is None else with_all_layers(explanation, layers.values(), backend)
    return replace(explanation, exchange=exchange)


def _missing_positions(pattern: Pattern, num_keys: int) -> tuple[str, ...]:
    """Return a note about the global positions that no key has; none if all have one."""
    missing = [f"{named.position}{named.unit}" for named in pattern.global_positions() if not named.is_within(num_keys)]
    if not missing:
        return ()
    some = ", ".join(missing[:3]) + ", …" * (len(missing) > 3)
    return (f"The pattern has the global positions {some}, but there are only {num_keys:,} keys.",)


def _ranks(shards: SequenceShards | None, requested: int | None) -> int | None:
    """Return how many processes share the sequence, as requested or else as in the model; None: it is not shared."""
    if requested is not None:
        check_length("sequence_ranks", requested)
    elif shards is not None:
        requested = shards.size
    return None if requested == 1 else requested


def _exchange(
    call: AttentionCall, request: LayerRequest, ranks: int | None, mode: str
) -> tuple[LayerExchange | None, tuple[str, ...]]:
    """Return what `ranks` processes that share the sequence send, or None and a note; ranks None: it is not shared.

    Raises:
        UnsupportedBackendError: the model needs whole sequences.
    """
    if ranks is None:
        return None, ()
    reason = None if request.config is None else why_whole(request.config)
    if reason is not None:
        raise UnsupportedBackendError(
            f"sequence_ranks={ranks}, but processes cannot share the sequences of this model: {reason}"
        )
    if request.sends_more:
        return None, (SENDS_MORE,)
    # selection by content takes all keys of a head, whichever are selected
    call = replace(call, layout=replace(call.layout, pattern=request.layer_spec.pattern))
    return layer_exchange(call, request.has_bias, ranks, mode), ()


def _refuse_given(what: Any, given: Mapping[str, Any]) -> None:
    """Raise InputError for arguments that a model defines itself."""
    name = next((name for name, value in given.items() if value is not None), None)
    if name is not None:
        raise InputError(
            f"{name}={shown(given[name])} cannot be given for a {type(what).__name__}, which defines it itself. Leave "
            f"{name} out, or explain a pattern."
        )


def _place_of(what: Any, device: Any, dtype: torch.dtype | None) -> tuple[Any, torch.dtype | None]:
    """Return device and dtype, by default those of a model or config."""
    own = getattr(what, "device", None)
    # parameters that are not loaded yet have no device
    own = None if own is None or own.type == "meta" else own
    return device or own, dtype or what.dtype


def spec_pattern(spec: Any, layer: int = 0, part: str | None = None) -> Pattern:
    """Return the pattern that any form of `attention_pattern` gives to a layer.

    Raises:
        ConfigurationError: the form is unknown, or the layer has no pattern.
    """
    if is_by_part(spec):
        spec = spec.get(part or ENCODER)
    patterns = patterns_per_layer(spec, len(spec) if isinstance(spec, list | tuple) else layer + 1)
    pattern = patterns[layer] if layer < len(patterns) else None
    if pattern is None:
        raise ConfigurationError(f"Layer {layer} has no pattern; layers are counted from 0 to {len(patterns) - 1}.")
    return pattern


def _request(pattern: Pattern, layer: int, cross: bool, heads: Mapping[str, int | None]) -> LayerRequest:
    num_heads = NUM_HEADS if heads["num_heads"] is None else heads["num_heads"]
    num_key_heads = num_heads if heads["num_key_heads"] is None else heads["num_key_heads"]
    head_dim = HEAD_DIM if heads["head_dim"] is None else heads["head_dim"]
    for name, count in {"num_heads": num_heads, "head_dim": head_dim, "num_key_heads": num_key_heads}.items():
        check_length(name, count)
    if num_heads % num_key_heads:
        raise InputError(f"num_key_heads={num_key_heads} does not divide num_heads={num_heads}.")
    layer_spec = LayerPattern(pattern, layer, is_own=False, is_cross=cross)
    is_causal = pattern.is_causal and not cross
    notes = (PARTLY_CAUSAL,) if not (cross or pattern.is_causal) and _has_causal_part(pattern) else ()
    return LayerRequest(
        layer_spec, num_heads, num_key_heads, head_dim, head_dim, None, is_causal=is_causal, notes=notes
    )


def _has_causal_part(pattern: Pattern) -> bool:
    """Return whether a pattern, or a part of a union or per-head pattern, is causal and allows more than the query."""
    if pattern == SELF:
        return False
    parts = pattern.parts if isinstance(pattern, Union | PerHead) else ()
    return pattern.is_causal or any(map(_has_causal_part, parts))


def _device_type(device: str | torch.device) -> str:
    try:
        return torch.device(device).type
    except RuntimeError as error:
        raise InputError(
            f"torch does not know device={shown(device)}; use 'cpu', 'cuda', or the name of a GPU: "
            f"{', '.join(KNOWN_GPUS)}."
        ) from error
