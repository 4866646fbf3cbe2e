"""Training steps of two processes, and the same steps in one: what the scripts of this folder compare."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from models_cases import scalar, switch_off_dropout
from torch import Tensor, nn

# those after the first begin with the weights of all processes, and fail where a parameter got no gradient before
STEPS, LEARNING_RATE = 3, 0.1
WRAPPERS = re.compile(r"^module\.|_checkpoint_wrapped_module\.")


def build(case: Any, auto_class: str) -> Any:
    """Return a model in training mode without dropout, the same in every process.

    Two and three processes can divide its vocabulary.
    """
    model = case.model(auto_class, vocab_size=66, **case.fewest_layers).train()
    switch_off_dropout(model)
    if hasattr(model.config, "centroid_decay"):
        # they move in every forward pass, of which one process takes as many in a step as there are processes
        model.config.centroid_decay = 1.0
    return model


def batch_of(case: Any, auto_class: str, step: int, rank: int, processes: int) -> dict[str, Tensor]:
    """Return what a process reads at a step, of three examples: every example is read by one of them."""
    inputs = case.inputs(auto_class)
    return {name: each.roll(step, 0)[rank::processes].contiguous() for name, each in inputs.items()}


def train(model: nn.Module, batches: Callable[[int], Sequence[dict[str, Tensor]]], optimizer: Any = None) -> None:
    """Take `STEPS` steps; the loss of a step is the mean over `batches(step)`."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), LEARNING_RATE)
    for step in range(STEPS):
        optimizer.zero_grad()
        read = batches(step)
        for batch in read:
            (scalar(model(**batch)) / len(read)).backward()
        optimizer.step()


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the parameters, whole where they are in shards, by their names without wrappers."""
    parameters = {WRAPPERS.sub("", name): each.detach() for name, each in model.named_parameters()}
    return {name: getattr(each, "full_tensor", lambda each=each: each)().clone() for name, each in parameters.items()}


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return by how much the weight that differs most differs."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@dataclass(frozen=True)
class Alone:
    """What one process reaches with what several read.

    Attributes:
        weights: after the last step.
        moved: by how much the weight that moved most has moved.
        apart: by how much it differs from one that a process reaches with its own part, told nothing by the others.
    """

    weights: dict[str, Tensor]
    moved: float
    apart: float


def train_alone(case: Any, auto_class: str, processes: int) -> Alone:
    """Return what one process reaches with what `processes` read."""
    model, own = build(case, auto_class), build(case, auto_class)
    start = weights_of(model)
    train(model, lambda step: [batch_of(case, auto_class, step, rank, processes) for rank in range(processes)])
    train(own, lambda step: [batch_of(case, auto_class, step, 0, processes)])
    reached = weights_of(model)
    return Alone(reached, largest_difference(start, reached), largest_difference(reached, weights_of(own)))
