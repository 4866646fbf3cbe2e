"""The sequences of a batch, rearranged so that each begins at the first place and is padded on the right.

This handles padding on the left, masked tokens between others, and packed documents once for all mechanisms and layers:
a mechanism that is correct for rows with padding on the right is correct for all masks. Shapes: B rows of T tokens, R
sequences of L places, X elements of a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.utils.import_utils import is_tracing

from hf_efficient_attn.attention.layer import readable_keys, selected_rows
from hf_efficient_attn.errors import InputError
from hf_efficient_attn.layout.token_mask import Document, TokenMask
from hf_efficient_attn.layout.transfer import derived, on_host, send
from hf_efficient_attn.models.inputs import LayerInputs, Movable, check_open_pairs
from hf_efficient_attn.models.parts.attention import AsksNothing, MultiHeadAttention
from hf_efficient_attn.models.prologue import PreparedCall

# if one group would have more than this many places per token of the batch, sequences are grouped by length
MOST_PLACES = 2
CLOSED = (
    "This attention_mask allows other pairs of tokens than a padding mask, but some layers of this model use sums over "
    "all tokens. Pass a padding mask [batch, tokens]; for packed documents, pass position_ids that restart."
)


@dataclass(frozen=True)
class SequenceGroup(Movable):
    """Sequences that are computed together.

    Attributes:
        index: the token of the flattened batch at each place, [R, L]; None: the rows are the sequences.
        real: which places hold tokens of the sequence, always the first ones, bool [R, L]; None: all.
    """

    index: Tensor | None = None
    real: Tensor | None = None


@dataclass(frozen=True)
class Sequences(Movable):
    """All sequences of a batch.

    Attributes:
        groups: the groups of sequences that are computed together.
        places: the place of each token of the batch, [B, T], counted over the places of all groups; None: the rows are
            the sequences.
        real: which tokens are in a sequence, bool [B, T]; None: all.
        is_packed: whether a row may have several sequences.
    """

    groups: tuple[SequenceGroup, ...]
    places: Tensor | None = None
    real: Tensor | None = None
    is_packed: bool = False

    def split(self, states: Tensor) -> list[Tensor]:
        """Return the states of each group, [B, T, X] → [R, L, X]; places after a sequence have arbitrary tokens."""
        return [states if group.index is None else states.flatten(0, 1)[group.index] for group in self.groups]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the states of the batch, [R, L, X] of each group → [B, T, X]; tokens outside of sequences are 0."""
        if self.places is None:
            (joined,) = parts
        else:
            joined = torch.cat([part.flatten(0, 1) for part in parts])[self.places]
        return joined if self.real is None else torch.where(self.real.unsqueeze(-1), joined, 0)


def whole_rows() -> Sequences:
    """Return each row as a sequence without padding."""
    return Sequences((SequenceGroup(),))


def find_sequences(call: PreparedCall, masks: LayerInputs, is_causal: bool) -> Sequences:
    """Return the sequences of the new tokens of a call.

    masks: the mask inputs of the call.

    Raises:
        InputError: a matrix mask that is not equal to a padding mask (with the causal mask, if causal); or packed
            documents while tracing, when their lengths are unknown.
    """
    mask, matrix = masks.token_mask, masks.matrix
    real, documents = mask.key_mask, mask.segment_ids
    if matrix is not None:
        real = readable_keys(matrix, call.batch_size)
        check_open_pairs(matrix, real, CLOSED, is_causal)
    real, documents = (None if each is None else of_queries(each, call) for each in (real, documents))
    return sequences_of(real, documents, call.batch_size, call.tokens, call.embedded.device)


def of_queries(mask: Tensor, call: PreparedCall) -> Tensor:
    """Return the part of a mask over all keys, [B, K], for the new tokens, [B, T], which come after the cached ones."""
    start = call.past_tokens
    if isinstance(start, int):
        # `derived`, so that `on_host` knows the result
        return derived(lambda mask: mask[:, start : start + call.tokens].clone(), mask)
    return mask.index_select(1, torch.arange(call.tokens, device=mask.device) + start.to(mask.device))


def sequences_of(
    real: Tensor | None, documents: Tensor | None, batch_size: int, tokens: int, device: torch.device
) -> Sequences:
    """Return the sequences of rows.

    Args:
        real: which tokens are not padding, bool [B, T]; None: all.
        documents: the number of each token's document, [B, T]; None: every row is one document.
    """
    if real is None and documents is None:
        return whole_rows()
    known = documents if real is None else real
    if torch.compiler.is_compiling() or is_tracing(known):
        if documents is not None:
            raise InputError(
                "position_ids are given to a compiled or exported model and may restart, but the graph does not know "
                "the lengths of packed documents. Leave position_ids out, or call the model without compiling it."
            )
        return in_front_of_padding(real)
    found = TokenMask(real, documents).documents(batch_size, tokens)
    if documents is None and all(len(row) == 1 and row[0].start == 0 and not row[0].has_holes for row in found):
        is_full = all(row[0].stop == tokens for row in found)
        return whole_rows() if is_full else Sequences((SequenceGroup(None, real),), real=real)
    sequences = _gathered(found, None if real is None else on_host(real), tokens, device)
    return replace(sequences, is_packed=documents is not None)


def in_front_of_padding(real: Tensor) -> Sequences:
    """Return each row as a sequence with its real tokens in front, without depending on the values of the mask."""
    batch_size, tokens = real.shape
    index = torch.arange(tokens, device=real.device).expand(batch_size, -1)
    count = real.sum(1, keepdim=True)
    places = torch.where(real, real.long().cumsum(1) - 1, count + (~real).long().cumsum(1) - 1)
    rows = torch.arange(batch_size, device=real.device).unsqueeze(1) * tokens
    tokens_at = torch.zeros_like(index).scatter(1, places, index)
    return Sequences((SequenceGroup(tokens_at + rows, index < count),), places + rows, real)


def _gathered(found: Sequence[Sequence[Document]], real: Tensor | None, tokens: int, device: torch.device) -> Sequences:
    """Return each document as a sequence; if one group would have too many places, grouped by length."""
    listed = [_tokens_of(document, row, real, tokens) for row, several in enumerate(found) for document in several]
    # a batch with only padding has one empty sequence
    listed = listed or [torch.zeros(0, dtype=torch.long)]
    longest = max(len(each) for each in listed)
    sizes = [max(1, longest)] * len(listed)
    if longest * len(listed) > MOST_PLACES * len(found) * tokens:
        sizes = [1 << (len(each) - 1).bit_length() for each in listed]
    places, first = torch.zeros(len(found) * tokens, dtype=torch.long), 0
    # for each group, its index and its `real`
    groups: list[Tensor | None] = []
    for size in sorted(set(sizes)):
        sequences = [each for each, own in zip(listed, sizes, strict=True) if own == size]
        width = max(1, *(len(each) for each in sequences))
        index = torch.stack([torch.nn.functional.pad(each, (0, width - len(each))) for each in sequences])
        count = torch.tensor([len(each) for each in sequences])
        is_real = torch.arange(width) < count.unsqueeze(1)
        places[index[is_real]] = first + is_real.flatten().nonzero().flatten()
        first += index.numel()
        groups += [index, None if bool(is_real.all()) else is_real]
    taken = torch.zeros(len(found) * tokens, dtype=torch.bool)
    taken[torch.cat(listed)] = True
    is_taken = None if bool(taken.all()) else taken.view(-1, tokens)
    places, is_taken, *groups = send((places.view(-1, tokens), is_taken, *groups), device)
    return Sequences(tuple(map(SequenceGroup, groups[::2], groups[1::2])), places, is_taken)


def _tokens_of(document: Document, row: int, real: Tensor | None, tokens: int) -> Tensor:
    """Return the indices of a document's tokens in the flattened batch, [L]."""
    index = torch.arange(document.start, document.stop)
    if document.has_holes and real is not None:
        index = index[real[row, document.start : document.stop]]
    return index + row * tokens


def without_padding(embedded: Tensor, real: Tensor | None, is_packed: bool) -> Tensor:
    """Return embeddings [B, T, hidden_size] with zeros at padding, for a model whose layers ignore masks.

    real: which tokens are not padding, bool [B, T]; None: unknown.

    Raises:
        InputError: packed documents, which such a model would mix.
    """
    if is_packed:
        raise InputError(
            "projection_padding='ignore' ignores masks, so documents packed in one row would attend to each other. "
            "Pass each document in its own row, or build the model with projection_padding='zero'."
        )
    return embedded if real is None else torch.where(real.to(embedded.device).unsqueeze(-1), embedded, 0)


# The attention of every mechanism computes each sequence by itself.


class MechanismAttention(AsksNothing, MultiHeadAttention):
    """Multi-head attention by a mechanism. [B, T, hidden_size] → the same, and the weights or None.

    A mechanism defines `read`, which gets sequences that begin at the first place, and `costs`.
    """

    # whether the keys of its weights are the tokens of the sequence, and not fewer keys
    reads_tokens: ClassVar[bool] = False

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.make_maps()

    def forward(self, hidden_states: Tensor, sequences: Sequences, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Return the output and, with `output_attentions`, the weights [B, H, T, S] of each token over its S keys."""
        out, weights = self.read_sequences(hidden_states, sequences, **kwargs)
        return self.o_proj(out), weights

    def read_sequences(self, states: Tensor, sequences: Sequences, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Return the attention output of a batch, [B, T, H · D], and, with `output_attentions`, the weights.

        Args:
            states: the input of `project`, [B, T, X].
        """
        need_weights = self.needs_weights(kwargs)
        kwargs.pop("output_attentions", None)
        parts = [
            self.attend(part, group.real, need_weights=need_weights, **kwargs)
            for part, group in zip(sequences.split(states), sequences.groups, strict=True)
        ]
        out = sequences.join([part for part, _ in parts])
        weights = None
        if need_weights:
            read = [weights for _, weights in parts]
            if self.reads_tokens:
                read = [at_tokens(each, group, sequences) for each, group in zip(read, sequences.groups, strict=True)]
            weights = joined_weights(read, sequences)
        return out, weights

    def attend(
        self, states: Tensor, real: Tensor | None, need_weights: bool, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return the attention output of sequences [R, L, X], and the weights; see `read`."""
        return self.read(self.project(states), real, need_weights, **kwargs)

    def project(self, states: Tensor) -> tuple[Tensor, ...]:
        """Return the inputs of `read`: queries, keys and values, [B, T, X] → [B, T, H · D] each."""
        return self.q_proj(states), self.k_proj(states), self.v_proj(states)

    def read(
        self,
        states: Sequence[Tensor],
        real: Tensor | None,
        need_weights: bool,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the attention output of sequences, [R, L, h · D], and the weights [R, h, L, S] if they are needed.

        Args:
            states: the output of `project`, [R, L, h · D] each.
            real: which places hold tokens, always the first ones of a sequence, bool [R, L]; None: all. At other
                places, states and outputs are arbitrary and may be not finite.
        """
        raise NotImplementedError


def at_tokens(weights: Tensor, group: SequenceGroup, sequences: Sequences) -> Tensor:
    """Return weights with keys at the columns that their tokens have in the rows, [R, H, L, L] → [R, H, L, T]."""
    if group.index is None or sequences.places is None:
        return weights
    tokens = sequences.places.shape[1]
    columns = (group.index % tokens)[:, None, None].expand(weights.shape)
    read = weights if group.real is None else torch.where(group.real[:, None, None], weights, 0)
    return weights.new_zeros(*weights.shape[:3], tokens).scatter_add(3, columns, read)


def joined_weights(parts: Sequence[Tensor], sequences: Sequences) -> Tensor:
    """Return the weights of the batch, for all queries or those of `weights_of_rows`, [R, H, L, S] → [B, H, T, S].

    Groups may have different numbers of keys; shorter weights are padded with zeros on the right.
    """
    num_heads, most = parts[0].shape[1], max(part.shape[3] for part in parts)
    padded = [torch.nn.functional.pad(part, (0, most - part.shape[3])) for part in parts]
    joined = sequences.join([part.transpose(1, 2).flatten(2) for part in padded])
    weights = joined.unflatten(2, (num_heads, most)).transpose(1, 2)
    chosen = selected_rows()
    return weights if chosen is None else weights[:, :, list(chosen)]
