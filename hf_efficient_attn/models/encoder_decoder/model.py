"""The backbone of an encoder-decoder: a shared token embedding, and a decoder that attends to the encoder's output."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPastAndCrossAttentions, Seq2SeqModelOutput
from transformers.utils import can_return_tuple

from hf_efficient_attn.errors import ConfigurationError, InputError
from hf_efficient_attn.integration.forward_context import CACHE_ARGUMENT, takes_cache
from hf_efficient_attn.integration.names import is_table
from hf_efficient_attn.integration.packing import ENDS, NUMBERS
from hf_efficient_attn.integration.unsupported import check_mask_values, refuse_paged
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.models.heads.task_heads import NamesOwnInputs
from hf_efficient_attn.models.inputs import check_axes, prefetch_inputs, refuse_other_types

# The two sides of an encoder-decoder's inputs: which mask belongs to which, and the decoder's default input.


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
    shifted = torch.cat((start, ids[:, :-1]), 1)
    return shifted.masked_fill_(shifted == -100, config.pad_token_id)


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
                f"{name} is not an input of this encoder-decoder: positions are counted over the unmasked tokens of "
                "attention_mask and decoder_attention_mask, and documents cannot be packed. Leave it out."
            )


def check_source_mask(attention_mask: Tensor | None, source_tokens: int, target_tokens: int | None = None) -> None:
    """Raise InputError for a source mask that is not a padding mask of the source's length.

    target_tokens: the number of cached and new target tokens, if known.
    """
    if attention_mask is None:
        return
    refuse_other_types(attention_mask)
    if attention_mask.ndim != 2:
        raise InputError(
            f"attention_mask has shape {list(attention_mask.shape)}; for an encoder-decoder it must be [batch, source "
            f"tokens] = [..., {source_tokens}], 1 = a token, because the decoder also uses it to attend to the source."
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
        source_tokens, target_tokens: the numbers of source tokens and of new target tokens.
        cache: the cache of earlier target tokens, which the target's mask also covers.
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
        message += f" Pass one column for each {own} token{cached}."
    return InputError(message)


def real_target_tokens(attention_mask: Tensor | None, token_mask: TokenMask) -> Tensor | None:
    """Return the mask over which target positions are counted, [B, K], for any form of `decoder_attention_mask`.

    token_mask: the token mask of the same call, which includes that of a token table.
    """
    is_read = attention_mask is not None and attention_mask.ndim == 4 and is_table(attention_mask)
    return token_mask.key_mask if is_read else attention_mask


class EncoderDecoder(NamesOwnInputs):
    """Mixin over a family's `PreTrainedModel`, which builds `embed_tokens`, `encoder` and `decoder`.

    Inputs that only one family has are named in `extra_inputs` of its `PreTrainedModel`, if they are passed on to the
    encoder, or in `decoder_inputs`.
    """

    # the head, sharded by columns, has the same weight; transformers adds this entry itself if a config has a plan
    _tp_plan = {"embed_tokens": "embedding_rowwise"}

    def tokens_to_prefetch(self, input_ids: Tensor | None) -> Tensor | None:
        """Return the source's tokens if the encoder needs their values to decide what it computes, otherwise None."""
        return None

    @takes_cache
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Any = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Seq2SeqModelOutput:
        """Return the last hidden states of both stacks and, with `use_cache`, the cache.

        Args:
            attention_mask: 1 = a source token, [B, S], padded on either side.
            decoder_input_ids: [B, T]; by default the source after the start token, as in BART.
            decoder_attention_mask: 1 = a target token, [B, K] over cached and new tokens; None: all are.
            encoder_outputs: earlier outputs of the encoder, instead of input_ids.
            cache: cache of earlier target tokens and of the source's keys and values.
            inputs_embeds, decoder_inputs_embeds: embeddings instead of tokens, before they are scaled, if they are.

        Raises:
            InputError: inputs that are missing, given twice, or have the length of the other side; more tokens than
                positions.
        """
        refuse_paged(cache)
        check_positions(kwargs)
        if decoder_input_ids is None and decoder_inputs_embeds is None:
            decoder_input_ids, decoder_attention_mask = shift_source(
                self.config, input_ids, attention_mask, decoder_attention_mask
            )
        source = one_source(input_ids, inputs_embeds, encoder_outputs)
        target = one_target(decoder_input_ids, decoder_inputs_embeds)
        of_source = {name: kwargs.pop(name, None) for name in getattr(self, "extra_inputs", ())}
        of_target = {name: kwargs.pop(name, None) for name in getattr(self, "decoder_inputs", ())}
        masks = (attention_mask, decoder_attention_mask, *of_source.values(), *of_target.values())
        prefetch_inputs(self.tokens_to_prefetch(input_ids), *masks)
        check_sides(attention_mask, decoder_attention_mask, source.shape[1], target.shape[1], cache)
        kwargs["return_dict"] = True
        if encoder_outputs is None:
            encoder_outputs = self.encoder(input_ids, attention_mask, inputs_embeds, **of_source, **kwargs)
        else:
            encoder_outputs = checked_outputs(encoder_outputs, attention_mask)
        read = (encoder_outputs.last_hidden_state, attention_mask, cache, decoder_inputs_embeds, use_cache)
        outputs = self.decoder(decoder_input_ids, decoder_attention_mask, *read, **of_target, **kwargs)
        return joined_outputs(encoder_outputs, outputs)


def checked_outputs(encoder_outputs: Any, attention_mask: Tensor | None) -> BaseModelOutput:
    """Return earlier outputs of the encoder as a `BaseModelOutput`, after checking the source's mask."""
    check_mask_values(attention_mask)
    return encoder_outputs if isinstance(encoder_outputs, BaseModelOutput) else BaseModelOutput(*encoder_outputs)


def joined_outputs(encoder: BaseModelOutput, decoder: BaseModelOutputWithPastAndCrossAttentions) -> Seq2SeqModelOutput:
    """Return the outputs of both stacks as one."""
    return Seq2SeqModelOutput(
        last_hidden_state=decoder.last_hidden_state,
        decoder_hidden_states=decoder.hidden_states,
        decoder_attentions=decoder.attentions,
        cross_attentions=decoder.cross_attentions,
        encoder_last_hidden_state=encoder.last_hidden_state,
        encoder_hidden_states=encoder.hidden_states,
        encoder_attentions=encoder.attentions,
        **{CACHE_ARGUMENT: getattr(decoder, CACHE_ARGUMENT)},
    )


# Fields of the configs of encoder-decoders; each family's config explains them.


@dataclass(init=False, repr=False, eq=False)
class EncoderDecoderFields:
    """Mixin: two stacks, and the loss of the target."""

    attribute_map = {"num_hidden_layers": "encoder_layers"}

    encoder_layers: int = 6
    decoder_layers: int = 6
    max_target_position_embeddings: int = 1024
    label_smoothing: float | int = 0.0
    is_encoder_decoder: bool = True

    @property
    def is_causal(self) -> bool:
        """Whether the encoder is causal; it never is, and the decoder always is."""
        return False

    def check_label_smoothing(self) -> None:
        """Raise ConfigurationError for a label_smoothing that is out of range."""
        if not 0 <= self.label_smoothing < 1:
            raise ConfigurationError(f"label_smoothing={self.label_smoothing} must be at least 0 and below 1.")


def fields_of_stacks(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields; refuse `num_hidden_layers`, which does not say which stack it is for."""
    if "num_hidden_layers" in fields:
        raise ConfigurationError(
            f"num_hidden_layers={fields['num_hidden_layers']} does not say which stack it is for. Pass encoder_layers "
            "and decoder_layers."
        )
    return fields
