"""What a call says about its global tokens, checked, or the chunks of its text; and the mask of its long tokens."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.utils.import_utils import is_tracing

from hf_efficient_attn.attention.input_checks import check_mask_values
from hf_efficient_attn.errors import InputError
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.layout.transfer import derived, on_host
from hf_efficient_attn.models.inputs.whole_numbers import check_integers
from hf_efficient_attn.models.prologue import PreparedCall

from .structure import GlobalInput, find_chunks

# what only this family takes
INPUTS = (
    "global_input_ids",
    "global_mask",
    "long_to_global",
    "global_token_type_ids",
    "global_contexts",
    "global_reads_all",
    "long_contexts",
    "cpc_mask",
    "cpc_input_ids",
)
CLOSED = (
    "This attention_mask closes pairs of real tokens, but global tokens pass on what every token says to all of them. "
    "Pass a padding mask [batch, tokens], and position_ids that restart for packed documents."
)


def find_globals(
    config: Any,
    call: PreparedCall,
    real: Tensor | None,
    ids: Tensor | None,
    mask: Tensor | None,
    links: Tensor | None,
    contexts: Tensor | None,
    reads_all: Tensor | None,
    types: Tensor | None,
) -> tuple[Tensor, GlobalInput]:
    """Return the tokens of the global input, [B, G], and what is known of them.

    Args:
        real: which long tokens are no padding, bool [B, T]; None: all.
        ids, mask, links, contexts, reads_all, types: the call's `global_input_ids`, `global_mask`, `long_to_global`,
            `global_contexts`, `global_reads_all` and `global_token_type_ids`.

    Raises:
        InputError: some of them without the tokens, of another shape, or beside packed documents.
    """
    given = {"global_mask": mask, "global_contexts": contexts, "global_reads_all": reads_all}
    if ids is None:
        others = {"long_to_global": links, "global_token_type_ids": types}
        named = [name for name, each in {**given, **others}.items() if each is not None]
        if named:
            raise InputError(f"{', '.join(named)} given without global_input_ids, which says what they are about.")
        chunks = find_chunks(config, call.embedded, real, call.documents)
        return torch.full(chunks.real.shape, config.global_token_id, device=chunks.real.device), chunks
    if call.documents is not None:
        raise InputError(
            "position_ids restart, so that rows hold packed documents, whose global tokens are chunks of "
            f"chunk_tokens={config.chunk_tokens} tokens. Leave global_input_ids out, or give every text its own row."
        )
    if ids.ndim != 2 or ids.shape[0] != call.batch_size or ids.shape[1] == 0:
        raise InputError(
            f"global_input_ids has shape {list(ids.shape)}; it must be [batch, global tokens] with "
            f"{call.batch_size} rows, each of at least one token. Leave it out for global tokens of chunks."
        )
    shape = tuple(ids.shape)
    for name, each in given.items():
        if each is not None and tuple(each.shape) != shape:
            raise InputError(f"{name} has shape {list(each.shape)}; it must be [batch, global tokens] = {list(shape)}.")
    for name in ("global_mask", "global_reads_all"):
        check_mask_values(given[name], name)
    return ids, GlobalInput(
        real=torch.ones_like(ids, dtype=torch.bool) if mask is None else mask != 0,
        links=_of_real(checked_links(links, call, shape[1]), real),
        contexts=contexts,
        reads_all=None if reads_all is None else reads_all != 0,
    )


def _of_real(links: Tensor, real: Tensor | None) -> Tensor:
    """Return the links of tokens, [B, T, K], and -1 for those of padding, which is part of nothing."""
    return links if real is None else torch.where(real.unsqueeze(-1), links, -1)


def checked_links(links: Tensor | None, call: PreparedCall, num_global: int) -> Tensor:
    """Return the numbers of the global tokens of each long token, [B, T, K].

    Raises:
        InputError: another shape, or a number of no global token.
    """
    batch_size, tokens = call.batch_size, call.tokens
    if links is None:
        return torch.full((batch_size, tokens, 1), -1, device=call.embedded.device)
    if links.is_floating_point() or links.is_complex():
        raise InputError(f"long_to_global is of {links.dtype}; it must hold numbers of global tokens, as integers.")
    if links.ndim not in (2, 3) or tuple(links.shape[:2]) != (batch_size, tokens):
        raise InputError(
            f"long_to_global has shape {list(links.shape)}; it must be [batch, tokens] = [{batch_size}, {tokens}], or "
            "have a third axis for several numbers of a token."
        )
    if not is_tracing(links):
        least, most = (int(each) for each in on_host(links).aminmax())
        if least < -1 or most >= num_global:
            raise InputError(
                f"long_to_global holds {most if most >= num_global else least}; it must hold numbers of the "
                f"{num_global} global tokens, 0 to {num_global - 1}, or -1 for a token of none."
            )
    return links if links.ndim == 3 else links.unsqueeze(-1)


def cut_at_contexts(mask: TokenMask, contexts: Tensor | None, call: PreparedCall) -> TokenMask:
    """Return the mask of the long tokens, in which every context of a row is a document of its own.

    Args:
        mask: of all long tokens.
        contexts: the call's `long_contexts`, [B, T]; None: long tokens read across contexts.
        call: of all long tokens.

    Raises:
        InputError: another shape, or no integers.
    """
    if contexts is None:
        return mask
    check_integers("long_contexts", contexts, "contexts")
    shape = (call.batch_size, call.tokens)
    if tuple(contexts.shape) != shape:
        raise InputError(
            f"long_contexts has shape {list(contexts.shape)}; it must be [batch, tokens] = {list(shape)}, the number "
            "of each long token's context. Leave it out if long tokens read across contexts."
        )
    return replace(mask, segment_ids=derived(_segments, contexts, mask.key_mask, mask.segment_ids))


def _segments(contexts: Tensor, real: Tensor | None, documents: Tensor | None) -> Tensor:
    """Return the numbers of contexts as they are counted in their row, [B, T]; a masked token has that before it."""
    if real is not None:
        # those of real tokens one after another; the last column is that of masked ones
        rank = real.long().cumsum(1) - 1
        found = pad(contexts, (0, 1)).scatter(1, torch.where(real, rank, contexts.shape[1]), contexts)
        contexts = found.gather(1, rank.clamp(min=0))
    starts = contexts[:, 1:] != contexts[:, :-1]
    if documents is not None:
        starts = starts | (documents[:, 1:] != documents[:, :-1])
    return pad(starts.long().cumsum(1), (1, 0))
