"""Fields and checks of all configs with spans, and the window of keys that heads can attend to."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor
from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.attention.sharded.shards import HEADS, SequenceShards
from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.layout.cache import cached
from hf_efficient_attn.layout.token_mask import NO_MASK, TokenMask
from hf_efficient_attn.messages import shown
from hf_efficient_attn.models.spans.module import KINDS, SpanBounds, Spans
from hf_efficient_attn.patterns.bands import Band
from hf_efficient_attn.patterns.pattern import Pattern

# The keys that heads with spans can attend to, and the heads that are computed together.


# the keys of a group are rounded up to a multiple of this, so that few layouts are compiled while spans change
CHUNK_TOKENS = 32
# up to this number of queries, as in decoding, another call may cost more than the keys that it saves
FEW_QUERIES = 8
# with few queries, attention of all heads to this many keys takes less time than another call
CHEAP_KEYS = 256


@dataclass(frozen=True)
class SpanWindow:
    """The nearest `limit` keys of a query, to which a head can attend.

    Attributes:
        limit, ramp: S and R, in tokens.
        include_self: whether the nearest key is the query itself; False: the key before it.
        is_causal: whether all keys are before the query; False: there are also `limit` keys after it.
    """

    limit: int
    ramp: int
    include_self: bool
    is_causal: bool

    @property
    def shift(self) -> int:
        """The distance of the nearest key."""
        return 0 if self.include_self else 1

    def num_keys(self, span: float) -> int:
        """Return the number of keys on one side that have weight in a head with this span."""
        return min(self.limit, ceil(span) + self.ramp)

    def band(self, num_keys: int) -> Pattern:
        """Return the band of the nearest `num_keys` keys."""
        left = num_keys - 1 + self.shift
        return Band(left, -self.shift if self.is_causal else left)


@dataclass(frozen=True)
class SpanGroup:
    """Heads that are computed together.

    Attributes:
        heads: their indices.
        num_inner: how many of the nearest keys are not masked at all (soft mask 1) in all of these heads.
        num_keys: how many of the nearest keys may have weight in any of these heads.
    """

    heads: tuple[int, ...]
    num_inner: int
    num_keys: int


def span_groups(
    lowest: Sequence[float], highest: Sequence[float], window: SpanWindow, num_queries: int
) -> list[SpanGroup]:
    """Return groups of heads that need the same number of chunks; spans lie between `lowest` and `highest`.

    >>> window = SpanWindow(limit=1024, ramp=32, include_self=False, is_causal=True)
    >>> span_groups([0.0, 500.0, 3.0], [0.0, 500.0, 3.0], window, 1024)
    [SpanGroup(heads=(0,), num_inner=1, num_keys=32), SpanGroup(heads=(2,), num_inner=1, num_keys=64), \
SpanGroup(heads=(1,), num_inner=481, num_keys=544)]
    """

    def reach(head: int) -> tuple[int, int]:
        first = floor(max(lowest[head], 0.0)) // CHUNK_TOKENS * CHUNK_TOKENS
        num_keys = min(window.limit, ceil(window.num_keys(highest[head]) / CHUNK_TOKENS) * CHUNK_TOKENS)
        # at the limit the ramp lies beyond all keys
        return (num_keys, num_keys) if lowest[head] >= window.limit else (num_keys, min(first + 1, num_keys))

    members: dict[tuple[int, int], list[int]] = {}
    for head in range(len(lowest)):
        members.setdefault(reach(head), []).append(head)
    groups = [SpanGroup(tuple(members[key]), key[1], key[0]) for key in sorted(members)]
    return groups if num_queries > FEW_QUERIES else merge_groups(groups)


_kept_groups = cached()(span_groups)


def merge_groups(groups: list[SpanGroup]) -> list[SpanGroup]:
    """Merge groups, so long as no head computes more than twice the keys that it needs, or more than `CHEAP_KEYS`.

    >>> merge_groups([SpanGroup((0,), 1, 64), SpanGroup((2,), 33, 96), SpanGroup((1,), 481, 544)])
    [SpanGroup(heads=(0, 2), num_inner=1, num_keys=96), SpanGroup(heads=(1,), num_inner=481, num_keys=544)]
    >>> chain = merge_groups([SpanGroup((head,), 1, 256 * 2**head) for head in range(5)])
    >>> [(group.heads, group.num_keys) for group in chain]
    [((0, 1), 512), ((2, 3), 2048), ((4,), 4096)]
    """
    merged: list[SpanGroup] = []
    least = 0
    for group in groups:
        if not merged or group.num_keys > max(2 * least, CHEAP_KEYS):
            # the keys needed by the head with the shortest span in the merged group
            least = group.num_keys
        else:
            last = merged.pop()
            group = together((last, group))
        merged.append(group)
    return merged


def together(groups: Sequence[SpanGroup]) -> SpanGroup:
    """Return one group of all heads of these groups."""
    heads = tuple(sorted(head for group in groups for head in group.heads))
    return SpanGroup(heads, min(group.num_inner for group in groups), max(group.num_keys for group in groups))


def groups_of(
    spans: Tensor | None,
    bounds: SpanBounds | None,
    window: SpanWindow,
    query: Tensor,
    tokens: TokenMask = NO_MASK,
    shards: SequenceShards | None = None,
) -> list[SpanGroup]:
    """Return the groups of a call; without bounds, for example while compiling, one group of all heads and keys."""
    heads = tuple(range(query.shape[1]))
    if spans is None:
        return [SpanGroup(heads, window.limit, window.limit)]
    if bounds is None:
        return [SpanGroup(heads, 1, window.limit)]
    is_compiling = torch.compiler.is_compiling()
    num_queries = FEW_QUERIES + 1 if is_compiling else query.shape[2]
    if shards is not None and tokens.shape is not None:
        # all processes must make the same groups
        num_queries = tokens.shape[1]
    # the compiler cannot trace the counters of a cached function
    find = _kept_groups if bounds.are_constant and not is_compiling else span_groups
    groups = find(bounds.lowest, bounds.highest, window, min(num_queries, FEW_QUERIES + 1))
    return [together(groups)] if shards is not None and shards.mode == HEADS else groups


@dataclass(init=False, repr=False, eq=False)
class SpanFields:
    """Mixin: the fields of attention spans; each family's config documents them."""

    span_limit: int = 1024
    span_ramp: int = 32
    span_penalty: float | int = 2e-6
    span_init: float | int = 0.0
    dynamic_span_bias: float | int = -4.0
    frozen_spans: list[list[float | int]] | None = None


def span_window(config: Any) -> SpanWindow:
    """Return the window of keys that the heads of a model with this config can attend to."""
    return SpanWindow(config.span_limit, config.span_ramp, attends_to_self(config), config.is_causal)


def attends_to_self(config: Any) -> bool:
    """Return whether a token attends to itself, by default only if the model is bidirectional."""
    return bool(not config.is_causal if config.include_self is None else config.include_self)


def checked_window(config: Any, spans: Spans) -> SpanWindow:
    """Return the window of keys that the heads of a layer can attend to.

    Raises:
        ConfigurationError: the limit in the config was changed after the model was built.
    """
    if config.span_limit != spans.limit:
        raise ConfigurationError(
            f"config.span_limit={config.span_limit}, but this model was built with {spans.limit}, and its spans are "
            f"fractions of that limit. Call set_span_limit(model, {config.span_limit}), which keeps their lengths."
        )
    return span_window(config)


def check_spans(config: Any) -> None:
    """Raise ConfigurationError for values of span fields that no model can have."""
    if config.span not in KINDS:
        raise ConfigurationError(f"span={shown(config.span)}; it must be one of: {', '.join(KINDS)}.")
    if not 0 <= config.span_init <= 1:
        raise ConfigurationError(
            f"span_init={config.span_init} must be a fraction of span_limit, from 0 to 1. For {config.span_init:g} "
            f"tokens, set span_init={config.span_init / config.span_limit:g}."
        )
    if config.span_penalty < 0:
        raise ConfigurationError(f"span_penalty={config.span_penalty} must be at least 0.")
    if not config.is_causal and not attends_to_self(config):
        raise ConfigurationError(
            "include_self=False lets tokens attend only to earlier ones, and needs is_causal=True. Leave it out."
        )
    if config.frozen_spans is not None:
        check_frozen(config)


def check_frozen(config: Any) -> None:
    """Convert `frozen_spans` to JSON types, in place, or raise ConfigurationError."""
    if config.span == "dynamic":
        raise ConfigurationError(
            "frozen_spans with span='dynamic': every token has its own span, so a list with one span per head cannot "
            "replace them. Train with span='adaptive'."
        )
    if config.span_penalty:
        raise ConfigurationError(
            f"span_penalty={config.span_penalty} with frozen_spans: frozen spans are not trained, so a penalty has no "
            "effect. Set span_penalty=0.0."
        )
    spans = [[float(span) for span in layer] for layer in config.frozen_spans]
    shape = (config.num_hidden_layers, config.num_attention_heads)
    if len(spans) != shape[0] or any(len(layer) != shape[1] for layer in spans):
        raise ConfigurationError(
            f"frozen_spans has lists of {shown([len(layer) for layer in spans])} spans; it needs one list for each of "
            f"{shape[0]} layers, with one span for each of {shape[1]} heads."
        )
    outside = [span for layer in spans for span in layer if not 0 <= span <= config.span_limit]
    if outside:
        raise ConfigurationError(f"frozen_spans holds {outside[:5]}; spans are 0 to span_limit={config.span_limit}.")
    config.frozen_spans = spans
