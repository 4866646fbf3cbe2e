"""Steps of modules beside each other: a forward pass, and what else a benchmark lets its contestants do."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_efficient_attn.bench.harness.timing import Case, time_once, time_within

Step = Callable[[], object]


def step_case(step: Step) -> Case:
    """Return the case of a step, which needs no preparation."""
    return Case(lambda _: step())


def forward_step(module: nn.Module, states: Tensor) -> Step:
    """Return a function that computes the output without a graph, in evaluation mode."""

    @torch.no_grad()
    def step() -> object:
        return module.eval()(states)

    return step


def time_steps(
    steps: Mapping[str, Mapping[str, Step]], settings: Mapping[str, Any], tokens: int, device: torch.device
) -> dict[str, dict[str, Any]]:
    """Return {contestant: {measure: its times}} of their steps, all measured in the same rounds; see `Timing.record`.

    Args:
        steps: {contestant: {measure: step}}; each is run once before.
        settings: with "repeats" and "max_seconds"; see `time_within`.
    """
    cases = {
        f"{name} {measure}": step_case(step) for name, measures in steps.items() for measure, step in measures.items()
    }
    # the first calls make layouts and caches
    for case in cases.values():
        time_once(case, device)
    timings = time_within(cases, settings["repeats"], settings["max_seconds"], tokens, device)
    return {
        name: {measure: timings[f"{name} {measure}"].record(1) for measure in measures}
        for name, measures in steps.items()
    }
