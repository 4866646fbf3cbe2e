"""Reversible layers of a Reformer and the same layers without reversing, to measure memory against depth."""

from typing import Any

import torch
from torch import nn

from hf_efficient_attn.bench.content.cases import SEED, Shape, reformer_config
from hf_efficient_attn.bench.harness.steps import Step
from hf_efficient_attn.models.efficient_reformer.modeling_efficient_reformer import ReformerLayer
from hf_efficient_attn.models.efficient_reformer.reversible import ReversibleStack
from hf_efficient_attn.models.efficient_reformer.streams import Streams

REVERSIBLE, PLAIN = "reversible", "plain"
STACKS = (REVERSIBLE, PLAIN)
# of the width of the states
MLP_FACTOR = 4


def build_stack_step(kind: str, num_layers: int, shape: dict[str, Any]) -> Step:
    """Return a function that computes the gradients of a stack of layers; arguments of JSON types.

    The gradients of the weights, which grow with the depth of any model, lie there before, so that what the step needs
    beyond are activations.
    """
    sizes = Shape(**shape)
    torch.manual_seed(SEED)
    fields = {"num_hidden_layers": num_layers, "intermediate_size": MLP_FACTOR * sizes.width}
    config = reformer_config(sizes, **fields)
    layers = nn.ModuleList(ReformerLayer(config, index) for index in range(num_layers))
    layers.to(sizes.device, getattr(torch, sizes.dtype)).train()
    for parameter in layers.parameters():
        parameter.grad = torch.zeros_like(parameter)
    states = sizes.states()
    states.grad = torch.zeros_like(states)
    hash_step = torch.zeros((), dtype=torch.long, device=states.device)

    def step() -> None:
        stack = ReversibleStack() if kind == REVERSIBLE else None
        first = second = states.to(torch.promote_types(states.dtype, torch.float32))
        for layer in layers:
            first, second = layer(first, Streams(first, second), stack=stack, hash_step=hash_step)
        if stack is not None:
            stack.close(first, second)
        (first + second).sum().backward()

    return step
