"""The nodes of a batch: which nodes exist in whole texts, and which come with the next tokens in generation.

Every token has two nodes, itself and a span (`InterleavedSpanTree`). Shapes: B rows, K tokens so far, T new ones.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.utils.import_utils import is_tracing

from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.layout.transfer import derived
from hf_efficient_attn.models.inputs import Movable
from hf_efficient_attn.models.prologue import PreparedCall
from hf_efficient_attn.patterns.interleaved_span_tree import InterleavedSpanTree


def tree_of(config: Any, is_causal: bool) -> InterleavedSpanTree:
    """Return the tree of a config; `config.pattern` may come from the copy of the package that wrote the config."""
    return InterleavedSpanTree(config.num_nodes, is_causal)


@dataclass(frozen=True)
class WholeTree(Movable):
    """The nodes of whole texts.

    Attributes:
        mask: token mask of the nodes, two for each token.
        roots: for each row, the node that covers all of its tokens, [B]; None: rows have several documents.
    """

    mask: TokenMask
    roots: Tensor | None

    def first_spans(self, tokens: Tensor) -> Tensor:
        """Return the spans before the first layer, zeros like the tokens, [B, T, hidden_size]."""
        return torch.zeros_like(tokens)


@dataclass(frozen=True)
class NextNodes(Movable):
    """The nodes of T new tokens after cached ones: the tokens, and the spans that end with one of them.

    There are S spans, ordered by size; some of them do not exist in some rows. A token has X candidate nodes besides
    itself, first tokens and then spans.

    Attributes:
        own: the columns of the new tokens, [T].
        read: for each candidate, the column of the token that the node belongs to, [B, T, X].
        is_read: whether the new token attends to the candidate, bool [B, T, X].
        relations: the label of each candidate, [B, T, X].
        num_tokens: how many of the X candidates are tokens.
        spans: for each size that occurs, a tuple (first [B, C], columns [B, C], is_new [B, C]) of C spans: the first
            column of a span's tokens, the column of the span, and whether it exists.
        sizes: the sizes of `spans`, in tokens.
        real: which tokens so far are not padding, bool [B, K]; None: all.
    """

    own: Tensor
    read: Tensor
    is_read: Tensor
    relations: Tensor
    num_tokens: int
    spans: tuple[tuple[Tensor, Tensor, Tensor], ...]
    sizes: tuple[int, ...]
    real: Tensor | None

    @property
    def num_spans(self) -> int:
        """The number S of new spans."""
        return sum(first.shape[1] for first, _, _ in self.spans)

    def first_spans(self, tokens: Tensor) -> Tensor:
        """Return the spans before the first layer, zeros, [B, S, hidden_size], for tokens [B, T, hidden_size]."""
        return tokens.new_zeros(tokens.shape[0], self.num_spans, tokens.shape[2])


def whole_tree(tokens: TokenMask, batch_size: int, num_tokens: int, device: torch.device) -> WholeTree:
    """Return the nodes of texts whose tokens have this mask."""
    ids = tokens.segment_ids
    mask = TokenMask(
        None if tokens.key_mask is None else derived(node_mask, tokens.key_mask, ids),
        None if ids is None else derived(lambda own: own.repeat_interleave(2, 1), ids),
    )
    if ids is not None:
        return WholeTree(mask, None)
    real = torch.ones(batch_size, num_tokens, dtype=torch.bool, device=device)
    return WholeTree(mask, roots_of(real if tokens.key_mask is None else tokens.key_mask))


def node_mask(real: Tensor, ids: Tensor | None = None) -> Tensor:
    """Return which nodes exist, [B, K] → [B, 2K]: real tokens, and spans within a text that contain a real token.

    ids: the id of each token's document, [B, K]; neighbours with the same id are one document. None: a row is one.
    """
    index = torch.arange(real.shape[1], device=real.device).expand_as(real)
    begin, end = torch.zeros_like(index), torch.full_like(index, real.shape[1])
    if ids is not None:
        is_first = pad(ids[:, 1:] != ids[:, :-1], (1, 0), value=True)
        is_last = pad(ids[:, 1:] != ids[:, :-1], (0, 1), value=True)
        begin = torch.where(is_first, index, 0).cummax(1).values
        end = torch.where(is_last, index + 1, real.shape[1]).flip(1).cummin(1).values.flip(1)
    # counted[i]: the number of real tokens before column i
    counted = pad(real.long().cumsum(1), (1, 0))

    def number(start: Tensor, stop: Tensor) -> Tensor:
        return counted.gather(1, stop) - counted.gather(1, start)

    place = index - first_places(real, begin, end)
    half = (place + 1) & -(place + 1)
    has_real = number(torch.maximum(index + 1 - half, begin), torch.minimum(index + 1 + half, end)) > 0
    is_within = (number(begin, index + 1) > 0) & (number(index, end) > 0)
    return torch.stack((real, has_real & is_within), -1).flatten(1)


def first_places(real: Tensor, begin: Tensor, end: Tensor) -> Tensor:
    """Return the index of the first real token of each token's document, [B, K]; `end` if there is none."""
    index = torch.arange(real.shape[1], device=real.device)
    found = torch.full_like(begin, real.shape[1]).scatter_reduce(
        1, begin, torch.where(real, index, real.shape[1]), "amin"
    )
    return torch.minimum(found.gather(1, begin), end)


def roots_of(real: Tensor) -> Tensor:
    """Return the node that covers all real tokens of each row, [B, K] → [B]; node 0 if there are none."""
    index = torch.arange(real.shape[1], device=real.device)
    first = torch.where(real, index, real.shape[1]).amin(1)
    count = torch.where(real, index, -1).amax(1) + 1 - first
    size = next_power(count)
    # the span of this size that begins with the text; a text of one token is its own root
    root = 2 * first + torch.where(count > 1, size - 1, 0)
    return torch.where(count > 0, root, 0)


def next_power(number: Tensor) -> Tensor:
    """Return the smallest powers of two that are at least these numbers, which are from 1 to 2^31.

    >>> next_power(torch.tensor([1, 2, 3, 8, 9])).tolist()
    [1, 2, 4, 8, 16]
    """
    below = number - 1
    for shift in (1, 2, 4, 8, 16):
        below = below | below >> shift
    return below + 1


def next_nodes(
    tree: InterleavedSpanTree, clip_distance: int, past: Tensor, real: Tensor, num_new: int, has_padding: bool
) -> NextNodes:
    """Return the nodes of a causal tree for `num_new` new tokens, which begin at column `past`.

    Args:
        past: the number of cached tokens, int [].
        real: which tokens up to the last new one are real, [B, K].
    """
    width = real.shape[1]
    begin = torch.zeros_like(real, dtype=torch.long)
    first = first_places(real, begin, begin + width)[:, :1]
    exists = node_mask(real)
    new = past + torch.arange(num_new, device=real.device)
    # positions from the first token of the text; negative: padding before it
    place = (new - first).unsqueeze(-1)
    columns, is_read = [], []
    sizes = [1 << level for level in range(width.bit_length())]
    for size in sizes:
        index, is_due = nodes_before(tree.num_nodes, place, size)
        node = (2 * index + 1) * size - 1
        column = first.unsqueeze(-1) + (node >> 1)
        columns.append((node, column.clamp(0, width - 1)))
        known = exists.gather(1, (2 * columns[-1][1] + node % 2).flatten(1)).view_as(column)
        is_read.append(is_due & known & (place >= 0))
    nodes = torch.cat([node for node, _ in columns], -1)
    return NextNodes(
        own=new,
        read=torch.cat([column for _, column in columns], -1),
        is_read=torch.cat(is_read, -1),
        relations=tree.relation_label(2 * place, nodes, clip_distance),
        num_tokens=tree.num_nodes + 1,
        **new_spans(first, past, num_new, sizes[1:], exists),
        real=real if has_padding else None,
    )


def nodes_before(k: int, place: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the k + 1 candidate nodes of a size for each token, and whether it attends to them.

    Shapes: place [..., 1] → [..., k + 1] twice. `InterleavedSpanTree` explains which nodes these are.
    """
    stop = place if size == 1 else (place - 1 + k - k * size + size // 2) // size
    start = 2 * ((place - 1 + k - 2 * k * size + size) // (2 * size))
    index = stop - 1 - torch.arange(k + 1, device=place.device)
    return index, (index >= start) & (index >= 0)


def new_spans(first: Tensor, past: Tensor, num_new: int, sizes: list[int], exists: Tensor) -> dict[str, Any]:
    """Return the spans that end with one of the new tokens, by size, as fields of `NextNodes`.

    first: the column of the first real token of each row, [B, 1].
    """
    found, kept = [], []
    begin, last = (past - first).clamp(min=0), exists.shape[1] // 2 - 1
    for size in sizes:
        # the ends of the spans, exclusive
        ends = (begin // size + 1 + torch.arange(num_new // size + 1, device=first.device)) * size
        is_new = (ends <= past + num_new - first) & (past + num_new > first)
        column = (first + ends - size // 2 - 1).clamp(0, last)
        # while compiling, the values are unknown, and on a device the host would have to wait for them
        if not torch.compiler.is_compiling() and is_new.device.type == "cpu" and not bool(is_new.any()):
            continue
        found.append(((first + ends - size).clamp(0, last), column, is_new))
        kept.append(size)
    return {"spans": tuple(found), "sizes": tuple(kept)}


# The nodes of a call, from its padding, packed documents and cached tokens.


CLOSED = (
    "This attention_mask allows other pairs of tokens than a padding mask, but spans of a BP-Transformer pass on all "
    "of their tokens. Pass a padding mask [batch, tokens]; for packed documents, pass position_ids that restart."
)


def nodes_of(config: Any, call: PreparedCall, is_causal: bool) -> WholeTree | NextNodes:
    """Return the nodes of a call whose mask is not a matrix."""
    mask, device = call.masks(config, is_causal).token_mask, call.embedded.device
    if call.cache is None or is_nothing_cached(call.past_tokens):
        # with a static cache, the masks also have columns for later tokens
        of_tokens = (
            None if each is None else derived(lambda own: own[:, : call.tokens], each)
            for each in (mask.key_mask, mask.segment_ids)
        )
        return whole_tree(TokenMask(*of_tokens), call.batch_size, call.tokens, device)
    real = mask.key_mask
    if real is None:
        real = torch.ones(call.batch_size, call.num_keys, dtype=torch.bool, device=device)
    past = call.past_tokens
    # fill on the device instead of copying from the host
    past = past.to(device) if isinstance(past, Tensor) else torch.full((), past, device=device)
    return next_nodes(
        tree_of(config, is_causal), config.clip_distance, past, real, call.tokens, mask.key_mask is not None
    )


def is_nothing_cached(past_tokens: int | Tensor) -> bool:
    """Return whether there are no cached tokens; False while tracing, when the value of a tensor is unknown."""
    if isinstance(past_tokens, Tensor) and is_tracing(past_tokens):
        return False
    return int(past_tokens) == 0
