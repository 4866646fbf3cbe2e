"""How a sequence is divided among the processes of a mesh: each holds a shard, consecutive tokens of every example."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from hf_efficient_attn.errors import InputError
from hf_efficient_attn.layout.cache import cached
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.layout.score_terms import Term
from hf_efficient_attn.layout.token_mask import Document, TokenMask
from hf_efficient_attn.layout.transfer import on_host
from hf_efficient_attn.patterns.intervals import Intervals, complement, intersect, normalize, size, union
from hf_efficient_attn.patterns.pattern import Pattern

AUTO, HALO, HEADS = "auto", "halo", "heads"
MODES = (AUTO, HALO, HEADS)

# the attribute in which a module keeps its `SequenceShards`
SHARDS = "_sequence_shards"
# (first, stop) of the tokens of every process
Bounds = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class SequenceShards:
    """The processes that share a sequence, in the order of its tokens.

    Attributes:
        mesh: a `torch.distributed.device_mesh.DeviceMesh` of one dimension.
        mode: how attention gets what other processes hold: "halo", "heads", or "auto" for the one that sends less.
    """

    mesh: Any
    mode: str = AUTO

    def __deepcopy__(self, memo: Any) -> "SequenceShards":
        # processes cannot be copied with a model
        return self

    @property
    def group(self) -> Any:
        """The process group of the collectives."""
        return self.mesh.get_group()

    @property
    def rank(self) -> int:
        """The index of this process."""
        return int(self.mesh.get_local_rank())

    @property
    def size(self) -> int:
        """The number of processes."""
        return int(self.mesh.size())

    def own(self, num_tokens: int) -> slice:
        """Return which of the `num_tokens` tokens of a sequence this process holds."""
        return slice(*shard_bounds(num_tokens, self.size)[self.rank])


def shard_bounds(num_tokens: int, num_shards: int) -> Bounds:
    """Return (first, stop) of every shard; the first shards have one token more if the length is not divisible.

    >>> shard_bounds(10, 4)
    ((0, 3), (3, 6), (6, 8), (8, 10))

    Raises:
        InputError: there are fewer tokens than shards.
    """
    if num_tokens < num_shards:
        raise InputError(
            f"A text of {num_tokens} tokens cannot be split over {num_shards} processes. Pass at least one token per "
            "process."
        )
    length, longer = divmod(num_tokens, num_shards)
    edges = [shard * length + min(shard, longer) for shard in range(num_shards + 1)]
    return tuple(zip(edges, edges[1:], strict=False))


def shards_of(module: nn.Module) -> SequenceShards | None:
    """Return the processes that share the sequences of a module; None if it has whole sequences."""
    # torch can trace `getattr`
    return getattr(module, SHARDS, None)


def why_whole(config: Any) -> str | None:
    """Return why `shard_sequence` takes no model with this config, as the end of a sentence; None if it may take it."""
    if not getattr(config, "can_shard_sequence", True):
        return (
            f"models of the family {config.model_type} need whole sequences. shard_sequence takes the families "
            "sparse_transformer, adaptive_span and simplified_transformer, and decoders and encoders of transformers "
            'with attn_implementation="efficient".'
        )
    if config.is_encoder_decoder or config.get_text_config() is not config:
        return "it combines several models. Shard a text-only decoder or encoder."
    return None


# Which keys of other processes each process needs for its queries, and which queries are sent to the keys instead.
#
# Every process computes this for all processes, from the pattern and the documents, without communication.


@dataclass(frozen=True)
class TokenSequence:
    """What attention must know about an example besides its contents.

    Attributes:
        documents: see `TokenMask.documents`.
        tokens: intervals of the positions that are not masked.
    """

    documents: tuple[Document, ...]
    tokens: Intervals


@dataclass(frozen=True)
class WideQueries:
    """Queries of a document that are sent to their keys, because this takes less traffic than to send the keys.

    Attributes:
        sequence: the index of the sequence among the distinct sequences of the batch.
        document: a document of the sequence.
        queries: intervals of positions in the document.
    """

    sequence: int
    document: Document
    queries: Intervals

    @property
    def positions(self) -> Intervals:
        """The intervals of positions on the axis of the sequence."""
        return shifted(self.queries, self.document.start)


@dataclass(frozen=True)
class KeyExchange:
    """What the processes exchange in a layer.

    Attributes:
        wanted: intervals of positions whose keys and values each process gets from the others.
        wide: the queries that are sent to all processes.
        first: the positions of `wanted` that travel before the others: a few tokens to which everything attends, so
            that most rows need not wait for the others. If it is empty in all processes, everything travels together.
    """

    wanted: tuple[Intervals, ...]
    wide: tuple[WideQueries, ...]
    first: tuple[Intervals, ...]

    @property
    def wide_positions(self) -> Intervals:
        """The positions of queries that are wide in any sequence."""
        return union(*(each.positions for each in self.wide))


def sequences_of(tokens: TokenMask, batch_size: int, num_tokens: int) -> tuple[TokenSequence, ...]:
    """Return the sequence of each example of a batch; `tokens` is the mask of whole sequences."""
    documents = tokens.documents(batch_size, num_tokens)
    masks = None if tokens.key_mask is None else on_host(tokens.key_mask)
    return tuple(
        TokenSequence(of_example, ((0, num_tokens),) if masks is None else true_intervals(masks[example]))
        for example, of_example in enumerate(documents)
    )


def true_intervals(mask: Tensor) -> Intervals:
    """Return the intervals in which a mask is True.

    >>> true_intervals(torch.tensor([True, True, False, True]))
    ((0, 2), (3, 4))
    """
    edges = torch.nn.functional.pad(mask.int(), (1, 1)).diff().nonzero()[:, 0].tolist()
    return tuple(zip(edges[::2], edges[1::2], strict=True))


@cached()
def key_exchange(
    layout: Layout, sequences: tuple[TokenSequence, ...], bounds: Bounds, may_send_queries: bool, group: int
) -> KeyExchange:
    """Return what the processes exchange in a layer, if they exchange keys.

    Args:
        layout: the layout of whole sequences.
        sequences: the distinct sequences of the batch.
        may_send_queries: whether queries may be wide.
        group: the number of query heads per key head, the factor by which a query is larger than a key.
    """
    wanted: list[list[Intervals]] = [[] for _ in bounds]
    wide: list[WideQueries] = []
    for number, sequence in enumerate(sequences):
        for document in sequence.documents:
            patterns = document_patterns(layout, document)
            candidates = named_queries(patterns, document) if may_send_queries else ()
            for rank, (first, stop) in enumerate(bounds):
                start = document.start
                own = intersect(((first, stop),), ((start, document.stop),))
                own = shifted(own, -start)
                if not own:
                    continue
                named = intersect(candidates, own)
                narrow = without(own, named)
                keys = read_keys(patterns, narrow, document)
                every = union(keys, read_keys(patterns, named, document)) if named else keys
                available = shifted(without(sequence.tokens, ((first, stop),)), -start)
                num_more = size(intersect(every, available)) - size(intersect(keys, available))
                if num_more > size(named) * (len(bounds) - 1) * group:
                    wide.append(WideQueries(number, document, named))
                else:
                    keys = every
                wanted[rank].append(shifted(intersect(keys, available), start))
    merged = tuple(union(*each) for each in wanted)
    return KeyExchange(merged, tuple(wide), first_keys(layout, sequences, bounds, merged))


def first_keys(
    layout: Layout, sequences: Sequence[TokenSequence], bounds: Bounds, wanted: Sequence[Intervals]
) -> tuple[Intervals, ...]:
    """Return which of the wanted positions travel first: those that patterns name, such as global tokens, or none.

    They travel first if the middle query of at least one process can then be computed while the others travel.
    """
    documents = [
        (document, document_patterns(layout, document)) for sequence in sequences for document in sequence.documents
    ]
    named = union(*(shifted(named_queries(patterns, each), each.start) for each, patterns in documents))
    first = tuple(intersect(named, each) for each in wanted)
    for (start, stop), every, early in zip(bounds, wanted, first, strict=True):
        middle = (start + stop) // 2
        for document, patterns in documents:
            if early and document.start <= middle < document.stop:
                place = middle - document.start
                read = shifted(read_keys(patterns, ((place, place + 1),), document), document.start)
                if intersect(read, early) and not intersect(read, without(every, early)):
                    return first
    return tuple(() for _ in bounds)


def document_patterns(layout: Layout, document: Document) -> tuple[Pattern, ...]:
    """Return the pattern of each head, drawn for the length of a document."""
    return layout.of_document(document).head_patterns()


def named_queries(patterns: Iterable[Pattern], document: Document) -> Intervals:
    """Return the positions that patterns name, such as global tokens: only these queries may attend to everything."""
    length = document.stop - document.start
    named = {found for pattern in set(patterns) for found in pattern.global_positions()}
    blocks = ((each.position * each.block_tokens, (each.position + 1) * each.block_tokens) for each in named)
    return intersect(normalize(blocks), ((0, length),))


def read_keys(patterns: Sequence[Pattern], queries: Intervals, document: Document) -> Intervals:
    """Return intervals with all keys that any of the queries may attend to, in positions of the document."""
    length = document.stop - document.start
    return union(
        *(pattern.key_intervals(start, stop - 1, length) for pattern in set(patterns) for start, stop in queries)
    )


def without(intervals: Intervals, others: Intervals) -> Intervals:
    """Return the positions of `intervals` that lie in none of `others`."""
    return intersect(intervals, complement(others, intervals[-1][1])) if intervals else ()


def shifted(intervals: Intervals, distance: int) -> Intervals:
    """Return the positions moved by a distance; those before position 0 are left out."""
    return tuple((max(0, start + distance), stop + distance) for start, stop in intervals if stop + distance > 0)


# What the processes that share sequences compute together in one layer, except the states.


@dataclass(frozen=True)
class Scores:
    """How scores are computed, except their pattern: arguments of `build_call` with these names, and the backend."""

    scale: float
    terms: tuple[Term, ...] = ()
    sinks: Tensor | None = None
    softcap: float | None = None
    dropout: float = 0.0
    backend: str = "auto"


@dataclass(frozen=True, eq=False)
class ShardedCall:
    """A call of the attention of one layer, the same in all processes except for the values of terms.

    Attributes:
        layout: the layout of whole sequences.
        tokens: the mask of whole sequences.
        shards: the processes.
        bounds: the tokens that each process holds.
        examples: the sequence of every example of the batch.
        exchange: what is exchanged if keys are exchanged.
        scores: the settings of scores, with terms for the queries of this process.
    """

    layout: Layout
    tokens: TokenMask
    shards: SequenceShards
    bounds: Bounds
    examples: tuple[TokenSequence, ...]
    exchange: KeyExchange
    scores: Scores

    @cached_property
    def rank(self) -> int:
        """The index of this process."""
        return self.shards.rank

    @property
    def own(self) -> tuple[int, int]:
        """The range of this process's tokens: the first, and the one after the last."""
        return self.bounds[self.rank]

    @cached_property
    def sequences(self) -> tuple[TokenSequence, ...]:
        """The distinct sequences of the batch."""
        return tuple(dict.fromkeys(self.examples))

    def members(self, sequence: TokenSequence, device: torch.device) -> Tensor:
        """Return the indices of the examples that are this sequence."""
        return torch.tensor([place for place, each in enumerate(self.examples) if each == sequence], device=device)
