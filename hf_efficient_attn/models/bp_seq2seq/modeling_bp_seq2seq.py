"""BP-Transformer for translation: the source and the target have a tree each, and target tokens attend to the source.

The encoder updates the nodes of the source's tree, whose tokens attend to both sides. The decoder updates the nodes of
the target's tree, whose tokens attend only to their left:

    h ← N(h + attention(h; its nodes in the target))
    h ← N(h + attention(h; tokens of the source))             tokens only
    h ← N(h + W2 relu(W1 h))

A target token attends to all source tokens, or, in a document whose sentences are aligned with those of its
translation, to all tokens of its own sentence. Sources and targets may have any length, and may be padded on either
side; labels are padded on the right.

Sources: Ye, Guo, Gan, Qiu, Zhang (arXiv:1911.04070), and the authors' code, in which only tokens of the target attend
to the source, and only to its tokens. Neither says enough about these points, which are decided here:

- Spans of the target have no cross-attention and no norm after it: what their tokens take from the source reaches them
  in the next layer.
- Only the source's own tokens attend to the spans of the source; the decoder gets only its tokens.
- Each stack begins with its own norm. Source, target and output share one embedding, which is not scaled. (The authors
  share it for WMT14.)

Documents cannot be packed.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPastAndCrossAttentions
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from hf_efficient_attn.errors import InputError
from hf_efficient_attn.integration.forward_context import CACHE_ARGUMENT, takes_cache
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.layout.transfer import on_host
from hf_efficient_attn.models.base import EfficientPreTrainedModel
from hf_efficient_attn.models.encoder_decoder.heads import LeftPaddedPrompts, Seq2SeqLMHead
from hf_efficient_attn.models.encoder_decoder.model import EncoderDecoder, real_target_tokens
from hf_efficient_attn.models.encoder_decoder.stacks import CrossAttention, Stack, readable_source, record_layers
from hf_efficient_attn.models.inputs import check_integers, padding_mask
from hf_efficient_attn.models.parts.blocks import build_norm
from hf_efficient_attn.models.parts.embeddings import Positions
from hf_efficient_attn.models.prologue import PreparedCall, TableGeneration
from hf_efficient_attn.models.tree.attention import BPCrossLayer, BPLayer, TreeAttention
from hf_efficient_attn.models.tree.nodes import CLOSED, nodes_of

from .configuration_bp_seq2seq import BPSeq2SeqConfig

# Aligned sentences of a document and its translation: a target token attends only to its own sentence of the source.
#
# As in the authors' code, a target token belongs to the sentence of the token that is predicted from it, so the last
# token of a sentence attends to the next one. Source: the authors' code of Ye, Guo, Gan, Qiu, Zhang (arXiv:1911.04070),
# for IWSLT.


# sentence numbers of the source tokens and of the target tokens
INPUTS = ("sentence_ids", "decoder_sentence_ids")


def check_sentences(of_source: Tensor | None, of_target: Tensor | None, source: Tensor, target: Tensor) -> None:
    """Raise InputError unless sentence numbers are given for every token of both sides, or for neither side.

    source, target: the states of this call's tokens, [B, S, X] and [B, T, X]; only their shapes are used.
    """
    for name, given, states, tokens in zip(
        INPUTS, (of_source, of_target), (source, target), ("source", "new target"), strict=True
    ):
        if given is not None:
            check_numbers(name, given, states.shape[:2], tokens)
        elif of_source is not None or of_target is not None:
            raise InputError(
                f"{INPUTS[1 - INPUTS.index(name)]} is given without {name}, but a target token attends to source "
                "tokens with the same sentence number. Pass both, or pass neither to attend to the whole source."
            )


def check_numbers(name: str, given: Tensor, shape: tuple[int, ...], tokens: str) -> None:
    """Raise InputError if sentence numbers are not one integer for each token; tokens: their name in the message."""
    check_integers(name, given, "sentences")
    if tuple(given.shape) != tuple(shape):
        raise InputError(f"{name} has shape {list(given.shape)}; it must be [batch, {tokens} tokens] = {list(shape)}.")


def aligned_source(readable: TokenMask, of_source: Tensor | None, of_target: Tensor | None) -> TokenMask:
    """Return the token mask of the source: a target token attends to its own sentence, if sentences are aligned.

    Args:
        readable: which source tokens are not padding.
        of_source, of_target: the sentence of each token, [B, S] and [B, T]; None: sentences are not aligned.
    """
    if of_source is None or of_target is None:
        return readable
    return replace(readable, segment_ids=of_source.to(of_target.device), query_segment_ids=of_target)


class SentencePrompts:
    """Mixin of heads for `generate` with `sentence_ids`: each generated sentence attends to its source sentence.

    A sentence ends with the config's `sentence_end_token_id`. The sentence numbers of a prompt may be given; otherwise
    the prompt begins with the first sentence of the source.
    """

    # inputs of a prompt that `LeftPaddedPrompts` reorders
    prompt_inputs = INPUTS[1:]

    def _prepare_decoder_input_ids_for_generation(
        self, batch_size: int, model_input_name: str, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> tuple[Tensor, dict[str, Any]]:
        """Add the sentence numbers of the prompt to what the parent's method returns.

        If there are labels and no prompt, as in Trainer, `decoder_sentence_ids` belong to the labels and are dropped.

        Raises:
            InputError: not one number for each token of the source or of the prompt, or sentence numbers with gaps.
        """
        parent: Any = super()
        if model_kwargs.get("labels") is not None and model_kwargs.get("decoder_input_ids") is None:
            model_kwargs = {name: each for name, each in model_kwargs.items() if name != INPUTS[1]}
        ids, options = parent._prepare_decoder_input_ids_for_generation(
            batch_size, model_input_name, model_kwargs, *args, **kwargs
        )
        of_source, of_prompt = (options.get(name) for name in INPUTS)
        if of_source is not None:
            check_numbers(INPUTS[0], of_source, options["encoder_outputs"][0].shape[:2], "source")
            self.check_one_by_one(of_source, options.get("attention_mask"))
        if of_prompt is not None:
            check_numbers(INPUTS[1], of_prompt, ids.shape, "prompt")
        elif of_source is not None:
            first = first_sentence(of_source, options.get("attention_mask")).to(ids.device)
            start = first_real(options.get("decoder_attention_mask"), ids)
            options[INPUTS[1]] = first + self.ended(ids, start + 1)
        return ids, options

    def prepare_inputs_for_generation(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Add the sentence numbers of the new tokens to what the parent's method returns."""
        parent: Any = super()
        inputs: dict[str, Any] = parent.prepare_inputs_for_generation(input_ids, *args, **kwargs)
        of_prompt = kwargs.get(INPUTS[1])
        if of_prompt is not None:
            size = of_prompt.shape[1]
            of_written = of_prompt[:, -1:] + self.ended(input_ids, size)[:, size:]
            new = inputs["decoder_input_ids"].shape[1]
            inputs[INPUTS[1]] = torch.cat((of_prompt, of_written), 1)[:, -new:]
        return inputs

    def check_one_by_one(self, of_source: Tensor, mask: Tensor | None) -> None:
        """Raise InputError if the sentence numbers of a source have gaps, because generation counts on by one."""
        if self.config.sentence_end_token_id is None:  # type: ignore[attr-defined]
            return
        numbers = on_host(of_source)
        is_real = torch.ones_like(numbers) if mask is None else on_host(mask)
        for row, (own, real) in enumerate(zip(numbers, is_real, strict=True)):
            held = own[real != 0].unique()
            if len(held) and int(held[-1] - held[0]) >= len(held):
                raise InputError(
                    f"sentence_ids of row {row} has {len(held)} different numbers from {int(held[0])} to "
                    f"{int(held[-1])}, but generate adds 1 after each sentence. Number the sentences without gaps."
                )

    def ended(self, ids: Tensor, start: Tensor | int) -> Tensor:
        """Return how many sentences have ended with each token, [B, K], counted from the column `start` on."""
        end = self.config.sentence_end_token_id  # type: ignore[attr-defined]
        if end is None:
            return torch.zeros_like(ids)
        is_counted = torch.arange(ids.shape[1], device=ids.device) >= start
        return ((ids == end) & is_counted).long().cumsum(1)


def first_sentence(of_source: Tensor, mask: Tensor | None) -> Tensor:
    """Return the number of the first sentence of each source, [B, 1]; mask: [B, S], 0 = padding."""
    return of_source.gather(1, first_real(mask, of_source).to(of_source.device))


def first_real(mask: Tensor | None, ids: Tensor) -> Tensor:
    """Return the column of the first token of each row that is not padding, [B, 1]."""
    if mask is None:
        return torch.zeros_like(ids[:, :1], dtype=torch.long)
    return mask.int().argmax(1, keepdim=True).to(ids.device)


class FirstTokens(nn.Module):
    """The embeddings before the first layer: positions, if any, dropout and a norm. [B, T, hidden_size] → the same.

    size_field: name of the config field with the number of learned positions.
    """

    def __init__(self, config: BPSeq2SeqConfig, size_field: str) -> None:
        super().__init__()
        self.positions = Positions(config, size_field)
        self.dropout = nn.Dropout(config.embedding_dropout)
        self.norm = build_norm(config)

    def forward(self, call: PreparedCall) -> Tensor:
        return self.norm(self.dropout(self.positions(call.embedded, call)[0]))


class BPSeq2SeqPreTrainedModel(EfficientPreTrainedModel):
    """Weight initialisation, loading checks and capabilities shared by the backbone, its stacks and its head."""

    config_class = BPSeq2SeqConfig
    config: BPSeq2SeqConfig
    base_model_prefix = "model"
    model_tags = ["efficient-attention", "bp-transformer", "hf_efficient_attn"]
    decoder_inputs = INPUTS
    _no_split_modules = ["BPLayer", "BPCrossLayer"]


class BPSeq2SeqStack(Stack, BPSeq2SeqPreTrainedModel):
    """Base of encoder and decoder: embeddings and blocks; there is no final norm, because blocks are post-norm."""

    def __init__(
        self, config: BPSeq2SeqConfig, embed: Callable[[Tensor], Tensor], layers: Iterable[nn.Module], size_field: str
    ) -> None:
        super().__init__(config, embed, FirstTokens(config, size_field), layers, nn.Identity())


class BPSeq2SeqEncoder(BPSeq2SeqStack):
    """Embeddings and blocks over the source's tree. Shapes: input_ids [B, S] → [B, S, hidden_size]."""

    _can_record_outputs = {
        "hidden_states": record_layers(BPLayer, "encoder_layers"),
        "attentions": OutputRecorder(TreeAttention, index=1),
    }

    def __init__(self, config: BPSeq2SeqConfig, embed: Callable[[Tensor], Tensor]) -> None:
        layers = (BPLayer(config, index, is_causal=False) for index in range(config.encoder_layers))
        super().__init__(config, embed, layers, "max_position_embeddings")

    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """Return the last states of the source's tokens; arguments as in `BPSeq2SeqModel.forward`."""
        # `generate` also passes this to the encoder, but only the decoder uses it
        kwargs.pop(INPUTS[0], None)
        call = self.source_call(input_ids, attention_mask, inputs_embeds, kwargs)
        nodes = nodes_of(self.config, call, is_causal=False)
        tokens = self.embeddings(call)
        spans = nodes.first_spans(tokens)
        for layer in self.layers:
            tokens, spans = layer(tokens, spans, nodes, **kwargs)
        return BaseModelOutput(last_hidden_state=self.norm(tokens).contiguous())


class BPSeq2SeqDecoder(BPSeq2SeqStack):
    """Embeddings and blocks over the target's tree. Shapes: input_ids [B, T] → [B, T, hidden_size]."""

    _can_record_outputs = {
        "hidden_states": record_layers(BPCrossLayer, "decoder_layers"),
        "attentions": OutputRecorder(TreeAttention, index=1),
        "cross_attentions": OutputRecorder(CrossAttention, index=1),
    }

    def __init__(self, config: BPSeq2SeqConfig, embed: Callable[[Tensor], Tensor]) -> None:
        layers = (BPCrossLayer(config, index, is_causal=True) for index in range(config.decoder_layers))
        super().__init__(config, embed, layers, "max_target_position_embeddings")

    @takes_cache
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        sentence_ids: Tensor | None = None,
        decoder_sentence_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Return the last states of the target's tokens and, with `use_cache` (default: the config's), the cache.

        Args:
            attention_mask: mask of the target, [B, K] over cached and new tokens; or a matrix [B, 1, T, K] that masks
                only padding and later tokens.
            encoder_hidden_states, encoder_attention_mask: states and padding mask of the source, [B, S, hidden_size]
                and [B, S].
            sentence_ids: the sentence number of each source token, [B, S].
            decoder_sentence_ids: for each new target token, the sentence number of the token that is predicted from it,
                [B, T]. The target token attends to the source tokens with this number; if there are none, it attends to
                no source token. None for both: it attends to the whole source.
        """
        call = self.target_call(input_ids, attention_mask, cache, inputs_embeds, use_cache, kwargs)
        mask = padding_mask(call.attention_mask, call.batch_size, CLOSED, is_causal=True)
        call = replace(call, attention_mask=mask)
        check_sentences(sentence_ids, decoder_sentence_ids, encoder_hidden_states, call.embedded)
        readable = readable_source(encoder_attention_mask, encoder_hidden_states, call.tokens)
        source = (encoder_hidden_states, aligned_source(readable, sentence_ids, decoder_sentence_ids))
        nodes = nodes_of(self.config, call, is_causal=True)
        tokens = self.embeddings(counted_by_tokens(self.config, call))
        spans = nodes.first_spans(tokens)
        for layer in self.layers:
            tokens, spans = layer(tokens, spans, nodes, *source, cache=call.cache, **kwargs)
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=self.norm(tokens).contiguous(), **{CACHE_ARGUMENT: call.cache}
        )


def counted_by_tokens(config: BPSeq2SeqConfig, call: PreparedCall) -> PreparedCall:
    """Return a decoder's call with a token table replaced by the padding mask from which positions are counted."""
    mask = call.attention_mask
    if mask is None or mask.ndim != 4:
        return call
    token_mask = call.masks(config, is_causal=True).token_mask
    return replace(call, attention_mask=real_target_tokens(mask, token_mask))


class BPSeq2SeqModel(EncoderDecoder, BPSeq2SeqPreTrainedModel):
    """The backbone: a shared token embedding, encoder and decoder.

    Shapes: input_ids [B, S], decoder_input_ids [B, T] → [B, T, hidden_size]. `sentence_ids` and `decoder_sentence_ids`
    align the sentences of a document with those of its translation; see `BPSeq2SeqDecoder`.
    """

    def __init__(self, config: BPSeq2SeqConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.encoder = BPSeq2SeqEncoder(config, self.embed)
        self.decoder = BPSeq2SeqDecoder(config, self.embed)
        self.post_init()


class BPSeq2SeqForConditionalGeneration(
    SentencePrompts, LeftPaddedPrompts, TableGeneration, Seq2SeqLMHead, BPSeq2SeqPreTrainedModel, GenerationMixin
):
    backbone_class = BPSeq2SeqModel


__all__ = [
    "BPSeq2SeqForConditionalGeneration",
    "BPSeq2SeqModel",
    "BPSeq2SeqPreTrainedModel",
]
