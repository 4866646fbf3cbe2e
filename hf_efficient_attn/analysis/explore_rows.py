"""What some tokens of a text read, in every layer and head of a model: the strongest weights, and measures of all."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from hf_efficient_attn.attention.weight_rows import weights_of_rows
from hf_efficient_attn.errors import InputError
from hf_efficient_attn.models.parts.memberships import Membership, memberships

DEFAULT_ROWS = 64
# weights in the page, each with its key: about 3 MB
MAX_KEPT = 400_000
MOST_PER_ROW = 64
# of all rows of all layers, which a forward pass returns together
MAX_BYTES = 1 << 30


@dataclass(frozen=True)
class ReadRows:
    """What some tokens read. Shapes: L layers, H heads, R tokens, K weights that are kept of each.

    Attributes:
        rows: the tokens.
        keys, weights: int [L, H, R, K] and float32, the strongest first; a weight of 0 is none.
        share: float32 [L, H, R], the sum of those that are kept, of all weights of the row.
        num_read: int [L, H, R], tokens with a weight above 0.
        distance, effective, first: float32 [L, H, R]: the mean distance in tokens; the number of tokens of equal weight
            that have the same entropy; the weight on the first token.
        global_tokens: those that the model reads, and lets read, everything.
        memberships: the clusters or buckets of all tokens, by the index of the layer that has chosen them.
    """

    rows: tuple[int, ...]
    keys: Tensor
    weights: Tensor
    share: Tensor
    num_read: Tensor
    distance: Tensor
    effective: Tensor
    first: Tensor
    global_tokens: tuple[int, ...] = ()
    memberships: Mapping[int, Membership] = field(default_factory=dict)


def sampled_rows(num_tokens: int, num_rows: int, wanted: Sequence[int]) -> tuple[int, ...]:
    """Return tokens spread evenly over a text, the first and the last among them, and those that are wanted.

    >>> sampled_rows(100, 4, [7])
    (0, 7, 33, 66, 99)

    Raises:
        InputError: one that the text does not have.
    """
    beyond = [row for row in wanted if not 0 <= row < num_tokens]
    if beyond:
        raise InputError(f"--rows has {beyond[0]}; the text has the tokens 0 to {num_tokens - 1}.")
    count = min(num_rows, num_tokens)
    spread = (round(index * (num_tokens - 1) / max(1, count - 1)) for index in range(count))
    return tuple(sorted({*spread, *wanted}))


def read_rows(model: Any, ids: Sequence[int], rows: Sequence[int]) -> ReadRows:
    """Return what some tokens of a text read, in time and memory that are linear in its length.

    Raises:
        InputError: the model returns no attention weights.
    """
    config = model.config.get_text_config()
    num_layers, num_heads = config.num_hidden_layers, config.num_attention_heads
    most = max(1, MAX_BYTES // (4 * num_layers * num_heads * len(ids)))
    num_parts = ceil(len(rows) / most)
    parts = [rows[part::num_parts] for part in range(num_parts)]
    order = sorted(range(len(rows)), key=[row for part in parts for row in part].__getitem__)
    kept = max(4, min(MOST_PER_ROW, MAX_KEPT // (num_layers * num_heads * len(rows)), len(ids)))
    found: list[list[dict[str, Tensor]]] = []
    with (
        _progress(model, num_layers * num_parts),
        _global_tokens(model) as global_tokens,
        memberships() as chosen,
        torch.no_grad(),
    ):
        for part in parts:
            with weights_of_rows(part):
                weights = model(input_ids=torch.tensor([ids]), output_attentions=True).attentions
            if not weights or any(each is None for each in weights):
                raise InputError(f"{type(model).__name__} returns no attention weights, so there is nothing to show.")
            found.append([_reduced(each[0].float(), part, min(kept, len(ids))) for each in weights])
    joined = {
        name: torch.stack([torch.cat([each[name] for each in of_layer], 1) for of_layer in zip(*found, strict=True)])
        for name in found[0][0]
    }
    in_order = {name: tensor[:, :, order] for name, tensor in joined.items()}
    return ReadRows(tuple(rows), **in_order, global_tokens=tuple(sorted(global_tokens)), memberships=chosen)


def _reduced(weights: Tensor, rows: Sequence[int], kept: int) -> dict[str, Tensor]:
    """Return what is kept of the weights [H, R, T] of one layer."""
    top = weights.topk(kept, -1)
    total = weights.sum(-1).clamp(min=torch.finfo(torch.float32).tiny)
    away = (torch.arange(weights.shape[-1]) - torch.tensor(rows)[:, None]).abs()
    shares = weights / total[..., None]
    entropy = torch.special.entr(shares).sum(-1)
    return {
        "keys": top.indices,
        "weights": top.values,
        "share": top.values.sum(-1) / total,
        "num_read": (weights > 0).sum(-1),
        "distance": (shares * away).sum(-1),
        "effective": entropy.exp() * (weights > 0).any(-1),
        "first": shares[..., 0],
    }


@contextmanager
def _progress(model: nn.Module, total: int) -> Iterator[None]:
    """Show how many layers of all passes are done, as far as the model lists its layers."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    layers = max(lists, key=len, default=nn.ModuleList())
    with logging.tqdm(total=total, desc="reading the text", unit="layer", leave=False) as bar:
        hooks = [layer.register_forward_hook(lambda *_: bar.update() and None) for layer in layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


@contextmanager
def _global_tokens(model: nn.Module) -> Iterator[set[int]]:
    """Collect the global tokens that the layers are told of, by positions or by a mask, in a forward pass."""
    found: set[int] = set()

    def note(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        found.update(kwargs.get("global_positions", ()))
        mask = getattr(kwargs.get("token_mask"), "global_mask", None)
        if mask is not None:
            found.update(mask[0].nonzero()[:, 0].tolist())

    hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in model.modules()]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
