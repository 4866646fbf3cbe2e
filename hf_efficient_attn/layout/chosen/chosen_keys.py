"""What all choices of keys have in common: tensors that travel in a call, their shapes, and which heads share them."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_efficient_attn.errors import InputError
from hf_efficient_attn.layout.chosen.tiles import Sizes, Tiles, TileWork
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.messages import shown
from hf_efficient_attn.patterns.checks import is_integer

INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
SOFTMAX, MEAN = "softmax", "mean"
POSITIONS, PLACES = "positions", "places"
DOCUMENT, AXIS = "document", "axis"


@dataclass(frozen=True)
class States:
    """What the queries and keys of a call are like, as far as a choice must fit them."""

    batch_size: int
    num_heads: int
    num_key_heads: int
    num_queries: int
    num_keys: int
    device: torch.device
    is_cross: bool = False


class ChosenKeys:
    """Which keys each query reads, as tensors made from what tokens say; frozen, and compared by identity.

    The pattern, the documents and the masks of the call leave out what they do not allow. Choices are made for the
    heads of the call: a tensor's second dimension is 1 if all of them share a choice, the number of key heads if those
    do that read the same key head, or the number of query heads.
    """

    kind: ClassVar[str] = ""
    # the fields that are tensors, and all others, in the order of the class's arguments
    tensor_names: ClassVar[tuple[str, ...]] = ()
    number_names: ClassVar[tuple[str, ...]] = ()
    # how the rows of several groups become one: one softmax, or the mean of several
    join: str = SOFTMAX
    # what the labels of terms count: positions, or places within a group
    labels_count: str = POSITIONS
    # from how many places after its own on a query reads the keys of its group; None: all
    first_place: int | None = None
    reads_self_last: bool = False
    # whether queries read keys at length 1
    unit_keys: bool = False
    # what places are counted from: documents, or the axis
    counted_from: str = AXIS
    # whether most of its tiles are read as a whole where a pattern allows all keys up to a query, so that masks are few
    has_full_tiles: ClassVar[bool] = False
    # whether a mask of its tiles is that of all heads that are computed together, so that their number does not matter
    shares_masks: ClassVar[bool] = False
    # whether what is listed for each query are blocks of neighbouring keys (`ChosenBlocks`)
    are_blocks: ClassVar[bool] = False

    @property
    def tensors(self) -> list[Tensor | None]:
        """The tensors."""
        return [getattr(self, name) for name in self.tensor_names]

    @property
    def num_choosing_heads(self) -> int:
        """How many heads choose apart: 1, the number of key heads, or that of query heads."""
        return max(each.shape[1] for each in self.tensors if each is not None)

    @property
    def numbers(self) -> list[Any]:
        """The values of all other fields."""
        return [getattr(self, name) for name in self.number_names]

    @property
    def traits(self) -> Hashable:
        """What the cost of the choice may depend on: everything but the contents of its tensors."""
        shapes = tuple(None if each is None else each.shape for each in self.tensors)
        return self.kind, shapes, tuple(self.numbers)

    @property
    def needs_groups(self) -> bool:
        """Whether groups have outputs or labels of their own, and not only pairs that count once or more often."""
        return self.join != SOFTMAX or self.labels_count != POSITIONS

    def has_single_rows(self, layout: Layout) -> bool:
        """Return whether the tiles are known to hold each query at most once, with all keys that it reads."""
        return False

    def of_query(self, query: int, position: int) -> "ChosenKeys":
        """Return the choice of one query of the call, as that of a call with this query alone.

        query, position: its number in the call, and its position on the axis.
        """
        raise NotImplementedError

    def counts(
        self, layout: Layout, tokens: TokenMask, num_key_heads: int, query_start: Tensor | None = None
    ) -> Tensor:
        """Return how often each pair is chosen, whatever masks say: int [batch or 1, heads or 1, queries, keys].

        query_start: as for `allowed_pairs`.
        """
        raise NotImplementedError

    def tiles(self, layout: Layout, tokens: TokenMask, sizes: Sizes, only: Tensor | None = None) -> Iterator[Tiles]:
        """Yield tiles that together hold every chosen pair as often as it counts; masks are laid over them.

        only: of which queries, bool [batch, heads, queries]; None: of all. Asked where a query reads itself last.
        """
        raise NotImplementedError

    def work(self, layout: Layout, sizes: Sizes) -> TileWork:
        """Return how much the tiles hold, without looking at what the tensors say."""
        raise NotImplementedError

    def most_pairs(self, layout: Layout, num_key_heads: int) -> int:
        """Return how many pairs can be chosen in all heads of one example, whatever the tensors say."""
        return self.work(layout, Sizes(1, layout.num_heads, num_key_heads, 0)).num_pairs

    def check(self, states: States) -> None:
        """Raise InputError for tensors or numbers that do not fit the call."""
        raise NotImplementedError

    def check_tensor(self, name: str, states: States, rest: dict[str, int | None]) -> None:
        """Raise InputError unless a field is an integer tensor [batch or 1, heads, …] on the device of the call.

        rest: what the other dimensions count, and how many there must be; None: any number.
        """
        tensor, said = getattr(self, name), f"{type(self).__name__}.{name}"
        if not isinstance(tensor, Tensor):
            raise InputError(f"{said} is a {type(tensor).__name__}; it must be a tensor of integers.")
        if tensor.dtype not in INTEGERS:
            raise InputError(f"{said} has dtype {tensor.dtype}; it must hold integers. Use {name}.long().")
        if tensor.device != states.device:
            raise InputError(f"{said} is on {tensor.device}, and q, k and v on {states.device}; move it there.")
        heads = (1, states.num_key_heads, states.num_heads)
        fits = tensor.ndim == 2 + len(rest) and tensor.shape[0] in (1, states.batch_size) and tensor.shape[1] in heads
        if not fits or any(n not in (None, size) for n, size in zip(rest.values(), tensor.shape[2:], strict=True)):
            listed = ", ".join(what if count is None else f"{count} {what}" for what, count in rest.items())
            raise InputError(
                f"{said} has shape {list(tensor.shape)}; it must be [{_either(1, states.batch_size)} examples, "
                f"{_either(*heads)} heads, {listed}]."
            )

    def check_count(self, name: str, at_least: int) -> None:
        """Raise InputError unless a field is an integer of at least so much."""
        value = getattr(self, name)
        if not is_integer(value) or value < at_least:
            raise InputError(f"{type(self).__name__}.{name}={shown(value)} must be an integer of at least {at_least}.")

    def check_word(self, name: str, words: Sequence[str]) -> None:
        """Raise InputError unless a field is one of these words."""
        value = getattr(self, name)
        if value not in words:
            raise InputError(f"{type(self).__name__}.{name}={shown(value)} must be {_either(*map(shown, words))}.")


def _either(*values: Any) -> str:
    """Return different values as a text, in their order."""
    return " or ".join(map(str, dict.fromkeys(values)))


def in_range(numbers: Tensor, count: int) -> Tensor:
    """Return the numbers from 0 to count - 1 as they are, and `count` instead of all others, as int64."""
    numbers = numbers.long()
    return torch.where((numbers >= 0) & (numbers < count), numbers, count)


def near_places(first_place: int, num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """Return which pairs of places `first_place` allows, bool [queries, keys].

    >>> near_places(-1, 2, 3, torch.device("cpu")).int().tolist()
    [[1, 1, 1], [1, 1, 1]]
    >>> near_places(1, 2, 3, torch.device("cpu")).int().tolist()
    [[0, 1, 1], [0, 0, 1]]
    """
    queries, keys = (torch.arange(count, device=device) for count in (num_queries, num_keys))
    return keys >= queries[:, None] + first_place


def of_heads(tensor: Tensor, num_heads: int) -> Tensor:
    """Return a tensor [batch, heads or 1, ...] of all heads, or of 1; heads that share key heads are neighbours."""
    return tensor if tensor.shape[1] in (1, num_heads) else tensor.repeat_interleave(num_heads // tensor.shape[1], 1)
