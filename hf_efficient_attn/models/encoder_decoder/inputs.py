"""The two sides of an encoder-decoder's inputs: which mask belongs to which, and what the decoder reads by default."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from hf_efficient_attn.attention.packing import ENDS, NUMBERS
from hf_efficient_attn.attention.table_form import is_table
from hf_efficient_attn.errors import InputError
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.models.inputs.axes import check_axes
from hf_efficient_attn.models.inputs.masks import refuse_other_types

POSITION_NAMES = ("position_ids", "decoder_position_ids", *ENDS, NUMBERS)


def shift_right(config: Any, ids: Tensor) -> Tensor:
    """Return the decoder's input to predict `ids`: the start token and all but the last; −100 becomes padding.

    Raises:
        InputError: the config has no `decoder_start_token_id` or `pad_token_id`.

    >>> from types import SimpleNamespace
    >>> config = SimpleNamespace(decoder_start_token_id=9, pad_token_id=0)
    >>> shift_right(config, torch.tensor([[5, 6, -100, -100]])).tolist()
    [[9, 5, 6, 0]]
    """
    for name in ("decoder_start_token_id", "pad_token_id"):
        if getattr(config, name) is None:
            raise InputError(
                f"config.{name} is None, and the decoder's input cannot be made without it: set it (for example to the "
                "tokenizer's bos_token_id or pad_token_id), or pass decoder_input_ids."
            )
    start = torch.full_like(ids[:, :1], config.decoder_start_token_id)
    return torch.cat((start, ids[:, :-1]), 1).masked_fill_(
        torch.cat((start, ids[:, :-1]), 1) == -100, config.pad_token_id
    )


def shift_source(
    config: Any, input_ids: Tensor | None, attention_mask: Tensor | None, decoder_attention_mask: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the decoder's input and mask if a call gives none: the shifted source; padding stays on its side.

    Raises:
        InputError: there are no source tokens either.
    """
    if input_ids is None:
        raise InputError("Pass decoder_input_ids or decoder_inputs_embeds: without input_ids the decoder has no input.")
    check_axes(input_ids, None)
    shifted = shift_right(config, input_ids)
    if attention_mask is None or attention_mask.ndim != 2:
        return shifted, decoder_attention_mask
    first = attention_mask.int().argmax(1, keepdim=True)
    shifted = shifted.scatter(1, first, config.decoder_start_token_id)
    return shifted, attention_mask if decoder_attention_mask is None else decoder_attention_mask


def one_source(input_ids: Tensor | None, inputs_embeds: Tensor | None, encoder_outputs: Any) -> Tensor:
    """Return the given form of the source, [B, S] or [B, S, hidden_size]; raise InputError if there is none."""
    source = inputs_embeds if input_ids is None else input_ids
    source = source if encoder_outputs is None else encoder_outputs[0]
    if source is None:
        raise InputError("Pass the source: one of input_ids, inputs_embeds and encoder_outputs.")
    return source


def one_target(decoder_input_ids: Tensor | None, decoder_inputs_embeds: Tensor | None) -> Tensor:
    """Return the given form of the target, [B, T] or [B, T, hidden_size]; raise InputError if there are both."""
    if decoder_input_ids is not None and decoder_inputs_embeds is not None:
        raise InputError("Pass one of decoder_input_ids and decoder_inputs_embeds, not both.")
    return decoder_inputs_embeds if decoder_input_ids is None else decoder_input_ids


def check_positions(options: dict[str, Any]) -> None:
    """Raise InputError for positions, which mark packed documents: packing both sides is not supported."""
    for name in POSITION_NAMES:
        if options.get(name) is not None:
            raise InputError(
                f"{name} is no input of an encoder-decoder here: positions are counted over the real tokens of "
                "attention_mask and decoder_attention_mask, and documents cannot be packed. Leave it out."
            )


def check_source_mask(attention_mask: Tensor | None, source_tokens: int, target_tokens: int | None = None) -> None:
    """Raise InputError for a source mask that is not a padding mask of the source's length.

    target_tokens: cached and new ones, if known.
    """
    if attention_mask is None:
        return
    refuse_other_types(attention_mask)
    if attention_mask.ndim != 2:
        raise InputError(
            f"attention_mask has shape {list(attention_mask.shape)}; for an encoder-decoder it must be [batch, source "
            f"tokens] = [..., {source_tokens}], 1 = a token, since the decoder reads the source by it, too."
        )
    if attention_mask.shape[1] != source_tokens:
        raise _wrong_side("attention_mask", attention_mask, "source", source_tokens, "target", target_tokens)


def check_sides(
    attention_mask: Tensor | None,
    decoder_attention_mask: Tensor | None,
    source_tokens: int,
    target_tokens: int,
    cache: Cache | None,
) -> None:
    """Raise InputError for a padding mask that does not have the length of its own side.

    Args:
        source_tokens, target_tokens: source, and new target tokens.
        cache: of earlier target tokens, which the target's mask covers, too.
    """
    past_tokens = 0 if cache is None else cache.get_seq_length()
    # while compiling, the number of tokens in a static cache is not known
    target_tokens += past_tokens if isinstance(past_tokens, int) else 0
    check_source_mask(attention_mask, source_tokens, target_tokens)
    refuse_other_types(decoder_attention_mask, "decoder_attention_mask")
    if decoder_attention_mask is None or decoder_attention_mask.ndim == 4:
        return
    if decoder_attention_mask.ndim != 2:
        raise InputError(
            f"decoder_attention_mask has shape {list(decoder_attention_mask.shape)}; it must be [batch, target "
            "tokens], or a mask matrix [batch, 1, queries, keys]."
        )
    columns = decoder_attention_mask.shape[1]
    # a static cache has room for more
    if columns < target_tokens or (columns > target_tokens and cache is None):
        raise _wrong_side(
            "decoder_attention_mask", decoder_attention_mask, "target", target_tokens, "source", source_tokens
        )


def _wrong_side(name: str, mask: Tensor, own: str, own_tokens: int, other: str, other_tokens: int | None) -> InputError:
    message = f"{name} has {mask.shape[1]} columns, but the {own} has {own_tokens} tokens."
    if mask.shape[1] == other_tokens:
        right = "decoder_attention_mask" if name == "attention_mask" else "attention_mask"
        message += f" That is the length of the {other}: the mask is on the wrong side. Pass it as {right}."
    else:
        cached = ", cached tokens first" if own == "target" else ""
        message += f" Pass one column a {own} token{cached}."
    return InputError(message)


def real_target_tokens(attention_mask: Tensor | None, token_mask: TokenMask) -> Tensor | None:
    """Return the mask over which target positions are counted, [B, K], for any form of `decoder_attention_mask`.

    token_mask: of the same call; a token table has been read into it.
    """
    is_read = attention_mask is not None and attention_mask.ndim == 4 and is_table(attention_mask)
    return token_mask.key_mask if is_read else attention_mask
