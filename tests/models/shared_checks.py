"""Comparisons that the contracts of decoders, encoders and encoder-decoders have in common."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models_cases import TOLERANCE
from torch import Tensor

Inputs = dict[str, Any]

GENERATION_OPTIONS: list[Any] = [
    {},
    {"num_beams": 3},
    {"cache_implementation": "static"},
    # to the cache the same as other beams
    pytest.param({"num_beams": 2, "num_return_sequences": 2}, marks=pytest.mark.thorough),
]


def check_cached_generation(generate: Callable[..., Tensor], options: dict[str, Any]) -> None:
    """Check that `generate` returns the same tokens with a cache and without."""
    cached = generate(use_cache=True, **options)
    options = {name: value for name, value in options.items() if name != "cache_implementation"}
    assert torch.equal(cached, generate(use_cache=False, **options))


def check_compiled_training(model: torch.nn.Module, inputs: Inputs) -> None:
    """Check that a model compiles to one graph, trains, and has the same loss."""
    torch._dynamo.reset()
    # centroids move in every forward pass
    start = copy.deepcopy(model.state_dict())
    actual = torch.compile(model, fullgraph=True, backend="aot_eager")(**inputs).loss
    actual.backward()
    model.load_state_dict(start)
    # behind it: a model that has been called before knows its patterns
    expected = model(**inputs).loss
    torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=TOLERANCE)


def compile_for_any_length(model: torch.nn.Module, calls: list[Inputs]) -> tuple[list[Any], int]:
    """Return what a compiled model returns for each of these calls, and to how many graphs they are compiled."""
    graphs = []
    torch._dynamo.reset()

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=count, dynamic=True)
    return [compiled(**inputs) for inputs in calls], len(graphs)


def check_exported(
    model: torch.nn.Module, inputs: Callable[..., Inputs], shapes: dict[str, Any], sizes: list[tuple[int, ...]]
) -> None:
    """Check that a model, exported with inputs of the first sizes, computes the same with inputs of the others."""
    program = torch.export.export(model, (), inputs(*sizes[0]), dynamic_shapes=shapes, strict=False).module()
    for others in sizes[1:]:
        actual, expected = program(**inputs(*others)), model(**inputs(*others))
        torch.testing.assert_close(actual.logits, expected.logits, atol=TOLERANCE, rtol=TOLERANCE)
        torch.testing.assert_close(actual.loss, expected.loss, atol=TOLERANCE, rtol=TOLERANCE)
