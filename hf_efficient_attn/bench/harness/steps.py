"""Steps of modules beside each other: a forward pass, and what else a benchmark lets its contestants do."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from hf_efficient_attn.bench.harness.memory import peak_memory
from hf_efficient_attn.bench.harness.timing import Case, clock_of, time_once, time_within

Step = Callable[[], object]

# measure of a row -> what tables call it
MEASURES = {"forward": "forward", "training": "training step"}


@dataclass(frozen=True)
class Contestants:
    """Modules that are compared at equal shapes, by their forward pass and their training step.

    A shape is a dataclass of JSON types with `states()`, what the modules read.

    Attributes:
        kind: what one is called: settings name them all by its plural, a row its own by it.
        shape_of: returns the shape at a length, of (tokens, settings, device).
        names_of: returns those that are measured at a length, of (tokens, settings).
        build: returns a new module, of its name and a shape.
        training_step: returns the step of a module and states.
        build_training_step: returns the step of a new module, of `name` and the fields of a `shape`: in processes of
            their own, it is found by its name in its module.
    """

    kind: str
    shape_of: Callable[[int, Mapping[str, Any], torch.device], Any]
    names_of: Callable[[int, Mapping[str, Any]], list[str]]
    build: Callable[[str, Any], nn.Module]
    training_step: Callable[[nn.Module, Tensor], Step]
    build_training_step: Callable[..., Step]

    def measure(self, settings: Mapping[str, Any], device: torch.device) -> list[dict[str, Any]]:
        """Return a row per length and contestant: the times of its steps, empty where it is not measured, and memory.

        settings: with "lengths", "memory_lengths", the names of all contestants, and what `time_within` needs.
        """
        # first, while this process is small
        peaks = self.measure_memory(settings, device)
        rows = []
        for tokens in logging.tqdm(settings["lengths"], desc="lengths", unit="length", leave=False):
            times = self.time(tokens, settings, device)
            for name in settings[f"{self.kind}s"]:
                own = times.get(name, {measure: {} for measure in MEASURES})
                rows.append({"tokens": tokens, self.kind: name, **own, "peak_memory_bytes": peaks.get((tokens, name))})
        return rows

    def measure_memory(self, settings: Mapping[str, Any], device: torch.device) -> dict[tuple[int, str], int]:
        """Return the peak bytes of a training step, beyond weights and states, by length and contestant."""
        lengths = [tokens for tokens in settings["lengths"] if tokens in settings["memory_lengths"]]
        wanted = [(tokens, name) for tokens in lengths for name in self.names_of(tokens, settings)]
        peaks = {}
        for tokens, name in logging.tqdm(wanted, desc="memory", unit=self.kind, leave=False):
            arguments = {"name": name, "shape": asdict(self.shape_of(tokens, settings, device))}
            peaks[tokens, name] = peak_memory(self.build_training_step, arguments, device)
        return peaks

    def time(self, tokens: int, settings: Mapping[str, Any], device: torch.device) -> dict[str, dict[str, Any]]:
        """Return the times of the contestants at a length, by their names; see `time_steps`."""
        shape = self.shape_of(tokens, settings, device)
        states = shape.states()
        modules = {name: self.build(name, shape) for name in self.names_of(tokens, settings)}
        steps = {
            name: {"forward": forward_step(module, states), "training": self.training_step(module, states)}
            for name, module in modules.items()
        }
        return time_steps(steps, settings, tokens, device)


def drawn_states(batch_size: int, tokens: int, width: int, dtype: str, device: str) -> Tensor:
    """Return random states [batch_size, tokens, width], always the same."""
    states = torch.randn(batch_size, tokens, width, generator=torch.Generator().manual_seed(0))
    return states.to(device, getattr(torch, dtype))


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
    if not cases:
        return {}
    # the first calls make layouts and caches
    for case in cases.values():
        time_once(case, device)
    limits = (settings["repeats"], settings["max_seconds"])
    timings = time_within(cases, *limits, tokens, device, clock_of(device))
    return {
        name: {measure: timings[f"{name} {measure}"].record(1) for measure in measures}
        for name, measures in steps.items()
    }
