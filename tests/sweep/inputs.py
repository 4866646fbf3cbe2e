"""Inputs of the sweep: two texts, in one of them padding on the left, and a picture."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sweep.classes import IMAGE, SEQ2SEQ

TOKENS, PADDED = 11, 3
# unlike every number of target tokens, so that cross-attention is told by its lengths
SOURCE_TOKENS = 14
PREFILL = 8


def token_ids(tokens: int, seed: int) -> Tensor:
    """Return random ids, none of them special, [2, tokens]."""
    return torch.randint(4, 60, (2, tokens), generator=torch.Generator().manual_seed(seed))


def left_padding(tokens: int) -> Tensor:
    """Return a mask whose first row has padding at its start."""
    mask = torch.ones(2, tokens, dtype=torch.long)
    mask[0, :PADDED] = 0
    return mask


def inputs_of(kind: str, config: Any, is_padded: bool) -> dict[str, Any]:
    """Return the inputs of a forward pass."""
    if kind == IMAGE:
        size, channels = getattr(config, "image_size", 16), getattr(config, "num_channels", 3)
        height, width = (size, size) if isinstance(size, int) else size
        return {"pixel_values": torch.randn(2, channels, height, width, generator=torch.Generator().manual_seed(1))}
    tokens = SOURCE_TOKENS if kind == SEQ2SEQ else TOKENS
    inputs: dict[str, Any] = {"input_ids": token_ids(tokens, 1)}
    if is_padded:
        inputs["attention_mask"] = left_padding(tokens)
    if kind == SEQ2SEQ:
        inputs["decoder_input_ids"] = token_ids(TOKENS, 2)
    return inputs


def starts_of(kind: str, is_padded: bool) -> Mapping[int, Tensor]:
    """Return the first real token of each row, by the number of keys of the parts that follow the pattern."""
    start = torch.tensor([PADDED if is_padded else 0, 0])
    if kind == IMAGE:
        return {patches: torch.zeros(1, dtype=torch.long) for patches in range(1, 4096)}
    lengths = range(PREFILL, TOKENS + 1)
    if kind == SEQ2SEQ:
        return {SOURCE_TOKENS: start, **{tokens: torch.zeros(2, dtype=torch.long) for tokens in lengths}}
    return dict.fromkeys(lengths, start)
