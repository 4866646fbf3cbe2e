"""What `explain` says about all layers of a model at once: their cost together, and each kind of layer for its card."""

from collections.abc import Iterable
from dataclasses import replace

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hf_efficient_attn.attention.explained_call import BASELINES, baseline_time, explained, requested_call
from hf_efficient_attn.attention.explanation import AllLayers, Explanation
from hf_efficient_attn.attention.layer_request import LayerRequest
from hf_efficient_attn.attention.model_requests import numbered_requests
from hf_efficient_attn.attention.select import AUTO
from hf_efficient_attn.errors import EfficientAttentionError

CPU = "cpu"


def explain_layers(
    model_or_config: PreTrainedModel | PreTrainedConfig, tokens: int, part: str | None = None
) -> list[tuple[list[int], Explanation]]:
    """Return what `explain` says on a CPU about every layer of a part, once for all layers that compute alike.

    Raises:
        InputError, ConfigurationError, UnsupportedBackendError: as `explain`.
    """
    _, _, numbered = numbered_requests(model_or_config, part, tokens)
    found = []
    for request, layers in _groups(numbered.items()):
        call = requested_call(request, tokens, tokens, CPU, torch.float32, training=False, dropout=0.0)
        found.append((layers, explained(call, request, AUTO)))
    return found


def with_all_layers(said: Explanation, requests: Iterable[LayerRequest], backend: str) -> Explanation:
    """Return what is said about a layer, and the cost of all layers for the same lengths and inputs."""
    groups = _groups(enumerate(requests))
    try:
        return replace(said, all_layers=_all_layers(said, groups, backend))
    except EfficientAttentionError as refusal:
        return replace(said, notes=(*said.notes, f"The cost of all layers is not known here: {refusal}"))


def _all_layers(said: Explanation, groups: list[tuple[LayerRequest, list[int]]], backend: str) -> AllLayers:
    layout, inputs = said.call.layout, said.call.inputs
    sizes = (layout.num_queries, layout.num_keys, inputs.device, inputs.dtype, inputs.needs_grad, said.call.dropout)
    total = total_baseline = 0.0
    for request, layers in groups:
        each = explained(requested_call(request, *sizes), request, backend)
        total += len(layers) * each.relative_cost * baseline_time(each)
        total_baseline += len(layers) * baseline_time(each)
    baselines = {BASELINES[request.is_causal] for request, _ in groups}
    name = baselines.pop() if len(baselines) == 1 else "dense attention, causal in causal layers"
    return AllLayers(sum(len(layers) for _, layers in groups), total / total_baseline, name)


def _groups(numbered: Iterable[tuple[int, LayerRequest]]) -> list[tuple[LayerRequest, list[int]]]:
    """Return the first of all layers that compute alike, and their numbers."""
    groups: list[tuple[LayerRequest, list[int]]] = []
    for layer, request in sorted(numbered, key=lambda each: each[0]):
        known = next((layers for first, layers in groups if first.alike == request.alike), None)
        if known is None:
            groups.append((request, [layer]))
        else:
            known.append(layer)
    return groups
