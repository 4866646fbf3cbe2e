"""Task heads of an encoder-decoder, on the decoder's output."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers.modeling_outputs import (
    Seq2SeqLMOutput,
    Seq2SeqQuestionAnsweringModelOutput,
    Seq2SeqSequenceClassifierOutput,
)
from transformers.utils import can_return_tuple

from hf_efficient_attn.errors import InputError
from hf_efficient_attn.integration.forward_context import CACHE_ARGUMENT, CacheGeneration, takes_cache
from hf_efficient_attn.models.encoder_decoder.model import shift_right
from hf_efficient_attn.models.heads.task_heads import (
    Head,
    LanguageModelHead,
    QuestionAnsweringHead,
    SequenceClassificationHead,
)


class Seq2SeqHead(Head):
    """Base of the heads: builds the backbone, whose encoder gets the task, and the head on the decoder."""

    recorded = (
        CACHE_ARGUMENT,
        "decoder_hidden_states",
        "decoder_attentions",
        "cross_attentions",
        "encoder_last_hidden_state",
        "encoder_hidden_states",
        "encoder_attentions",
    )

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.encoder.task = self.task

    def call_model(
        self,
        given: tuple[Any, ...],
        use_cache: bool | None,
        has_labels: bool,
        **kwargs: Any,
    ) -> Any:
        """Return the outputs of the backbone; with labels nothing is cached.

        given: the first arguments of its `forward`.
        """
        use_cache = False if has_labels else use_cache
        return self.model(*given, use_cache=use_cache, return_dict=True, **kwargs)


class Seq2SeqLMHead(CacheGeneration, Seq2SeqHead, LanguageModelHead):
    """Prediction of the target. Shapes: input_ids [B, S], decoder_input_ids [B, T] → logits [B, T, vocab_size]."""

    output_class = Seq2SeqLMOutput

    @takes_cache
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Any = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        num_items_in_batch: int | Tensor | None = None,
        **kwargs: Any,
    ) -> Seq2SeqLMOutput:
        """Return logits and, with `labels` [B, T] (−100 = not counted), the loss; see `EncoderDecoder.forward`.

        num_items_in_batch: divide the sum of the loss by this; None: by the number of labels that count.
        """
        if labels is not None and decoder_input_ids is None and decoder_inputs_embeds is None:
            decoder_input_ids = shift_right(self.config, labels)
        if decoder_input_ids is None and decoder_inputs_embeds is None:
            raise InputError(
                "Pass decoder_input_ids, or labels, from which the decoder's input is made. (If Trainer smooths "
                "labels, it removes them: use DataCollatorForSeq2Seq(tokenizer, model=model), which adds "
                "decoder_input_ids, or config.label_smoothing.)"
            )
        given = (input_ids, attention_mask, decoder_input_ids, decoder_attention_mask, encoder_outputs, cache)
        kwargs |= {"inputs_embeds": inputs_embeds, "decoder_inputs_embeds": decoder_inputs_embeds}
        outputs = self.call_model(given, use_cache, labels is not None, **kwargs)
        logits = self.lm_head(outputs.last_hidden_state)
        loss = None
        if labels is not None:
            smoothing = self.config.label_smoothing if self.training else 0.0
            loss = smoothed_loss(logits, labels, smoothing, num_items_in_batch)
        return self.output(outputs, loss, logits=logits)

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """Return the labels after the start token, as `DataCollatorForSeq2Seq` needs them."""
        return shift_right(self.config, labels)


class Seq2SeqSequenceClassificationHead(Seq2SeqHead, SequenceClassificationHead):
    """One label, several labels, or numbers per source, from the decoder's state at the last end token, as in BART.

    Shapes: input_ids [B, S] → logits [B, num_labels]. By default the decoder's input is the source, shifted.
    """

    output_class = Seq2SeqSequenceClassifierOutput

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Any = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Seq2SeqSequenceClassifierOutput:
        given = (input_ids, attention_mask, decoder_input_ids, decoder_attention_mask, encoder_outputs)
        kwargs |= {"inputs_embeds": inputs_embeds, "decoder_inputs_embeds": decoder_inputs_embeds}
        outputs = self.call_model(given, use_cache, labels is not None, **kwargs)
        hidden = outputs.last_hidden_state
        last = last_end(self.config.eos_token_id, input_ids, attention_mask, hidden)
        pooled = hidden[torch.arange(hidden.shape[0], device=hidden.device), last]
        logits = self.classifier(self.dropout(pooled))
        loss = None if labels is None else self.compute_loss(logits, labels)
        return self.output(outputs, loss, logits=logits)


class Seq2SeqQuestionAnsweringHead(Seq2SeqHead, QuestionAnsweringHead):
    """Start and end of the answer in the source; the decoder's input is the source, shifted.

    Shapes: input_ids [B, S] → start_logits, end_logits [B, S].
    """

    output_class = Seq2SeqQuestionAnsweringModelOutput

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Any = None,
        start_positions: torch.LongTensor | None = None,
        end_positions: torch.LongTensor | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Seq2SeqQuestionAnsweringModelOutput:
        has_labels = start_positions is not None and end_positions is not None
        given = (input_ids, attention_mask, decoder_input_ids, decoder_attention_mask, encoder_outputs)
        kwargs |= {"inputs_embeds": inputs_embeds, "decoder_inputs_embeds": decoder_inputs_embeds}
        outputs = self.call_model(given, use_cache, has_labels, **kwargs)
        logits = self.qa_outputs(self.residual_mlp(outputs.last_hidden_state))
        start_logits, end_logits = (each.contiguous() for each in logits.unbind(-1))
        loss = self.loss_function(start_logits, end_logits, start_positions, end_positions) if has_labels else None
        return self.output(outputs, loss, start_logits=start_logits, end_logits=end_logits)


def smoothed_loss(
    logits: Tensor, labels: Tensor, label_smoothing: float, num_items_in_batch: int | Tensor | None = None
) -> Tensor:
    """Return the cross-entropy to (1 − ε)·target + ε / vocab_size, the mean over labels other than −100.

    torch and Trainer's `label_smoothing_factor` use the same variant. Shapes: logits [B, T, V], labels [B, T] → a
    number in float32 or wider.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    loss = cross_entropy(
        wide.flatten(0, 1),
        labels.to(logits.device).flatten(),
        reduction="mean" if num_items_in_batch is None else "sum",
        label_smoothing=label_smoothing,
    )
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def last_end(
    eos_token_id: int | list[int] | None, input_ids: Tensor | None, attention_mask: Tensor | None, hidden: Tensor
) -> Tensor:
    """Return the index of each source's last end token, [B]; for embeddings, of its last real token.

    Raises:
        InputError: a source without an end token, or a decoder input that is not as long as the source.
    """
    batch_size, tokens = hidden.shape[:2]
    source = attention_mask if input_ids is None else input_ids
    if source is not None and source.shape[1] != tokens:
        raise InputError(
            f"The label is predicted at the last end token of the source, but the decoder gets {tokens} tokens and "
            f"the source has {source.shape[1]}. Leave decoder_input_ids out, or give one token for each source token."
        )
    index = torch.arange(tokens, device=hidden.device).expand(batch_size, -1)
    if input_ids is None:
        is_end = torch.ones_like(index) if attention_mask is None else attention_mask
    else:
        wanted = torch.as_tensor([] if eos_token_id is None else eos_token_id, device=input_ids.device)
        is_end = torch.isin(input_ids, wanted)
        if attention_mask is not None:
            # padding may be the same token
            is_end = is_end & attention_mask.bool()
    is_end = is_end.to(hidden.device).bool()
    if not torch.compiler.is_compiling() and not bool(is_end.any(1).all()):
        row = int((~is_end.any(1)).nonzero()[0])
        raise InputError(
            f"Example {row} has no end token (eos_token_id={eos_token_id}), at which its label is predicted. Tokenize "
            "with special tokens, and truncate before they are added."
        )
    return torch.where(is_end, index, -1).argmax(1)


# Prompts of a decoder in `generate`, for decoders that count from the first token of a text.


class LeftPaddedPrompts:
    """Mixin of heads for `generate`: padding of the decoder's prompts comes first, before the start token.

    `generate` puts the start token first. So padding on the left leaves a hole between the start token and the prompt,
    and with padding on the right new tokens follow the padding. But a masked token has a node in the tree of a text,
    and a hole would change the generated tokens. The tokens that `generate` returns therefore begin with the padding.

    Attributes:
        prompt_inputs: the names of inputs, besides the mask, with an entry for each token of a prompt.
    """

    prompt_inputs: tuple[str, ...] = ()

    def _prepare_decoder_input_ids_for_generation(self, *args: Any, **kwargs: Any) -> tuple[Tensor, dict[str, Any]]:
        """Prepare the inputs as transformers does, then move padding to the front."""
        parent: Any = super()
        ids, options = parent._prepare_decoder_input_ids_for_generation(*args, **kwargs)
        mask = options.get("decoder_attention_mask")
        found = {name: options[name] for name in self.prompt_inputs if isinstance(options.get(name), Tensor)}
        for name, given in found.items():
            if given.ndim == 2 and given.shape[1] == ids.shape[1] - 1:
                # `generate` has added the start token to the prompt: it gets the entry of the first token
                is_token = torch.ones_like(given) if mask is None else mask[:, -given.shape[1] :].to(given.device)
                first = is_token.int().argmax(1, keepdim=True)
                options[name] = torch.cat((given.gather(1, first), given), 1)
        # the model refuses inputs of another shape itself
        if isinstance(mask, Tensor) and mask.shape == ids.shape:
            order = mask.bool().int().argsort(dim=1, stable=True)
            ids = ids.gather(1, order.to(ids.device))
            for name in ("decoder_attention_mask", *found):
                if options[name].shape == ids.shape:
                    options[name] = options[name].gather(1, order.to(options[name].device))
        return ids, options
