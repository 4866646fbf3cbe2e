"""Which global tokens a text has, which tokens belong to which, and who may read whom: found once for all layers.

Shapes: B rows, T long tokens, G global tokens, K levels of links.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from transformers.utils.import_utils import is_tracing

from hf_efficient_attn.layout.tracing import is_exporting
from hf_efficient_attn.layout.transfer import derived, on_host

from .labels import OTHER_CONTEXT, labels_of_offsets

# global tokens of packed rows beyond those of a text of their length, where a config does not say: so many, and one for
# each so many chunks
LEAST_SPARE, CHUNKS_PER_SPARE = 8, 4
TOO_MANY = (
    "A row of packed documents has more chunks than a compiled model of its length has global tokens for. Build it "
    "with spare_chunks of the most documents that a row holds, or do not compile it."
)


@dataclass(frozen=True)
class GlobalInput:
    """The global tokens of a batch, as a call gives them or as chunks of the text.

    Attributes:
        real: which are no padding, bool [B, G].
        links: the numbers of the global tokens of which each long token is a part, int [B, T, K]; −1: of none.
        documents: the number of the packed document of each, [B, G]; None: every row is one.
        contexts: the number of its part of the text, [B, G]: global tokens of different parts have no order; None: all
            are in one order.
        reads_all: which read every long token even where the others read only their own, bool [B, G]; None: none.
    """

    real: Tensor
    links: Tensor
    documents: Tensor | None = None
    contexts: Tensor | None = None
    reads_all: Tensor | None = None


@dataclass(frozen=True)
class Structure:
    """Who may read whom where a global token is one of the two, and the labels of these pairs.

    Attributes:
        long_to_global: which global tokens a long token may read, bool [B, 1, T, G].
        from_global: which global and which long tokens a global token may read, in this order, bool [B, 1, G, G + T].
        linked: which long token is a part of what a global token stands for, bool [B, 1, T, G].
        labels: of pairs of global tokens, int [B or 1, 1, G, G]; None: the model has no labels.
    """

    long_to_global: Tensor
    from_global: Tensor
    linked: Tensor
    labels: Tensor | None

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Structure":
        """Return the structure on a device: accelerate so moves what a layer is called with."""
        named = {each.name: getattr(self, each.name) for each in fields(self)}
        moved = {name: each.to(device, non_blocking=non_blocking) for name, each in named.items() if each is not None}
        return replace(self, **moved)


def find_chunks(config: Any, states: Tensor, real: Tensor | None, documents: Tensor | None) -> GlobalInput:
    """Return a global token for every chunk of neighbouring real tokens of a document, counted from its first.

    Args:
        states: [B, T, X], of which only shape and device matter.
        real: which tokens are no padding, bool [B, T]; None: all.
        documents: the number of each token's packed document, [B, T]; None: every row is one.
    """
    batch_size, tokens = states.shape[:2]
    chunk_tokens = config.chunk_tokens
    num_global = (tokens + chunk_tokens - 1) // chunk_tokens
    if is_exporting():
        # a quotient of a length that is any is no size of a program
        torch._check(tokens <= config.max_position_embeddings)
        num_global = -(-config.max_position_embeddings // chunk_tokens)
    if documents is not None:
        spare = config.spare_chunks
        spare = LEAST_SPARE + num_global // CHUNKS_PER_SPARE if spare is None else spare
        return _packed_chunks(real, documents, chunk_tokens, num_global + spare)
    numbers = torch.arange(num_global, device=states.device).unsqueeze(0)
    if real is None:
        index = torch.arange(tokens, device=states.device)
        links = (index // chunk_tokens).expand(batch_size, -1)
        return GlobalInput((numbers * chunk_tokens < tokens).expand(batch_size, -1), links.unsqueeze(-1))
    place = real.long().cumsum(1) - 1
    links = torch.where(real, place // chunk_tokens, -1)
    return GlobalInput(numbers * chunk_tokens < real.sum(1, keepdim=True), links.unsqueeze(-1))


def _packed_chunks(real: Tensor | None, documents: Tensor, chunk_tokens: int, num_global: int) -> GlobalInput:
    starts = derived(chunk_starts, real, documents, chunk_tokens)
    known = torch.ones_like(starts) if real is None else real
    if is_tracing(starts):
        # the sizes of a program cannot depend on what positions say
        torch._assert_async((starts.sum(1) <= num_global).all(), TOO_MANY)
    else:
        num_global = max(num_global, int(on_host(starts).sum(1).max()) if len(starts) else 0)
    links = torch.where(known, starts.long().cumsum(1) - 1, num_global).clamp(max=num_global)
    # the last column is that of masked tokens
    owners = documents.new_full((documents.shape[0], num_global + 1), -1).scatter(1, links, documents)[:, :-1]
    return GlobalInput(owners >= 0, links.where(known, -1).unsqueeze(-1), owners)


def chunk_starts(real: Tensor | None, documents: Tensor, chunk_tokens: int) -> Tensor:
    """Return which tokens are the first of a chunk, bool [B, T].

    >>> chunk_starts(None, torch.tensor([[0, 0, 0, 1, 1]]), 2).int().tolist()
    [[1, 0, 1, 1, 0]]
    """
    documents = documents.long()
    known = torch.ones_like(documents, dtype=torch.bool) if real is None else real
    rank, last = known.long().cumsum(1) - 1, documents.shape[1]
    first = torch.full_like(documents, last).scatter_reduce(1, documents, torch.where(known, rank, last), "amin")
    return known & ((rank - first.gather(1, documents)) % chunk_tokens == 0)


def build_structure(config: Any, tokens: GlobalInput, real: Tensor | None, documents: Tensor | None) -> Structure:
    """Return the pairs and labels of a batch.

    Args:
        real, documents: of the long tokens, as in `find_chunks`.
    """
    num_global = tokens.real.shape[1]
    numbers = torch.arange(num_global, device=tokens.real.device)
    linked = (tokens.links.unsqueeze(2) == numbers.view(-1, 1)).any(-1) & tokens.real.unsqueeze(1)
    pairs = tokens.real.unsqueeze(1).expand(-1, tokens.links.shape[1], -1)
    if real is not None:
        pairs = pairs & real.unsqueeze(-1)
    among = tokens.real.unsqueeze(1) & tokens.real.unsqueeze(2)
    if documents is not None:
        pairs = pairs & (documents.unsqueeze(2) == tokens.documents.unsqueeze(1))
        among = among & (tokens.documents.unsqueeze(2) == tokens.documents.unsqueeze(1))
    read = linked if tokens.reads_all is None else linked | tokens.reads_all.unsqueeze(1)
    to_global = pairs & linked if config.hard_long_to_global else pairs
    to_long = (pairs & read if config.hard_global_to_long else pairs).transpose(1, 2)
    return Structure(
        # layers keep these tables for their backward pass: all of them the same
        *(each.unsqueeze(1) for each in (to_global, torch.cat((among, to_long), -1), linked)),
        labels=None if config.relative_vocab_size is None else _labels(config, tokens, numbers),
    )


def _labels(config: Any, tokens: GlobalInput, numbers: Tensor) -> Tensor:
    labels = labels_of_offsets(numbers - numbers.unsqueeze(-1), config.max_relative_distance)[None, None]
    if tokens.contexts is None:
        return labels
    other = tokens.contexts.unsqueeze(2) != tokens.contexts.unsqueeze(1)
    return torch.where(other.unsqueeze(1), 2 * config.max_relative_distance + OTHER_CONTEXT, labels)
