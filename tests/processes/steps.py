"""Training steps of two processes, and the same steps in one: what the scripts of this folder compare."""

import copy
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from models_cases import scalar, switch_off_dropout
from torch import Tensor, nn

# the second begins with the weights of all processes, and fails where a parameter got no gradient in the first
STEPS, LEARNING_RATE = 2, 0.1
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
    """Return what a process reads at a step: every example is read by one of them."""
    inputs = {name: each.roll(step, 0) for name, each in case.inputs(auto_class).items()}
    return {name: torch.cat((each, each.flip(0)))[rank::processes].contiguous() for name, each in inputs.items()}


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


def train_alone(case: Any, auto_class: str, processes: int) -> tuple[dict[str, Tensor], float]:
    """Return the weights that one process reaches with what `processes` read, and by how much a weight has moved."""
    model = build(case, auto_class)
    start = copy.deepcopy(weights_of(model))
    train(model, lambda step: [batch_of(case, auto_class, step, rank, processes) for rank in range(processes)])
    reached = weights_of(model)
    return reached, largest_difference(start, reached)
