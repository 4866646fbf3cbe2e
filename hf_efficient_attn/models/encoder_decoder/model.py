"""The backbone of an encoder-decoder: a shared token embedding, and two stacks, one of which reads the other."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPastAndCrossAttentions,
    Seq2SeqModelOutput,
)
from transformers.utils import can_return_tuple

from hf_efficient_attn.attention.cache_argument import CACHE_ARGUMENT, takes_cache
from hf_efficient_attn.attention.input_checks import check_mask_values
from hf_efficient_attn.attention.refusals import refuse_paged
from hf_efficient_attn.models.encoder_decoder.inputs import (
    check_positions,
    check_sides,
    one_source,
    one_target,
    shift_source,
)
from hf_efficient_attn.models.heads.parts import name_inputs, own_inputs
from hf_efficient_attn.models.inputs.masks import bring_inputs


class EncoderDecoder:
    """Mixin over a family's `PreTrainedModel`, which builds `embed_tokens`, `encoder` and `decoder`.

    Inputs that only one family has are named in `extra_inputs` of its `PreTrainedModel`, if they are passed on to the
    encoder, or in `decoder_inputs`.
    """

    # the head, sharded by columns, has the same weight; transformers adds this itself if a config has a plan
    _tp_plan = {"embed_tokens": "embedding_rowwise"}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        named = own_inputs(cls)
        if named:
            cls.forward = name_inputs(cls.forward, named)

    def embed(self, input_ids: Tensor) -> Tensor:
        """Return token embeddings [B, T, hidden_size]; both stacks look them up here."""
        return self.embed_tokens(input_ids)

    def asked_tokens(self, input_ids: Tensor | None) -> Tensor | None:
        """Return the source's tokens if the encoder decides by their values what it computes, otherwise None."""
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
            inputs_embeds, decoder_inputs_embeds: embeddings instead of tokens, before their scale, if there is one.

        Raises:
            InputError: inputs that are missing, doubled, or of the other side's length; more tokens than positions.
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
        bring_inputs(self.asked_tokens(input_ids), *masks)
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
    """Return what an encoder has computed earlier, by name."""
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
