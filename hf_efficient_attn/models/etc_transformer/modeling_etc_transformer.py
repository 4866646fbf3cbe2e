"""ETC: a long input, of which tokens read a band, and a global input, whose tokens read everything and are read by all.

Every global token stands for a part of the text, such as a sentence, and long tokens know by a label which are theirs:

    long  ← attention over { band of long tokens } ∪ { all global tokens }
    global ← attention over { all global tokens } ∪ { all long tokens }

each under one softmax, for n · (2r + 1) + 2 · n · g + g² scores in place of n². A call may give global tokens, links
and masks (`structured_inputs` makes them from text); without, every chunk of `chunk_tokens` tokens has a global token.

Sources: Ainslie et al. (arXiv:2004.08483) and the authors' code; Zaheer et al. (arXiv:2007.14062). We differ in these
points:

- Padding changes nothing. The authors let padding read padding.
- Long tokens read any pattern of long tokens, so that BigBird-ETC is a preset; random blocks, if any, are drawn for the
  length of each text.
- There are no absolute positions, which the authors' models have not either.
- The authors did not publish the score of contrastive predictive coding: here it is the product of two global states
  over the root of their width.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from hf_efficient_attn.attention.cache_argument import takes_cache
from hf_efficient_attn.attention.processes import compare_processes
from hf_efficient_attn.errors import UnsupportedBackendError
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.models.base import EfficientPreTrainedModel
from hf_efficient_attn.models.heads.auxiliary_loss import expect_use
from hf_efficient_attn.models.heads.outputs import BackboneOutput
from hf_efficient_attn.models.heads.task_heads import (
    MaskedLMHead,
    MultipleChoiceHead,
    SequenceClassificationHead,
    TokenClassificationHead,
)
from hf_efficient_attn.models.inputs.masks import bring_inputs, padding_mask
from hf_efficient_attn.models.parts.blocks import build_norm
from hf_efficient_attn.models.prologue import PreparedCall, prepare_call
from hf_efficient_attn.models.sparse.inputs import check_inputs

from .attention import EtcAttention
from .configuration_etc_transformer import EtcTransformerConfig
from .contrast import contrastive_loss, refuse_recording
from .global_input import CLOSED, INPUTS, cut_at_contexts, find_globals
from .heads import EtcAnswerHead, EtcTextHead
from .layers import EtcEmbeddings, EtcLayer, with_all_gradients
from .structure import GlobalInput, build_structure


@dataclass
class EtcOutput(BackboneOutput):
    """The states of long and of global tokens.

    Attributes:
        global_hidden_state: [B, G, hidden_size].
        global_mask: 1 = a global token, 0 = padding, [B, G].
        global_documents: the number of the packed document of each, [B, G], −1: it is padding; None: none are packed.
        attentions: of each layer, how much long tokens read global and long tokens, [B, H, T, G + T].
        global_hidden_states: those of each layer, [B, G, hidden_size]; with `output_global_hidden_states=True`.
        global_attentions: of each layer, how much global tokens read global and long tokens, [B, H, G, G + T]; with
            `output_global_attentions=True`.
    """

    global_hidden_state: Tensor | None = None
    global_mask: Tensor | None = None
    global_documents: Tensor | None = None
    global_hidden_states: tuple[Tensor, ...] | None = None
    global_attentions: tuple[Tensor, ...] | None = None


class EtcTransformerPreTrainedModel(EfficientPreTrainedModel):
    """Weight initialisation, loading checks and capabilities shared by the backbone and its heads."""

    config_class = EtcTransformerConfig
    config: EtcTransformerConfig
    base_model_prefix = "model"
    model_tags = ["efficient-attention", "etc", "hf_efficient_attn"]
    extra_inputs = ("token_type_ids", *INPUTS)
    _no_split_modules = ["EtcLayer"]
    _can_record_outputs = {
        "hidden_states": EtcLayer,
        "attentions": EtcAttention,
        "global_hidden_states": OutputRecorder(EtcLayer, index=1),
        "global_attentions": OutputRecorder(EtcAttention, index=3),
    }


class EtcTransformerModel(EtcTransformerPreTrainedModel):
    """The backbone: embeddings, layers, final norm. input_ids [B, T] → [B, T, hidden_size], and global states."""

    def __init__(self, config: EtcTransformerConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.embeddings = EtcEmbeddings(config)
        self.layers = nn.ModuleList(EtcLayer(config, index) for index in range(config.num_hidden_layers))
        is_pre_norm = config.norm_position == "pre"
        self.norm, self.global_norm = (build_norm(config) if is_pre_norm else nn.Identity() for _ in range(2))
        self.gradient_checkpointing = False
        self.post_init()

    @takes_cache
    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        global_input_ids: torch.LongTensor | None = None,
        global_mask: Tensor | None = None,
        long_to_global: Tensor | None = None,
        global_token_type_ids: torch.LongTensor | None = None,
        global_contexts: Tensor | None = None,
        global_reads_all: Tensor | None = None,
        long_contexts: Tensor | None = None,
        cpc_mask: Tensor | None = None,
        cpc_input_ids: torch.LongTensor | None = None,
        **kwargs: Any,
    ) -> EtcOutput:
        """Return the states of long and of global tokens.

        Args:
            attention_mask: 1 = real token, [B, T], padded on either side; or [B, 1, T, T] with True or 0.0 = allowed,
                if it only leaves out padding.
            position_ids: [B, T]; where they restart, a packed document begins, with global tokens of its own. Nothing
                else depends on positions.
            inputs_embeds: [B, T, hidden_size].
            global_input_ids: [B, G]; `structured_inputs` makes this and the following. None: every chunk of
                `chunk_tokens` real tokens has a global token.
            global_mask: 1 = a global token, [B, G]. A masked one reads and is read by nothing, but keeps its place:
                distances between the others count it, as in the authors' code. Mask those at an end.
            long_to_global: the number of the global token to which each long token belongs, [B, T], or several,
                [B, T, K]; −1: none.
            global_contexts: the part of the text of each global token, [B, G], if its parts are in no order.
            global_reads_all: 1 = reads all long tokens whatever `hard_global_to_long` says, [B, G].
            long_contexts: the number of the context of each long token, [B, T]: neighbouring tokens of one number are a
                context, outside of which they read no long token, and to which an `attention_pattern` applies as if it
                were alone; global tokens read and are read as ever. None: long tokens read across contexts.
            cpc_mask: 1 = all long tokens that belong to this global token are masked in `input_ids`, [B, G]: in a model
                with `cpc_loss_weight` its state is told apart from those of others by what it is when it reads them
                alone.
            cpc_input_ids: the long tokens before they were masked, [B, T].

        Raises:
            InputError: inputs that contradict each other, or a mask with other pairs than those of real tokens.
            UnsupportedBackendError: a cache, or an attention implementation that is not ours.
        """
        self.check_call(input_ids, inputs_embeds, cache, cpc_mask, kwargs)
        types = (token_type_ids, global_token_type_ids)
        bring_inputs(attention_mask, position_ids, global_mask, global_reads_all, long_to_global, long_contexts, *types)
        compare_processes(self)
        embedded = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        attention_mask = padding_mask(attention_mask, embedded.shape[0], CLOSED)
        call = prepare_call(self.config, embedded, attention_mask, position_ids, None, kwargs)
        mask = call.masks(self.config)["token_mask"]
        given = (global_mask, long_to_global, global_contexts, global_reads_all, types[1])
        ids, globals_ = find_globals(self.config, call, mask.key_mask, global_input_ids, *given)
        mask = cut_at_contexts(mask, long_contexts, call)
        long, states = self.encode(call, ids, globals_, types, mask, kwargs)
        loss = None
        if cpc_mask is not None:
            loss = contrastive_loss(self, states, ids, globals_, types, cpc_mask, cpc_input_ids, mask.segment_ids)
        long, states = with_all_gradients(long, states)
        return EtcOutput(
            last_hidden_state=long,
            global_hidden_state=states,
            # of integers, as masks of inputs are
            global_mask=globals_.real.long(),
            global_documents=globals_.documents,
            auxiliary_loss=expect_use(loss, long, self.config.cpc_loss_weight),
        )

    def check_call(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        cache: Cache | None,
        cpc_mask: Tensor | None,
        options: dict[str, Any],
    ) -> None:
        """Raise InputError or UnsupportedBackendError for a call that no ETC can compute; see `forward`."""
        check_inputs(self.config, input_ids, inputs_embeds)
        if cpc_mask is not None:
            refuse_recording(self.config, options)
        if cache is not None:
            raise UnsupportedBackendError(
                "ETC reads its own tokens alone, and has no cache. Prefix tuning cannot give it keys; use prompt "
                "tuning or LoRA instead."
            )

    def encode(
        self,
        call: PreparedCall,
        global_ids: Tensor,
        globals_: GlobalInput,
        types: tuple[Tensor | None, Tensor | None],
        mask: TokenMask,
        options: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        """Return the states of long and of global tokens after all layers."""
        named = (self.config.long_token_type, self.embeddings.norm, "token_type_ids")
        long = self.embeddings(call.embedded, types[0], *named)
        embedded, norm = self.embed_tokens(global_ids).to(long.dtype), self.embeddings.global_norm
        states = self.embeddings(embedded, types[1], 0, norm, "global_token_type_ids")
        structure = build_structure(self.config, globals_, mask.key_mask, call.documents)
        for layer in self.layers:
            long, states = layer(long, states, structure, token_mask=mask, **options)
        return self.norm(long), self.global_norm(states)


class EtcTransformerForMaskedLM(MaskedLMHead, EtcTransformerPreTrainedModel):
    backbone_class = EtcTransformerModel


class EtcTransformerForSequenceClassification(EtcTextHead, SequenceClassificationHead, EtcTransformerPreTrainedModel):
    backbone_class = EtcTransformerModel


class EtcTransformerForTokenClassification(TokenClassificationHead, EtcTransformerPreTrainedModel):
    backbone_class = EtcTransformerModel


class EtcTransformerForQuestionAnswering(EtcAnswerHead, EtcTransformerPreTrainedModel):
    backbone_class = EtcTransformerModel


class EtcTransformerForMultipleChoice(MultipleChoiceHead, EtcTextHead, EtcTransformerPreTrainedModel):
    backbone_class = EtcTransformerModel


__all__ = [
    "EtcTransformerForMaskedLM",
    "EtcTransformerForMultipleChoice",
    "EtcTransformerForQuestionAnswering",
    "EtcTransformerForSequenceClassification",
    "EtcTransformerForTokenClassification",
    "EtcTransformerModel",
    "EtcTransformerPreTrainedModel",
]
