"""Where packed documents begin, by the positions of their tokens or by a call's keyword arguments.

`DataCollatorWithFlattening` gives `cu_seq_lens_q` and `cu_seq_lens_k` (0, and where each document ends) and `seq_idx`
(the number of each token's document).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.utils.import_utils import is_tracing

from hf_efficient_attn.attention.cache_argument import CACHE_NAME, is_paged
from hf_efficient_attn.errors import InputError
from hf_efficient_attn.layout.transfer import bring, on_host

ENDS = ("cu_seq_lens_q", "cu_seq_lens_k")
NUMBERS = "seq_idx"


def position_starts(position_ids: Tensor, is_token: Tensor | None = None) -> Tensor:
    """Return where a document begins: where a token's position does not follow that of the previous token.

    With a mask, it must follow neither that of the previous real token nor that of the previous column. The first token
    of a row, and masked tokens, begin no further document. Shapes: [B, T] each.

    >>> is_token = torch.tensor([[0, 0, 1, 1, 1, 1]]).bool()
    >>> position_starts(torch.tensor([[1, 1, 0, 1, 0, 1]]), is_token).int().tolist()
    [[0, 0, 0, 0, 1, 0]]
    """
    breaks = pad(position_ids[:, 1:] != position_ids[:, :-1] + 1, (1, 0))
    if is_token is None:
        return breaks
    index = torch.arange(position_ids.shape[1], device=position_ids.device).expand_as(position_ids)
    last = torch.where(is_token, index, -1).cummax(1).values
    before = pad(last, (1, -1), value=-1)
    follows = position_ids == position_ids.gather(1, before.clamp(min=0)) + 1
    return breaks & is_token & (before >= 0) & ~follows


def said_starts(options: Mapping[str, Any], batch_size: int, tokens: int) -> Tensor | None:
    """Return where documents begin by the keyword arguments of a call, bool [B, T]; None: they do not say.

    Raises:
        InputError: they do not fit these tokens.
    """
    if is_paged(options.get(CACHE_NAME)):
        # of a paged cache, for whose kernels transformers says where each text begins
        return None
    starts = None
    for name in (NUMBERS, *ENDS):
        if not isinstance(options.get(name), Tensor | None):
            raise InputError(f"{name} is a {type(options[name]).__name__}; it must be a tensor of integers.")
    numbers = options.get(NUMBERS)
    if numbers is not None:
        if numbers.ndim != 2 or numbers.shape[1] != tokens or len(numbers) not in (1, batch_size):
            raise InputError(f"seq_idx has shape {list(numbers.shape)}; it must be [batch, tokens] = [.., {tokens}].")
        starts = pad(numbers[:, 1:] != numbers[:, :-1], (1, 0)).expand(batch_size, -1)
    ends = [options[name] for name in ENDS if options.get(name) is not None]
    if not ends:
        return starts
    _check_ends(ends, batch_size, tokens)
    begins = torch.zeros(1, tokens + 1, dtype=torch.bool, device=ends[0].device)
    begins[0, ends[0].long()] = True
    begins = pad(begins[:, 1:tokens], (1, 0))
    return begins if starts is None else starts | begins


def _check_ends(ends: list[Tensor], batch_size: int, tokens: int) -> None:
    if batch_size != 1:
        raise InputError(
            f"cu_seq_lens_q tells the documents of one flattened row, but the batch has {batch_size} rows. Pass "
            "position_ids that restart with every document."
        )
    if is_tracing(ends[0]):
        return
    bring(*ends)
    first, last = on_host(ends[0]), on_host(ends[-1])
    is_whole = first.ndim == 1 and len(first) > 1 and first[0] == 0 and first[-1] == tokens
    if not is_whole or bool((first.diff() < 0).any()) or not torch.equal(first, last.to(first)):
        raise InputError(
            f"cu_seq_lens_q={_shortened(first)} and cu_seq_lens_k={_shortened(last)} must be equal, begin with 0, "
            f"ascend and end with the number of tokens, {tokens}: they say where documents end."
        )


def _shortened(values: Tensor) -> str:
    shown = values.flatten()[:6].tolist()
    return f"{shown}{' ...' if values.numel() > 6 else ''}"


def said_positions(
    position_ids: Tensor | None, options: Mapping[str, Any], batch_size: int, tokens: int, past_tokens: int | Tensor
) -> Tensor | None:
    """Return positions that restart with every document, if a call's keyword arguments say where these begin.

    Otherwise return `position_ids` as they are. Shape: [B or 1, T].

    Raises:
        InputError: cached tokens, whose documents are unknown, or `position_ids` that contradict the arguments.
    """
    starts = said_starts(options, batch_size, tokens)
    if starts is None:
        return position_ids
    if not isinstance(past_tokens, int) or past_tokens:
        raise InputError(
            "cu_seq_lens_q and seq_idx say where the documents among the new tokens begin, but nothing about the "
            "cached tokens. Leave them out while generating, or pass the whole text without a cache."
        )
    if position_ids is None:
        index = torch.arange(tokens, device=starts.device)[None]
        return index - torch.where(starts, index, 0).cummax(1).values
    if not is_tracing(starts) and bool((starts & ~position_starts(position_ids)).any()):
        raise InputError(
            "cu_seq_lens_q or seq_idx begin documents where position_ids do not restart. Let position_ids restart with "
            "every document, or leave them out."
        )
    return position_ids
