"""What bp_seq2seq computes, node by node as in the specification, and the comparison of a model with it."""

from typing import Any

import torch
from models.bp_transformer.tree_by_nodes import tree_by_nodes
from seq2seq_cases import random_ids
from torch import Tensor

Masks = tuple[list[bool], list[bool]]

# which tokens of a source, and of a target, are no padding
SOURCE = [False, False, True, True, True, False, True, True, True, True, True]
TARGET = [False, True, True, True, True, True, True, False, False]
MASKS: list[Masks] = [([True] * 11, [True] * 9), (SOURCE, TARGET)]


def embedded(stack: dict[str, Tensor], table: Tensor, ids: Tensor, real: Tensor) -> Tensor:
    """Return the embeddings of a row with their positions, which count real tokens."""
    positions = stack.get("embeddings.positions.table.weight")
    added = 0 if positions is None else positions[(real.cumsum(0) - 1).clamp(min=0)]
    return table[ids[0]] + added


def translated(
    model: Any, source: Tensor, target: Tensor, masks: Masks, sentences: tuple[list[int], list[int]] | None
) -> Tensor:
    """Return the states of the real target tokens, node by node, [T, hidden_size].

    sentences: the numbers of those of the source and of the target; None: every target token reads every source token.
    """
    weights, found = dict(model.named_parameters()), None
    for side, ids, mask in zip(("encoder", "decoder"), (source, target), masks, strict=True):
        stack = {name.removeprefix(f"{side}."): each for name, each in weights.items() if name.startswith(side)}
        first, last = mask.index(True), len(mask) - mask[::-1].index(True)
        real, reads = torch.tensor(mask), None
        rows = embedded(stack, weights["embed_tokens.weight"], ids, real)[first:last]
        if side == "decoder" and sentences is not None:
            kept = [number for number, is_real in zip(sentences[0], masks[0], strict=True) if is_real]
            reads = [[key for key, each in enumerate(kept) if each == own] for own in sentences[1][first:last]]
        states, _ = tree_by_nodes(model.config, stack, rows, mask[first:last], side == "decoder", found, reads)
        found = states[real[first:last]]
    return found


def check_translation(
    model: Any, masks: Masks, sentences: tuple[list[int], list[int]] | None = None, **inputs: Tensor
) -> None:
    """Compare the states of a model in float64, and their gradients, with those of the specification.

    inputs: of the model, besides tokens and masks.
    """
    source, target = random_ids(1, 11), random_ids(1, 9, seed=4)
    read, written = (torch.tensor(mask)[None] for mask in masks)
    states = model(source, read.long(), target, written.long(), use_cache=False, **inputs).last_hidden_state[written]
    expected = translated(model, source, target, masks, sentences)
    torch.testing.assert_close(states, expected, atol=1e-12, rtol=1e-9)
    named = {name: each for name, each in model.named_parameters() if "embed" not in name}
    signs = torch.arange(states.numel()).view_as(states).sin()
    wanted = torch.autograd.grad((expected * signs).sum(), list(named.values()), allow_unused=True)
    found = torch.autograd.grad((states * signs).sum(), list(named.values()))
    for key, one, other in zip(named, found, wanted, strict=True):
        other = torch.zeros_like(one) if other is None else other
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-8, msg=key)
    if sentences is not None:
        whole = model(source, read.long(), target, written.long(), use_cache=False)
        assert not torch.allclose(states, whole.last_hidden_state[written])
