"""A model on a text, as the page of `explore` shows it: loaded, its patterns, and what it reads in JSON types."""

import re
from collections.abc import Iterable, Sequence
from functools import reduce
from math import ceil
from operator import or_
from typing import Any

from torch import nn

from hf_efficient_attn.analysis.explore_html import packed
from hf_efficient_attn.analysis.explore_memberships import membership_data
from hf_efficient_attn.analysis.explore_rows import ReadRows
from hf_efficient_attn.analysis.explore_tokens import ShownTokens
from hf_efficient_attn.analysis.signal_sources import load_model
from hf_efficient_attn.attention.layer_patterns import FIELD, NAME, config_patterns
from hf_efficient_attn.attention.model_parts import ENCODER
from hf_efficient_attn.models.spans.module import span_modules
from hf_efficient_attn.patterns.global_tokens import GlobalTokens
from hf_efficient_attn.patterns.pattern import Pattern

# an expression of more is hard to read
MOST_GLOBAL = 32


def load_explored(source: str) -> Any:
    """Return the backbone of a saved model, of an encoder-decoder its encoder, on the "efficient" attention.

    Raises:
        InputError: no saved model.
        UnsupportedBackendError: a model whose attention the engine cannot compute.
    """
    model = load_model(source, seed=0).eval()
    model.set_attn_implementation(NAME)
    if model.config.is_encoder_decoder:
        model = model.get_encoder()
    if hasattr(model, "task"):
        # the rule "auto" for global tokens is that of the head, which is left out
        head = next(iter(model.config.architectures or ()), "").partition("For")[2]
        model.task = re.sub(r"(?<!^)(?=[A-Z])", "_", head).lower() or None
    return model


def followed_patterns(model: Any, global_tokens: Sequence[int]) -> tuple[tuple[Pattern | None, ...], bool]:
    """Return the patterns of a model's layers, none if its config has none, and whether they are followed causally.

    None: the layer keeps its own attention.

    Args:
        global_tokens: those that are chosen in the text, besides those that the patterns name.
    """
    config = model.config.get_text_config()
    spec = getattr(config, FIELD, None)
    patterns = None if spec is None else config_patterns(spec, config, ENCODER)
    chosen = [GlobalTokens(global_tokens)] if 0 < len(global_tokens) <= MOST_GLOBAL else []
    joined = (None if each is None else reduce(or_, chosen, each) for each in patterns or ())
    return tuple(joined), any(getattr(module, "is_causal", False) for module in model.modules())


def named_globals(patterns: Iterable[Pattern | None], num_tokens: int) -> set[int]:
    """Return the tokens that patterns name as global; of blocks, all tokens of the block."""
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
        notes.append("Shaped attention: shown is the softmax part A of αI + βA − γC.")
    if any(module.kind == "dynamic" for module in span_modules(model)):
        notes.append("Dynamic spans: shown is the mean over the text.")
    return notes
