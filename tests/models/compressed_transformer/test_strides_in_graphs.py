"""Layers that cut texts into strides or chunks are compiled and exported for any length, that of a single one, too."""

from typing import Any

import pytest
import torch
from models.compressed_transformer.tiny_models import build
from models.shared_checks import check_exported
from models_cases import TOLERANCE, head_inputs

MEMORY: dict[str, Any] = {"mechanism": "memory_compressed"}
# strides of 8 tokens
LINFORMER: dict[str, Any] = {"projected_tokens": 8, "projection_bias": True, "projection_type": "convolution"}


@pytest.mark.parametrize(
    "fields",
    [
        {**MEMORY, "compression_tokens": 5, "is_causal": True},
        {**MEMORY, "compression_tokens": 3, "compression_by_head": False},
        LINFORMER,
    ],
)
def test_a_model_that_is_compiled_once_trains_at_any_length(fields: dict[str, Any]) -> None:
    model = build(num_hidden_layers=1, **fields).train()
    given = list(model.parameters())
    head = "AutoModelForCausalLM" if model.config.is_causal else "AutoModelForMaskedLM"
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    for tokens in (12, 31, 5):
        inputs = head_inputs(head, tokens=tokens)
        losses = [each(**inputs, use_cache=False).loss for each in (compiled, model)]
        torch.testing.assert_close(*losses, atol=TOLERANCE, rtol=TOLERANCE)
        slopes = [torch.autograd.grad(loss, given) for loss in losses]
        for found, expected in zip(*slopes, strict=True):
            torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize(
    ("fields", "has_any_batch"),
    [
        ({**MEMORY, "compression_tokens": 2, "is_causal": True}, False),
        ({**MEMORY, "compression_tokens": 4, "compression_by_head": False, "compression_null_key": True}, False),
        ({**MEMORY, "compression_tokens": 5}, True),
        (LINFORMER, False),
        ({**LINFORMER, "projection_sharing": "none"}, True),
        ({"projected_tokens": 8, "projection_type": "mean"}, False),
        ({"projected_tokens": 8, "projection_type": "mean", "projection_first": True}, True),
        ({"mechanism": "linear", "is_causal": True, "chunk_tokens": 8, "feature_map": "positive_random"}, True),
    ],
)
def test_an_exported_model_computes_any_length(fields: dict[str, Any], has_any_batch: bool) -> None:
    model = build(num_hidden_layers=1, use_cache=False, **fields)
    head = "AutoModelForCausalLM" if model.config.is_causal else "AutoModelForMaskedLM"
    rows = (3, 1) if has_any_batch else (1, 1)

    def inputs(rows: int, tokens: int) -> dict[str, torch.Tensor]:
        return head_inputs(head, rows, tokens)

    dims = {1: torch.export.Dim("tokens", min=5, max=64)}
    if has_any_batch:
        dims[0] = torch.export.Dim("batch", min=1, max=64)
    shapes = dict.fromkeys(inputs(1, 5), dims)
    check_exported(model, inputs, shapes, [(rows[0], 12), (rows[0], 6), (rows[1], 8), (rows[1], 64)])
