"""What `explain` says about all layers of a model at once, for its model card."""

from dataclasses import replace

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hf_efficient_attn.attention.explain import explained, requested_call
from hf_efficient_attn.attention.explanation import Explanation
from hf_efficient_attn.attention.layer_request import LayerRequest
from hf_efficient_attn.attention.model_requests import numbered_requests

CPU = "cpu"


def explain_layers(
    model_or_config: PreTrainedModel | PreTrainedConfig, tokens: int, part: str | None = None
) -> list[tuple[list[int], Explanation]]:
    """Return what `explain` says on a CPU about every layer of a part, once for all layers that compute alike.

    Raises:
        InputError, ConfigurationError, UnsupportedBackendError: as `explain`.
    """
    _, _, numbered = numbered_requests(model_or_config, part, tokens)
    groups: list[tuple[LayerRequest, list[int]]] = []
    for layer, request in sorted(numbered.items()):
        known = next((layers for first, layers in groups if _are_alike(first, request)), None)
        if known is None:
            groups.append((request, [layer]))
        else:
            known.append(layer)
    found = []
    for request, layers in groups:
        call = requested_call(request, tokens, tokens, CPU, torch.float32, training=False, dropout=0.0)
        found.append((layers, explained(call, request, request.backend, None)))
    return found


def _are_alike(first: LayerRequest, second: LayerRequest) -> bool:
    """Return whether two layers differ at most in their index, on which the blocks depend that a pattern draws."""
    other = replace(second, layer=first.layer, followed=replace(second.followed, layer=first.followed.layer))
    return first == other
