"""Where the global tokens are among the queries of a call, for the global projections."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.errors import InputError
from hf_efficient_attn.layout.onnx import is_written
from hf_efficient_attn.layout.token_locations import (
    NO_DOCUMENT,
    TokenLocations,
    last_positions,
    locations_on_host,
    token_locations,
)
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.layout.transfer import UNCOPIED, device_numbers
from hf_efficient_attn.models.global_tokens.rules import GlobalTokenChoice


@dataclass(frozen=True)
class GlobalRows:
    """The queries that are global tokens. X is the most that any example has, and at least 1.

    Attributes:
        is_row: bool [batch, queries], which queries are global.
        index: int [batch, X], their indices among the queries.
        is_global: bool [batch, X]; False: the example has fewer, and the index is that of any query.
        allowed: which keys they read: bool [batch, X, keys], or a floating-point matrix to add; None: all.
    """

    is_row: Tensor
    index: Tensor
    is_global: Tensor
    allowed: Tensor | None

    def among(self, queries: Sequence[int]) -> "GlobalRows":
        """Return where the global tokens are among some of the queries, given by their indices."""
        some = device_numbers(tuple(queries), self.index.device, torch.long)
        is_same = (self.index[:, :, None] == some) & self.is_global[:, :, None]
        return replace(self, is_row=self.is_row[:, some], index=is_same.int().argmax(-1), is_global=is_same.any(-1))


def find_global_rows(
    choice: GlobalTokenChoice,
    masks: Mapping[str, Any],
    batch_size: int,
    num_queries: int,
    num_keys: int,
    is_causal: bool,
    max_global_tokens: int,
    device: torch.device,
) -> GlobalRows:
    """Return where the global tokens are among the queries.

    Args:
        masks: the arguments of the layers about the keys, see `key_masks`.
        max_global_tokens: how many there may be while tracing, when they cannot be counted.
    """
    tokens, matrix = masks["token_mask"], masks["attention_mask"]
    locations = token_locations(tokens, num_keys, device)
    offset = num_keys - num_queries if masks["query_offset"] is None else masks["query_offset"]

    def rows_of(choice: GlobalTokenChoice, locations: TokenLocations) -> Tensor:
        queries = torch.arange(num_queries, device=locations.positions.device) + offset
        return _global_keys(choice, locations).expand(batch_size, -1).index_select(1, queries)

    is_row = known = rows_of(choice, locations)
    if device.type not in UNCOPIED and not torch.compiler.is_compiling():
        known = rows_of(choice.on_host(), locations_on_host(tokens, num_keys))
    index, found = _first_true(is_row, _most(choice, known, tokens, max_global_tokens))
    allowed = None
    if matrix is not None:
        matrix = matrix.expand(batch_size, -1, num_queries, -1)[:, 0]
        allowed = matrix.gather(1, index[:, :, None].expand(-1, -1, num_keys))
    elif is_causal or not tokens.is_empty:
        allowed = _readable(locations, index + offset, is_causal)
    return GlobalRows(is_row, index, found, allowed)


def global_keys(
    choice: GlobalTokenChoice, tokens: TokenMask, batch_size: int, num_keys: int, device: torch.device
) -> Tensor:
    """Return which keys are global tokens, bool [batch, keys]."""
    return _global_keys(choice, token_locations(tokens, num_keys, device)).expand(batch_size, -1)


def check_positions(choice: GlobalTokenChoice, tokens: TokenMask, num_keys: int, device: torch.device) -> None:
    """Refuse named positions beyond the end of some text; not while compiling.

    Raises:
        InputError: names the position, the example, and where its text ends.
    """
    if not choice.is_named or torch.compiler.is_compiling():
        return
    wanted = max(choice.positions)
    where, end = "a text", num_keys - 1
    if not tokens.is_empty:
        is_known = device.type in UNCOPIED
        locations = token_locations(tokens, num_keys, device) if is_known else locations_on_host(tokens, num_keys)
        ends = last_positions(locations)
        is_short = (ends < wanted) & (locations.documents != NO_DOCUMENT)
        if not is_short.any():
            return
        row, token = is_short.nonzero()[0].tolist()
        where, end = f"a text of example {row}", int(ends[row, token])
    if end < wanted:
        raise InputError(
            f"global_tokens has position {wanted}, but {where} ends at position {end}. Give positions that every text "
            "has, or choose the tokens by global_attention_mask."
        )


def _global_keys(choice: GlobalTokenChoice, locations: TokenLocations) -> Tensor:
    if choice.mask is not None:
        return choice.mask & (locations.documents != NO_DOCUMENT)
    if choice.every is not None:
        return (locations.positions % choice.every == 0) & (locations.documents != NO_DOCUMENT)
    return _among(locations.positions, tuple(choice.positions)) & (locations.documents != NO_DOCUMENT)


def _among(positions: Tensor, wanted: tuple[int, ...]) -> Tensor:
    if not is_written():
        return torch.isin(positions, device_numbers(wanted, positions.device, torch.long))
    # ONNX has no search, and onnxruntime cannot reduce nothing
    found = torch.zeros_like(positions, dtype=torch.bool)
    for each in wanted:
        found = found | (positions == each)
    return found


def _most(choice: GlobalTokenChoice, is_row: Tensor, tokens: TokenMask, limit: int) -> int:
    """Return the largest number of global queries of an example, at least 1."""
    if not torch.compiler.is_compiling():
        return max(1, int(is_row.sum(1).max()))
    if choice.mask is None and tokens.segment_ids is None:
        return max(1, len(choice.positions))
    torch._assert_async(
        (is_row.sum(1) <= limit).all(), "More global tokens than config.max_global_tokens, the limit of traced models."
    )
    return limit


def _first_true(is_row: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the indices of the first `count` true entries of each row, and which indices are real."""
    # a symbolic length must not be compared with the count
    padded = torch.nn.functional.pad(is_row, (0, count))
    length = padded.shape[1]
    # no two are equal, so that the first of them are those of the lowest indices
    scores = padded.long() * length - torch.arange(length, device=padded.device)
    index = scores.topk(count, dim=1).indices
    return index.clamp(max=is_row.shape[1] - 1), padded.gather(1, index)


def _readable(locations: TokenLocations, rows: Tensor, is_causal: bool) -> Tensor:
    documents, positions = locations.documents.expand(rows.shape[0], -1), locations.positions.expand(rows.shape[0], -1)
    own = documents.gather(1, rows)
    allowed = (documents[:, None] == own[:, :, None]) & (own != NO_DOCUMENT)[:, :, None]
    if is_causal:
        allowed = allowed & (positions[:, None] <= positions.gather(1, rows)[:, :, None])
    return allowed
