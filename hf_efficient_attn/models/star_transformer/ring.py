"""The neighbours and the relay of each token, found once for all updates of a call.

Every document of a row is a separate star with its own ring and its own relay. A document is a whole text (no token
attends to its padding), a packed document, or one of two sentences.

Shapes: B rows, T tokens, R relays of a row, X numbers of a token.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.utils.import_utils import is_tracing

from hf_efficient_attn.layout.transfer import on_host
from hf_efficient_attn.models.inputs import Movable
from hf_efficient_attn.models.prologue import PreparedCall


@dataclass(frozen=True)
class Ring(Movable):
    """The rings of a batch. A neighbour that is missing is the token itself in `left` and `right`.

    Attributes:
        num_relays: R.
        real: which tokens are not padding, bool [B, T]; None: all.
        documents: the number of each token's document, [B, T], below R; None: every row is one document.
        has_left, has_right: whether a token has a neighbour before and after it, bool [B or 1, T]; None: all have.
        left, right: the index of that neighbour, [B, T]; None: the token before or after, and for an end the other end.
    """

    num_relays: int = 1
    real: Tensor | None = None
    documents: Tensor | None = None
    has_left: Tensor | None = None
    has_right: Tensor | None = None
    left: Tensor | None = None
    right: Tensor | None = None

    def beside(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the states of the neighbours before and after each token, [B, T, X] → twice the same."""
        if self.left is None or self.right is None:
            return states.roll(1, 1), states.roll(-1, 1)
        return take(states, self.left), take(states, self.right)

    def of_tokens(self, states: Tensor) -> Tensor:
        """Return the states of each token's relay, [B, R, X] → [B, T, X], or [B, 1, X], which broadcasts."""
        return states if self.documents is None else take(states, self.documents)


def take(states: Tensor, index: Tensor) -> Tensor:
    """Return the states at an index, [B, N, X] and [B, M] → [B, M, X]."""
    return states.gather(1, index.unsqueeze(-1).expand(-1, -1, states.shape[-1]))


def find_ring(states: Tensor, real: Tensor | None, documents: Tensor | None, num_relays: int, is_closed: bool) -> Ring:
    """Return the rings of a batch; in closed ones the last token of a document comes before its first.

    A masked token between others is not a neighbour of any token, and no token attends to it.

    Args:
        states: [B, T, X]; only shape and device matter.
        real, documents, num_relays: as in `Ring`.
    """
    batch_size, tokens = states.shape[:2]
    index = torch.arange(tokens, device=states.device).unsqueeze(0)
    if real is None and documents is None:
        return Ring() if is_closed else Ring(has_left=index > 0, has_right=index < tokens - 1)
    known = real if real is not None else torch.ones_like(index, dtype=torch.bool).expand(batch_size, -1)
    joined = known & known.roll(1, 1) & (index > 0)
    if documents is not None:
        joined = joined & (documents == documents.roll(1, 1))
    ring = Ring(num_relays, real, documents, joined, joined.roll(-1, 1))
    return closed(ring, index, known) if is_closed else ring


def closed(ring: Ring, index: Tensor, known: Tensor) -> Ring:
    """Return the rings with the ends of every document joined."""
    index = index.expand_as(known)
    numbers = torch.zeros_like(index) if ring.documents is None else ring.documents
    tokens = index.shape[1]
    ends: Any = index.new_zeros(index.shape[0], ring.num_relays)
    first = (ends + tokens).scatter_reduce(1, numbers, torch.where(known, index, tokens), "amin")
    last = (ends - 1).scatter_reduce(1, numbers, torch.where(known, index, -1), "amax")
    first, last = first.gather(1, numbers), last.gather(1, numbers)
    has_left, has_right = ring.has_left | (index == first), ring.has_right | (index == last)
    left = torch.where(index == first, last, torch.where(has_left, index - 1, index))
    right = torch.where(index == last, first, torch.where(has_right, index + 1, index))
    return replace(ring, has_left=has_left, has_right=has_right, left=left, right=right)


def mean_of_documents(states: Tensor, ring: Ring) -> Tensor:
    """Return the mean of the real tokens of each document, [B, T, X] → [B, R, X]; 0 for a document without any."""
    wide = states.to(torch.promote_types(states.dtype, torch.float32))
    if ring.real is None and ring.documents is None:
        return wide.mean(1, keepdim=True).to(states.dtype)
    real = torch.ones_like(states[..., :1], dtype=torch.bool) if ring.real is None else ring.real.unsqueeze(-1)
    # padding may be anything here; but attention multiplies its values by 0, so they have to be finite
    wide = torch.where(real, wide, 0)
    total, count = add_up(wide, ring), add_up(real.to(wide.dtype), ring)
    return (total / count.clamp(min=1)).to(states.dtype)


def add_up(states: Tensor, ring: Ring) -> Tensor:
    """Return the sum over the tokens of each document, [B, T, X] → [B, R, X]."""
    if ring.documents is None:
        return states.sum(1, keepdim=True)
    index = ring.documents.unsqueeze(-1).expand_as(states)
    return states.new_zeros(states.shape[0], ring.num_relays, states.shape[2]).scatter_add(1, index, states)


# The stars of a call: padding, packed documents, and pairs of sentences.


CLOSED = (
    "This attention_mask masks pairs of real tokens, but the relay of a star passes information from every token to "
    "all others. Pass a padding mask [batch, tokens]; for packed documents, pass position_ids that restart."
)


def find_stars(config: Any, call: PreparedCall, sentences: Tensor | None) -> Ring:
    """Return the rings of a call.

    sentences: the number of each token's sentence, 0 or 1, [B, T]; None: the call's own documents are the stars.
    """
    mask = call.masks(config).token_mask
    documents, num_relays = call.documents, 1
    if sentences is not None:
        documents, num_relays = sentences.long(), 2
    elif documents is not None:
        # while tracing, the number of documents is not known, and every token has a relay
        num_relays = call.tokens if is_tracing(documents) else 1 + int(on_host(documents).max())
    return find_ring(call.embedded, mask.key_mask, documents, num_relays, config.ring == "closed")
