"""Terms: the learned parts of scores, looked up for every pair of query and key by a label, or computed from it."""

from dataclasses import asdict, dataclass
from math import floor, inf, log
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import hardtanh, threshold

from hf_efficient_attn.errors import ConfigurationError, InputError
from hf_efficient_attn.messages import shown
from hf_efficient_attn.patterns.bands import Band
from hf_efficient_attn.patterns.interleaved_span_tree import InterleavedSpanTree
from hf_efficient_attn.patterns.pattern import Pattern
from hf_efficient_attn.patterns.serialization import check_integer
from hf_efficient_attn.patterns.span_tree import SizedSpanTree

# less than any nonzero weight of a soft mask, even in float64
NO_WEIGHT = 1e-30


@dataclass(frozen=True)
class Label:
    """A number for every pair of positions; hashable, saved as JSON by `to_dict` and loaded by `from_dict`.

    If a query has several values, the label of a pair says which of them is added to the pair's score. If a query has a
    single value, a number computed from this value and the label is added (`score`, `gradient`).
    """

    kind: ClassVar[str] = ""
    # whether moving query and key by the same number of tokens changes no label
    is_invariant: ClassVar[bool] = False

    @property
    def num_values(self) -> int:
        """The number of values of a query: one per label, counted from 0, or a single one."""
        raise NotImplementedError

    def of(self, query: Tensor, key: Tensor) -> Tensor:
        """Return the label of each pair of positions (int tensors that broadcast)."""
        raise NotImplementedError

    def score(self, value: Tensor, label: Tensor) -> Tensor:
        """Return what is added to the scores of pairs with these values and labels (broadcast); differentiable."""
        return value

    def gradient(self, value: Tensor, label: Tensor, d_score: Tensor) -> Tensor:
        """Return the gradient of the value for each pair, given that of its score; the arguments broadcast."""
        return d_score

    def check(self, values: Tensor) -> None:
        """Raise InputError for values that contradict the label."""

    @property
    def idle(self) -> Pattern | None:
        """The pairs whose scores do not change and have no gradient, so that backends may leave the term out for them.

        None: unknown.
        """
        return None

    def to_dict(self) -> dict[str, Any]:
        """Return the label in JSON types."""
        return {"kind": self.kind, **asdict(self)}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> "Label":
        """Return the label that `to_dict` wrote."""
        fields = dict(data)
        kind = fields.pop("kind", None)
        if kind not in LABELS:
            raise ConfigurationError(f"Label of unknown kind {shown(kind)}. Known kinds: {', '.join(sorted(LABELS))}.")
        return LABELS[kind](**fields)


@dataclass(frozen=True)
class Distance(Label):
    """query - key, clipped to `first` … `last` tokens; label 0 is the distance `first`.

    >>> import torch
    >>> Distance(0, 3).of(torch.tensor(10), torch.tensor([11, 10, 9, 2])).tolist()
    [0, 0, 1, 3]
    """

    first: int
    last: int
    kind: ClassVar[str] = "distance"
    is_invariant: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.last < self.first:
            raise ConfigurationError(f"Distance(first={self.first}, last={self.last}): last must be at least first.")

    @property
    def num_values(self) -> int:
        """One per distance."""
        return self.last - self.first + 1

    def of(self, query: Tensor, key: Tensor) -> Tensor:
        """Return query - key, clipped and counted from `first`."""
        return (query - key).clamp(self.first, self.last) - self.first


@dataclass(frozen=True)
class SoftSpan(Label):
    """The distance x = |query − key| − shift of a key, for the soft mask of a span of z tokens.

    The single value of a query is z. The score of a pair gets log m_z(x) added, where m_z(x) = clamp((R + z − x) / R,
    0, 1): 0 within the span, -inf beyond the ramp of R tokens. Source: Sukhbaatar et al. (arXiv:1905.07799), section
    2.2.

    If a span is a whole number of tokens, the mask has corners at keys. The gradient then leaves out the keys at both
    ends of the ramp, because their left and right derivatives differ.

    >>> import torch
    >>> label = SoftSpan(ramp=2)
    >>> label.score(torch.tensor([1.0]), label.of(torch.tensor(9), torch.arange(5, 10))).exp().tolist()
    [0.0, 0.0, 0.5, 1.0, 1.0]

    Attributes:
        ramp: R, in tokens.
        shift: the distance of the key at x = 0.
        num_inner: how many of the nearest keys lie within every span of the term.
    """

    ramp: int
    shift: int = 0
    num_inner: int = 0
    kind: ClassVar[str] = "soft_span"
    is_invariant: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_integer(self.kind, "ramp", self.ramp, at_least=1)
        check_integer(self.kind, "shift", self.shift, at_least=0)
        check_integer(self.kind, "num_inner", self.num_inner, at_least=0)

    @property
    def num_values(self) -> int:
        """The span."""
        return 1

    @property
    def idle(self) -> Pattern | None:
        """The nearest keys, which lie within all spans."""
        reach = self.num_inner - 1 + self.shift
        return Band(reach, reach) if self.num_inner else None

    def check(self, values: Tensor) -> None:
        """Raise InputError for a span that does not contain the inner keys; on GPUs, an assertion on the device fails,
        for which the host does not wait.
        """
        if not self.num_inner or not values.numel():
            return
        shortest_value = values.detach().amin()
        if values.device.type != "cpu":
            torch._assert_async(shortest_value >= self.num_inner - 1, "SoftSpan: num_inner keys are not in every span.")
            return
        shortest = float(shortest_value)
        if shortest < self.num_inner - 1:
            raise InputError(
                f"SoftSpan says that {self.num_inner} keys are within every span (num_inner), but the shortest span is "
                f"{shortest:g} tokens, which contains {max(0, floor(shortest) + 1)}. Give at most this number, or 0."
            )

    def of(self, query: Tensor, key: Tensor) -> Tensor:
        """Return |query - key| - shift."""
        return (query - key).abs() - self.shift

    def score(self, value: Tensor, label: Tensor) -> Tensor:
        """Return log m_z(x)."""
        room, lowest = self._room(value, label), log(NO_WEIGHT) + 1.0
        # log(0) would take ten times as long, and its gradient would be NaN
        # flex computes scores under transforms, which have no clamp_
        is_seen = torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None
        if is_seen or (torch.is_grad_enabled() and value.requires_grad):
            return threshold(hardtanh(room / self.ramp, NO_WEIGHT, 1.0).log(), lowest, -inf)
        # scores are large, so they are computed in place if no gradient needs them
        return torch.threshold_(room.div_(self.ramp).clamp_(NO_WEIGHT, 1.0).log_(), lowest, -inf)

    def gradient(self, value: Tensor, label: Tensor, d_score: Tensor) -> Tensor:
        """Return d_score / (R + z − x) on the ramp, 0 elsewhere."""
        room = self._room(value, label)
        on_ramp: Tensor = torch.ops.aten.hardtanh_backward(d_score / room, room, 0.0, float(self.ramp))
        return on_ramp

    def _room(self, value: Tensor, label: Tensor) -> Tensor:
        """Return R + z − x, the distance of a key from the end of the ramp, in float32 or float64."""
        value = value.to(torch.promote_types(value.dtype, torch.float32))
        return value + self.ramp - label.to(value.dtype)


@dataclass(frozen=True)
class Slope(Label):
    """|query - key|, for scores that fall with distance: -m · |query - key| is added for a query's single value m.

    Source: Press et al. (arXiv:2108.12409); in ALiBi every head has one slope.
    """

    kind: ClassVar[str] = "slope"
    is_invariant: ClassVar[bool] = True

    @property
    def num_values(self) -> int:
        """The slope."""
        return 1

    def of(self, query: Tensor, key: Tensor) -> Tensor:
        """Return |query - key|."""
        return (query - key).abs()

    def score(self, value: Tensor, label: Tensor) -> Tensor:
        """Return -m · |query - key|."""
        return -value * label

    def gradient(self, value: Tensor, label: Tensor, d_score: Tensor) -> Tensor:
        """Return the gradient of the slope."""
        return -d_score * label


@dataclass(frozen=True)
class SpanRelation(Label):
    """BP-Transformer's relation of a node to one that it attends to (`SizedSpanTree.relation_label`), otherwise 0.

    The labels of a layer index its table of relative positions (Ye et al., arXiv:1911.04070; the authors' code).

    Attributes:
        num_tokens, num_nodes, left_only: the fields of the tree; see `SizedSpanTree`.
        clip_distance: levels above it share the labels of this level.
    """

    num_tokens: int
    num_nodes: int
    clip_distance: int
    left_only: bool = False
    kind: ClassVar[str] = "span_relation"

    @property
    def num_values(self) -> int:
        """2 · num_nodes + 1 per level: the affiliated span, and the nodes to the left and to the right."""
        return (2 * self.num_nodes + 1) * (self.clip_distance + 1)

    def of(self, query: Tensor, key: Tensor) -> Tensor:
        """Return the relation of each pair of nodes."""
        tree = SizedSpanTree(self.num_tokens, self.num_nodes, self.left_only)
        return tree.relation_label(query, key, self.clip_distance).clamp(min=0)


@dataclass(frozen=True)
class InterleavedRelation(Label):
    """BP-Transformer's relation of the nodes of an `InterleavedSpanTree`, the same at every length.

    Attributes:
        num_nodes, left_only: the fields of the tree; see `InterleavedSpanTree`.
        clip_distance: levels above it share the labels of this level.
    """

    num_nodes: int
    clip_distance: int
    left_only: bool = False
    kind: ClassVar[str] = "interleaved_relation"

    @property
    def num_values(self) -> int:
        """The same as for a `SpanRelation`."""
        return (2 * self.num_nodes + 1) * (self.clip_distance + 1)

    def of(self, query: Tensor, key: Tensor) -> Tensor:
        """Return the relation of each pair of nodes; for pairs that the tree does not allow, any number."""
        tree = InterleavedSpanTree(self.num_nodes, self.left_only)
        relation: Tensor = tree.relation_label(query, key, self.clip_distance)
        return relation


KINDS = (Distance, Slope, SoftSpan, SpanRelation, InterleavedRelation)
LABELS: dict[str, type[Label]] = {label.kind: label for label in KINDS}


@dataclass(frozen=True)
class Term:
    """A learned part of the scaled scores: score[b, h, i, j] += label.score(values[b, h, i, label(i, j)], label(i, j)).

    Attributes:
        values: [batch or 1, heads or 1, queries or 1, label.num_values], differentiable. A table per head is
            [1, H, 1, L]; relative position vectors are queries @ table.T, [B, H, N, L]; a span per token is
            [B, H, N, 1].
        label: which value a pair of positions looks up, or what it computes from a single value.
    """

    values: Tensor
    label: Label


def look_up(values: Tensor, labels: Tensor) -> Tensor:
    """Return the value of each pair; a single value of a query applies to all its pairs.

    Shapes: values [..., queries or 1, values of a query] and labels [..., queries, keys] → [..., queries, keys], or a
    tensor that broadcasts to it. Labels of pairs that are not allowed may be out of range.
    """
    num_values = values.shape[-1]
    if num_values == 1:
        return values
    shape = torch.broadcast_shapes(values.shape[:-1], labels.shape[:-1])
    return values.expand(*shape, -1).gather(-1, labels.clamp(0, num_values - 1).expand(*shape, -1))
