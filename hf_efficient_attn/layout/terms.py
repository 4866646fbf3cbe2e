"""Terms: the learned part of a score, looked up for every pair of query and key by a label."""

from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from torch import Tensor

from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.patterns.bands import Band
from hf_efficient_attn.patterns.checks import check_integer
from hf_efficient_attn.patterns.pattern import Pattern
from hf_efficient_attn.patterns.span_tree import SizedSpanTree


@dataclass(frozen=True)
class Label:
    """A number for every pair of positions; hashable, and JSON through `to_dict` and `from_dict`."""

    kind: ClassVar[str] = ""
    # whether moving query and key by the same number of tokens changes no label
    is_invariant: ClassVar[bool] = False

    @property
    def num_labels(self) -> int:
        """How many labels there are; they count from 0."""
        raise NotImplementedError

    def of(self, query: Tensor, key: Tensor) -> Tensor:
        """Return the label of each pair of positions (int tensors that broadcast), between 0 and `num_labels - 1`."""
        raise NotImplementedError

    @property
    def idle(self) -> Pattern | None:
        """Pairs whose value is 0 and wants no gradient, so that a backend need not look it up; None: not known."""
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
            raise ConfigurationError(f"Label of unknown kind {kind!r}. Known kinds: {', '.join(sorted(LABELS))}.")
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
    def num_labels(self) -> int:
        """One label a distance."""
        return self.last - self.first + 1

    def of(self, query: Tensor, key: Tensor) -> Tensor:
        """Return query - key, clipped and counted from `first`."""
        return (query - key).clamp(self.first, self.last) - self.first


@dataclass(frozen=True)
class Ramp(Label):
    """How many tokens the distance |query - key| lies beyond `start`, at most `length`; 0: at `start` or nearer.

    For terms that act only at the far end of a window, as the soft mask of an adaptive span does (Sukhbaatar et al.,
    arXiv:1905.07799). The value of label 0 must be 0: backends may read these pairs without the term.

    >>> import torch
    >>> Ramp(2, 3).of(torch.tensor(9), torch.arange(10)).tolist()
    [3, 3, 3, 3, 3, 2, 1, 0, 0, 0]
    """

    start: int
    length: int
    kind: ClassVar[str] = "ramp"
    is_invariant: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_integer(self.kind, "start", self.start, at_least=0)
        check_integer(self.kind, "length", self.length, at_least=1)

    @property
    def num_labels(self) -> int:
        """Label 0, and one a token of the ramp."""
        return self.length + 1

    @property
    def idle(self) -> Pattern:
        """Everything before the ramp."""
        return Band(self.start, self.start)

    def of(self, query: Tensor, key: Tensor) -> Tensor:
        """Return |query - key| - start, cut to 0 … length."""
        return ((query - key).abs() - self.start).clamp(0, self.length)


@dataclass(frozen=True)
class SpanRelation(Label):
    """The relation of BP-Transformer between a node and one it reads (`SizedSpanTree.relation_label`); else 0.

    The labels of a layer index its table of relative positions (Ye et al., arXiv:1911.04070; the authors' code).

    Attributes:
        num_tokens, num_nodes, left_only: of the tree; see `SizedSpanTree`.
        clip_distance: levels above it share the labels of this level.
    """

    num_tokens: int
    num_nodes: int
    clip_distance: int
    left_only: bool = False
    kind: ClassVar[str] = "span_relation"

    @property
    def num_labels(self) -> int:
        """2 · num_nodes + 1 labels a level: the affiliated span, and the nodes to the left and to the right."""
        return (2 * self.num_nodes + 1) * (self.clip_distance + 1)

    def of(self, query: Tensor, key: Tensor) -> Tensor:
        """Return the relation of each pair of nodes."""
        tree = SizedSpanTree(self.num_tokens, self.num_nodes, self.left_only)
        return tree.relation_label(query, key, self.clip_distance).clamp(min=0)


LABELS: dict[str, type[Label]] = {label.kind: label for label in (Distance, Ramp, SpanRelation)}


@dataclass(frozen=True)
class Term:
    """A bias added to the scaled scores: score[b, h, i, j] += values[b, h, i, label(i, j)].

    Attributes:
        values: [batch or 1, heads or 1, queries or 1, labels], differentiable. A table per head is [1, H, 1, L];
            relative position vectors are queries @ table.T, [B, H, N, L].
        label: which value a pair of positions looks up.
    """

    values: Tensor
    label: Label
