"""A step of decoding within spans: a row of scores needs no pattern, and spans that stay have their masks kept."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.attention.dense_matrix import dense_attention
from hf_efficient_attn.layout.cache import cached
from hf_efficient_attn.models.spans.bounds import SpanBounds
from hf_efficient_attn.models.spans.groups import CHEAP_KEYS, SpanGroup, SpanWindow
from hf_efficient_attn.models.spans.module import log_soft_mask


@dataclass(frozen=True)
class HeadRange:
    """Neighbouring heads that are computed at once, so that their keys are views.

    Attributes:
        first, stop: the heads.
        num_inner, num_keys: as of a `SpanGroup`, for those of the heads whose output is taken.
    """

    first: int
    stop: int
    num_inner: int
    num_keys: int


@dataclass(frozen=True)
class StepPlan:
    """How the heads of a layer are computed.

    Attributes:
        ranges: what is computed.
        taken: (range, first, stop), in the order of the heads: whose outputs are those of which range.
    """

    ranges: tuple[HeadRange, ...]
    taken: tuple[tuple[int, int, int], ...]


def attend_nearest(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: Tensor | None,
    bounds: SpanBounds | None,
    window: SpanWindow,
    groups: Sequence[SpanGroup],
    scale: float,
    dropout: float,
    position_table: Tensor | None,
) -> Tensor:
    """Return the output [B, 1, H, D] of a single query, the last position.

    The arguments are those of `attend_spans`, and the groups of its heads.
    """
    plan = step_plan(tuple(groups))
    end = key.shape[2] - window.shift
    needs_gradient = spans is not None and torch.is_grad_enabled() and spans.requires_grad
    lasting = None if bounds is None or not bounds.are_lasting or needs_gradient else bounds.lowest
    outputs = []
    for each in plan.ranges:
        heads, num_keys = slice(each.first, each.stop), min(each.num_keys, end)
        own, bias = query[:, heads], None
        if spans is not None and each.num_inner < each.num_keys:
            if lasting is None:
                bias = nearest_mask(spans[:, heads], window, each.num_inner, num_keys)
            else:
                bias = kept_mask(lasting[heads], window, each.num_keys, spans.dtype, spans.device)[..., -num_keys:]
        if position_table is not None:
            scores = (own @ position_table[:num_keys].to(own.dtype).T * scale).flip(-1)
            bias = scores if bias is None else scores + bias
        read = (states[:, heads, end - num_keys : end] for states in (key, value))
        outputs.append(dense_attention(own, *read, None, bias, scale, dropout, False)[0])
    taken = [
        outputs[index][:, first - plan.ranges[index].first : stop - plan.ranges[index].first]
        for index, first, stop in plan.taken
    ]
    return (taken[0] if len(taken) == 1 else torch.cat(taken, 1)).transpose(1, 2)


def nearest_mask(spans: Tensor, window: SpanWindow, num_inner: int, num_keys: int) -> Tensor:
    """Return log m_z of the nearest keys, [..., num_keys], the nearest one last."""
    # before the ramp the mask changes nothing
    num_free = min(max(0, num_inner - 1), num_keys)
    return pad(log_soft_mask(spans, num_free, num_keys - num_free, window.ramp), (num_free, 0)).flip(-1)


@cached()
def kept_mask(
    spans: tuple[float, ...], window: SpanWindow, num_keys: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return `nearest_mask` of spans that are numbers, [1, H, 1, num_keys]."""
    return nearest_mask(torch.tensor(spans, dtype=dtype, device=device)[None, :, None], window, 0, num_keys)


@cached()
def step_plan(groups: tuple[SpanGroup, ...]) -> StepPlan:
    """Return how few calls compute the heads of these groups, without copies of their keys.

    A few keys are read by all heads between those that need them, whose own outputs come from other ranges.

    >>> step_plan((SpanGroup((0, 2, 3), 1, 64), SpanGroup((1,), 481, 544)))
    StepPlan(ranges=(HeadRange(first=0, stop=4, num_inner=1, num_keys=64), \
HeadRange(first=1, stop=2, num_inner=481, num_keys=544)), taken=((0, 0, 1), (1, 1, 2), (0, 2, 4)))
    """
    ranges: list[HeadRange] = []
    owners: dict[int, int] = {}
    for group in groups:
        last = None
        for head in group.heads:
            if last is None or (head > last + 1 and group.num_keys > CHEAP_KEYS):
                ranges.append(HeadRange(head, head + 1, group.num_inner, group.num_keys))
            else:
                ranges[-1] = HeadRange(ranges[-1].first, head + 1, group.num_inner, group.num_keys)
            owners[head], last = len(ranges) - 1, head
    taken: list[tuple[int, int, int]] = []
    for head in sorted(owners):
        if taken and taken[-1][0] == owners[head]:
            taken[-1] = (*taken[-1][:2], head + 1)
        else:
            taken.append((owners[head], head, head + 1))
    return StepPlan(tuple(ranges), tuple(taken))
