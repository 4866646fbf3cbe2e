"""What the page of `explore` shows of a model and a text: patterns, the attention of some tokens, and memberships.

For every measured token, these are its strongest weights in every layer and head, and statistics of all its weights.
For all tokens, they are the clusters or buckets that the layers have chosen.
"""

import re
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from math import ceil
from operator import or_
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from hf_efficient_attn.analysis.model_sources import ShownTokens, load_model
from hf_efficient_attn.attention.layer import weights_of_rows
from hf_efficient_attn.errors import InputError
from hf_efficient_attn.integration.layer_patterns import ENCODER, FIELD, NAME, config_patterns
from hf_efficient_attn.models.parts.memberships import Membership, memberships
from hf_efficient_attn.models.spans.module import span_modules
from hf_efficient_attn.patterns.global_tokens import GlobalTokens
from hf_efficient_attn.patterns.pattern import Pattern

DEFAULT_ROWS = 64
# weights in the page, each with its key: about 3 MB
MAX_KEPT = 400_000
MOST_PER_ROW = 64
# the size of the weights that one forward pass returns, of all measured rows in all layers
MAX_BYTES = 1 << 30
# cluster and bucket numbers in the page: about 6 MB
MAX_NUMBERS = 1 << 20
# an expression with more global tokens is hard to read
MOST_GLOBAL = 32


@dataclass(frozen=True)
class ReadRows:
    """The attention of some tokens. Shapes: L layers, H heads, R tokens, K weights kept for each token.

    Attributes:
        rows: the tokens.
        keys, weights: int and float32 [L, H, R, K], the strongest weights first; a weight of 0 means no key.
        share: float32 [L, H, R], the sum of the kept weights divided by the sum of all weights of the row.
        num_read: int [L, H, R], the number of keys with a weight above 0.
        distance, effective, first: float32 [L, H, R]: the mean distance in tokens; the number of keys of equal weight
            that have the same entropy; the weight on the first token.
        global_tokens: the tokens that the layers receive as global.
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
    """Return tokens spread evenly over a text, with the first and the last one, and the wanted tokens.

    >>> sampled_rows(100, 4, [7])
    (0, 7, 33, 66, 99)

    Raises:
        InputError: a wanted token that the text does not have.
    """
    beyond = [row for row in wanted if not 0 <= row < num_tokens]
    if beyond:
        raise InputError(f"--rows has {beyond[0]}, but the tokens of the text are numbered 0 to {num_tokens - 1}.")
    count = min(num_rows, num_tokens)
    spread = (round(index * (num_tokens - 1) / max(1, count - 1)) for index in range(count))
    return tuple(sorted({*spread, *wanted}))


def read_rows(model: Any, ids: Sequence[int], rows: Sequence[int]) -> ReadRows:
    """Return the attention of some tokens of a text, in time and memory that are linear in its length.

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
    """Show a progress bar over the layers of all passes; layers are the entries of the longest module list."""
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
    """Collect the global tokens that layers receive in a forward pass, as positions or as a mask."""
    found: set[int] = set()

    def note(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        inputs = kwargs.get("inputs")
        found.update(getattr(inputs, "global_positions", ()))
        mask = getattr(getattr(inputs, "token_mask", None), "global_mask", None)
        if mask is not None:
            found.update(mask[0].nonzero()[:, 0].tolist())

    hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in model.modules()]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def membership_data(
    found: Mapping[int, Membership], num_layers: int, num_tokens: int, rows: Sequence[int]
) -> dict[str, Any] | None:
    """Return what the page shows of the memberships of layers; None: no layer has any.

    They cover all tokens or, if these have too many, the measured tokens and others spread evenly over the text.

    Args:
        found: the memberships in one text, by the index of the layer.
        rows: the measured tokens.
    """
    if not found:
        return None
    of_token = sum(sum(side.shape[1] * side.shape[3] for side in _sides(each)) for each in found.values())
    tokens = sampled_rows(num_tokens, max(1, MAX_NUMBERS // of_token), rows)
    layers = [_layer_data(found[layer], tokens) if layer in found else None for layer in range(num_layers)]
    return {"tokens": tokens, "layers": layers}


def _sides(each: Membership) -> list[Any]:
    return [each.queries] if each.keys is each.queries else [each.queries, each.keys]


def _layer_data(each: Membership, tokens: Sequence[int]) -> dict[str, Any]:
    sides = [{"most": side.shape[3], "numbers": packed(side[0][:, list(tokens)], "<i4")} for side in _sides(each)]
    return {
        "kind": each.kind,
        "count": each.count,
        "heads": each.queries.shape[1],
        "queries": sides[0],
        # null: the same as the queries
        "keys": sides[1] if len(sides) > 1 else None,
    }


def packed(tensor: Tensor, dtype: str) -> str:
    """Return numbers as the page reads them: in base64, little-endian, with a numpy dtype such as "<f4".

    >>> import torch
    >>> packed(torch.tensor([1, 258]), "<u4")
    'AQAAAAIBAAA='
    """
    return b64encode(tensor.contiguous().numpy().astype(dtype).tobytes()).decode()


def load_explored(source: str) -> Any:
    """Return the backbone of a saved model (the encoder of an encoder-decoder) with "efficient" attention.

    Raises:
        InputError: not a saved model.
        UnsupportedBackendError: a model whose attention the engine cannot compute.
    """
    model = load_model(source, seed=0).eval()
    model.set_attn_implementation(NAME)
    if model.config.is_encoder_decoder:
        model = model.get_encoder()
    if hasattr(model, "task"):
        # the rule "auto" for global tokens depends on the head, which the backbone lacks
        head = next(iter(model.config.architectures or ()), "").partition("For")[2]
        model.task = re.sub(r"(?<!^)(?=[A-Z])", "_", head).lower() or None
    return model


def attention_patterns(model: Any, global_tokens: Sequence[int]) -> tuple[tuple[Pattern | None, ...], bool]:
    """Return the patterns of a model's layers, and whether the model is causal.

    There are no patterns if the config has none; a pattern of None means that the layer keeps its own attention.

    Args:
        global_tokens: the global tokens chosen in the text, in addition to those that the patterns name.
    """
    config = model.config.get_text_config()
    spec = getattr(config, FIELD, None)
    patterns = None if spec is None else config_patterns(spec, config, ENCODER)
    chosen = [GlobalTokens(global_tokens)] if 0 < len(global_tokens) <= MOST_GLOBAL else []
    joined = (None if each is None else reduce(or_, chosen, each) for each in patterns or ())
    return tuple(joined), any(getattr(module, "is_causal", False) for module in model.modules())


def named_globals(patterns: Iterable[Pattern | None], num_tokens: int) -> set[int]:
    """Return the tokens that patterns name as global; for a block, these are all of its tokens."""
    found: set[int] = set()
    for pattern in patterns:
        for position, block in () if pattern is None else pattern.global_positions():
            place = position if position >= 0 else position + ceil(num_tokens / block)
            found.update(range(place * block, min((place + 1) * block, num_tokens)))
    return found


def model_data(
    name: str, model: Any, text: ShownTokens, read: ReadRows, patterns: Iterable[Pattern | None]
) -> dict[str, Any]:
    """Return what the page shows of a model and a text, in JSON types; arrays are little-endian, in base64."""
    num_layers, num_heads = read.keys.shape[:2]
    spans = [module.head_spans().tolist() for module in span_modules(model)]
    return {
        "name": name,
        "kind": type(model).__name__,
        "layers": num_layers,
        "heads": num_heads,
        "tokens": text.texts,
        "special": text.special,
        "global_tokens": sorted({*read.global_tokens, *named_globals(patterns, len(text.ids))}),
        "left_out": text.num_left_out,
        "rows": read.rows,
        "kept": read.keys.shape[3],
        "spans": spans,
        "memberships": membership_data(read.memberships, num_layers, len(text.ids), read.rows),
        "notes": _notes(model),
        "keys": packed(read.keys, "<u4"),
        "weights": packed(read.weights, "<f4"),
        "num_read": packed(read.num_read, "<u4"),
        **{field: packed(getattr(read, field), "<f4") for field in ("share", "distance", "effective", "first")},
    }


def _notes(model: nn.Module) -> list[str]:
    """Return what a reader of the weights should know about them."""
    notes = []
    if any(getattr(module, "has_head_gains", False) for module in model.modules()):
        notes.append("Shaped attention: the page shows the softmax part A of αI + βA − γC.")
    if any(module.kind == "dynamic" for module in span_modules(model)):
        notes.append("Dynamic spans: the page shows the mean over the text.")
    return notes
