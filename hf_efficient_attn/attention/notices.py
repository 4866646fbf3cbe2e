"""Warnings that users of the "efficient" attention get once."""

import warnings
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from hf_efficient_attn.attention.cache_argument import cache_in
from hf_efficient_attn.errors import WorkLimitError
from hf_efficient_attn.layout.cache import cached
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.messages import shown
from hf_efficient_attn.patterns.intervals import SMALL_SHARE, bounded
from hf_efficient_attn.patterns.pattern import DecodingReach, Pattern

# of a pattern with a period up to this, one token of each residue class is asked whether it reads itself
MAX_PERIOD = 64
# the reach of a query that reads its own token alone
NOTHING_BEFORE = DecodingReach(0, 0)
# the attribute in which a model that was sparsified after loading keeps the name that it was loaded by
BASE = "_name_without_pattern"
# configs whose models were warned of; configs have no hash
_mixing: WeakIdKeyDictionary = WeakIdKeyDictionary()


@lru_cache(maxsize=256)
def warn_once(message: str) -> None:
    """Warn with this message, but only once."""
    warnings.warn(message, UserWarning, stacklevel=2)


def warn_of_base(model: Any, inputs: Mapping[str, Any]) -> None:
    """Warn that an adapter of PEFT, which is trained on this model, will name a base that has not its pattern.

    inputs: the arguments of a call. Those of a frozen model have a gradient where virtual tokens are trained.
    """
    base = model.__dict__.get(BASE)
    if base and torch.is_grad_enabled() and is_adapted(model, inputs):
        warn_once(
            f"An adapter that is trained on this model will name {base} as its base, where this pattern is not saved: "
            "who loads it by that name gets the base's own attention. Save the sparsified model (save_pretrained), and "
            "train from that folder; or sparsify the base again wherever the adapter is loaded."
        )


def is_adapted(model: Any, inputs: Mapping[str, Any]) -> bool:
    """Return whether a call trains an adapter: one in the model, or one that makes what a frozen model reads."""
    learns = any(parameter.requires_grad for parameter in model.parameters())
    if learns:
        return "peft_config" in model.__dict__
    cache = cache_in(inputs)
    layers = getattr(getattr(cache, "self_attention_cache", cache), "layers", [])
    given = [inputs.get("inputs_embeds"), *(getattr(layer, "keys", None) for layer in layers)]
    return any(isinstance(each, torch.Tensor) and each.requires_grad for each in given)


def warn_of_weights() -> None:
    """Warn that attention weights were asked for; compiled models do not warn."""
    if torch.compiler.is_compiling():
        return
    warn_once(
        "output_attentions=True: attention weights are computed for all pairs of tokens, in time and memory that grow "
        "with the square of the length, whatever the pattern. Ask for them on short inputs only."
    )


def warn_of_unseen_documents(config: Any) -> None:
    """Warn that packed documents read each other; once for the model of a config."""
    if config in _mixing:
        return
    _mixing[config] = True
    message = (
        f"position_ids restart within an example of this model ({type(config).__name__}), as those of packed documents "
        "do, but they do not separate documents after cached tokens, with a cache or an attention_mask, or in a model "
        "whose masks ignore position_ids: these documents read each other. Pass seq_idx with them, the number of each "
        "token's document, [batch, tokens], or cu_seq_lens_q and cu_seq_lens_k; and nothing cached."
    )
    # with its own registry, since Python would show a text once per process
    warnings.warn_explicit(message, UserWarning, __file__, 0, module=__name__)


def warn_of_lonely(pattern: Pattern, causal: Pattern) -> None:
    """Warn of a head that reads nothing but its own token, and only because its layer is causal.

    causal: the causal form of the pattern.
    """
    forms = (each.heads(pattern.num_head_patterns) for each in (pattern, causal))
    for head, left in zip(*forms, strict=True):
        if head != left and left.decoding_reach() == NOTHING_BEFORE and left.num_keys_of(0, 1):
            warn_once(
                f"attention_pattern has {shown(head)}, which reads no tokens before the query, and causal layers read "
                "none after it: every token reads itself alone. Give it tokens before the query, such as Band(256, 0)."
            )


@cached()
def warn_of_keyless(pattern: Pattern, num_heads: int, num_tokens: int, layer: int) -> None:
    """Warn of the first position that may read no key, if there is one, once per pattern and length.

    If every token reads only earlier ones, the first token cannot have a key, so that it causes no warning.
    """
    layout = Layout(pattern, num_heads, num_tokens, num_tokens, 0, layer).fitted
    firsts = [_first_unexpected(drawn, layout.num_keys) for _, _, drawn in layout.head_groups()]
    found = [first for first in firsts if first is not None]
    if found:
        warn_once(
            f"attention_pattern ({pattern.kind}) leaves tokens without any key, the first at position {min(found)}: "
            "their attention output is zero. Add `| Band(0, 0)` to let every token read itself."
        )


def _first_unexpected(pattern: Pattern, num_tokens: int) -> int | None:
    ahead = pattern.max_tokens_ahead
    start = 1 if ahead is not None and ahead < 0 else 0
    if start >= num_tokens:
        return None
    period = pattern.period
    if period is not None and period <= MAX_PERIOD and all(pattern.allowed(token, token) for token in range(period)):
        # every token reads itself
        return None
    try:
        with bounded("Looking for tokens without keys", share=SMALL_SHARE):
            return first_keyless(pattern, start, num_tokens - 1, num_tokens)
    except WorkLimitError:
        # it is only for a warning
        return None


def first_keyless(pattern: Pattern, first: int, last: int, num_keys: int) -> int | None:
    """Return the first query of first..last (inclusive) that may read no key; None: none was found.

    >>> from hf_efficient_attn.patterns.bands import Band
    >>> first_keyless(Band(4, -1), 0, 9, 10), first_keyless(Band(4, 0), 0, 9, 10)
    (0, None)
    """
    ranges = [(first, last)]
    while ranges:
        first, last = ranges.pop()
        if pattern.full_key_intervals(first, last, num_keys):
            continue
        if first == last:
            return first
        middle = (first + last) // 2
        ranges += [(middle + 1, last), (first, middle)]
    return None
