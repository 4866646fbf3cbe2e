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
from transformers.utils import can_return_tuple
from transformers.utils.import_utils import is_tracing
from transformers.utils.output_capturing import OutputRecorder

from hf_efficient_attn.errors import InputError
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.layout.transfer import on_host
from hf_efficient_attn.models.base import EfficientPreTrainedModel
from hf_efficient_attn.models.heads.outputs import (
    BackboneOutput,
    QuestionAnsweringHeadOutput,
    expect_use,
    with_gradient_of,
)
from hf_efficient_attn.models.heads.task_heads import (
    ClassificationHead,
    MaskedLMHead,
    MultipleChoiceHead,
    QuestionAnsweringHead,
    SequenceClassificationHead,
    TokenClassificationHead,
    pool,
)
from hf_efficient_attn.models.inputs import prefetch_inputs
from hf_efficient_attn.models.parts.blocks import MLP, Block, build_norm
from hf_efficient_attn.models.parts.embeddings import with_types
from hf_efficient_attn.models.prologue import PreparedCall, backbone_forward

from .attention import EtcAttention
from .configuration_etc_transformer import EtcTransformerConfig
from .global_input import (
    CLOSED,
    INPUTS,
    GlobalInput,
    Structure,
    build_structure,
    contrastive_loss,
    cut_at_contexts,
    find_globals,
    refuse_recording,
)

# The parts of an ETC around its attention: what comes before the first layer, and the layer.


class EtcEmbeddings(nn.Module):
    """Token types, and the norms of both inputs, before the first layer. [B, N, hidden_size] → the same."""

    def __init__(self, config: EtcTransformerConfig) -> None:
        super().__init__()
        size = config.type_vocab_size
        self.token_types = nn.Embedding(size, config.hidden_size) if size else None
        self.norm, self.global_norm = build_norm(config), build_norm(config)
        self.dropout = nn.Dropout(config.embedding_dropout)

    def forward(self, embedded: Tensor, types: Tensor | None, default: int, norm: nn.Module, name: str) -> Tensor:
        """Return the first states of one input, given the types of its tokens; see `with_types`."""
        return self.dropout(norm(with_types(embedded, types, self.token_types, default, name)))


class EtcLayer(Block):
    """One layer. Shapes: long [B, T, hidden_size] and global [B, G, hidden_size] → the same."""

    def __init__(self, config: EtcTransformerConfig, layer_idx: int) -> None:
        super().__init__(config, EtcAttention(config, layer_idx), config.gated_mlp)
        self.global_attention_norm, is_shared = build_norm(config), config.share_feed_forward
        self.global_mlp = None if is_shared else MLP(config, config.gated_mlp)
        self.global_mlp_norm = None if is_shared else build_norm(config)

    def forward(self, long: Tensor, globals_: Tensor, structure: Structure, **kwargs: Any) -> tuple[Tensor, Tensor]:
        norms = (self.attention_norm, self.global_attention_norm)
        read = [self.before(*each) for each in zip((long, globals_), norms, strict=True)]
        out, _, global_out, _ = self.self_attn(*read, structure, **kwargs)
        long, globals_ = self.after(long, out, norms[0]), self.after(globals_, global_out, norms[1])
        return self.feed(long), self.feed(globals_, self.global_mlp, self.global_mlp_norm)


# Heads of ETC that read global tokens: classes of texts, and long answers to questions.


class EtcTextHead(ClassificationHead):
    """Classifies texts by their global tokens.

    Raises:
        InputError: rows of several packed documents; in a compiled model, positions that may be theirs.
    """

    def read(self, inputs: dict[str, Any]) -> tuple[Any, Tensor]:
        """Return the backbone's outputs for these inputs, by name, and the logits."""
        outputs = self.model(**inputs)
        _refuse_documents(outputs.global_documents, type(self).__name__)
        pooled = pool(
            outputs.global_hidden_state, outputs.global_mask != 0, self.config.classifier_pooling, is_causal=False
        )
        return outputs, self.classifier(self.dropout(pooled))


def _refuse_documents(documents: Tensor | None, head: str) -> None:
    """Raise InputError for rows of several documents; documents: of each global token, [B, G], -1: it is none."""
    if documents is None:
        return
    if is_tracing(documents):
        raise InputError(
            f"position_ids, cu_seq_lens_q or seq_idx of a compiled {head} may hold packed documents, but it gives "
            "one result for a row, from its global tokens. Pass one text in each row, and leave these inputs out."
        )
    most = 1 + int(on_host(documents).max()) if documents.numel() else 0
    if most > 1:
        raise InputError(
            f"A row holds {most} packed documents, but {head} gives one result for a row, from its global tokens. Pass "
            "one text in each row."
        )


@dataclass
class EtcAnswerOutput(QuestionAnsweringHeadOutput):
    """As of every head of questions; `long_answer_logits`: of each global token, [B, G], lowest where there is none."""

    long_answer_logits: Tensor | None = None


class EtcAnswerHead(QuestionAnsweringHead):
    """Start and end of the answer in the text and, with `long_answers`, the global token of the part that holds it.

    Shapes: input_ids [B, T] → start_logits, end_logits [B, T], long_answer_logits [B, G]. Source: Ainslie et al.
    (arXiv:2004.08483), section 5 (Natural Questions, whose paragraphs each have a global token).
    """

    output_class = EtcAnswerOutput

    def build_head(self, config: Any) -> None:
        super().build_head(config)
        self.long_answer_outputs = nn.Linear(config.hidden_size, 1) if config.long_answers else None

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: Tensor | None = None,
        start_positions: torch.LongTensor | None = None,
        end_positions: torch.LongTensor | None = None,
        long_answer_positions: torch.LongTensor | None = None,
        **kwargs: Any,
    ) -> EtcAnswerOutput:
        """Return the logits and, with positions, the loss: the mean of that of the span and that of the long answer.

        long_answer_positions: the number of the right global token, [B]; −100: the example has none.

        Raises:
            InputError: long answers for a model without `long_answers`, or that no global token stands for.
        """
        if long_answer_positions is not None and self.long_answer_outputs is None:
            raise InputError(
                "long_answer_positions is given, but long_answers=False: the head has no logits of long answers. Build "
                "it with long_answers=True."
            )
        # read once, with the masks of the backbone
        prefetch_inputs(attention_mask, position_ids, long_answer_positions, kwargs.get("global_mask"))
        outputs = self.model(input_ids, attention_mask, position_ids, inputs_embeds=inputs_embeds, **kwargs)
        logits = self.qa_outputs(outputs.last_hidden_state)
        start_logits, end_logits = (each.contiguous() for each in logits.unbind(-1))
        losses, long_logits, unused = [], None, 0
        if start_positions is not None and end_positions is not None:
            losses.append(self.loss_function(start_logits, end_logits, start_positions, end_positions, **kwargs))
        if self.long_answer_outputs is not None:
            long_logits = self.long_answer_outputs(outputs.global_hidden_state).squeeze(-1)
            # a loss may be of spans or of long answers alone, and DDP waits for the gradient of every parameter
            unused = 0 * (start_logits[0, 0] + long_logits[0, 0])
            long_logits = long_logits.masked_fill(outputs.global_mask == 0, torch.finfo(long_logits.dtype).min)
        if long_answer_positions is not None and long_logits is not None:
            _check_long_answers(long_answer_positions, outputs.global_mask)
            right = long_answer_positions.to(logits.device)
            total = nn.functional.cross_entropy(long_logits.float(), right, reduction="sum")
            # a batch may have no answer
            losses.append(total / (right != -100).sum().clamp(min=1))
        loss = torch.stack(losses).mean() if losses else None
        if loss is not None and long_logits is not None:
            loss = loss + unused
        fields = {"start_logits": start_logits, "end_logits": end_logits, "long_answer_logits": long_logits}
        return self.output(outputs, loss, **fields)


def _check_long_answers(positions: Tensor, real: Tensor) -> None:
    """Raise InputError for long answers that no global token stands for.

    Args:
        positions: the number of a global token, [B]; -100: none.
        real: 1 = a global token, [B, G].
    """
    if is_tracing(positions):
        return
    if tuple(positions.shape) != (len(real),):
        raise InputError(f"long_answer_positions has shape {list(positions.shape)}; it must be [{len(real)}].")
    numbers, is_token = on_host(positions), on_host(real) != 0
    for row, number in enumerate(numbers.tolist()):
        if number != -100 and not (0 <= number < is_token.shape[1] and is_token[row, number]):
            raise InputError(
                f"long_answer_positions has {number} in row {row}, which has {int(is_token[row].sum())} global tokens; "
                "give the number of one of them that is not padding, or -100 if there is no answer."
            )


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
    closed_pairs, uncached = CLOSED, "ETC"
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

    @backbone_forward
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
            attention_mask, position_ids: see `prepare`; each packed document has global tokens of its own, and nothing
                else depends on positions.
            global_input_ids: [B, G]; `structured_inputs` makes this and the following. None: every chunk of
                `chunk_tokens` real tokens has a global token.
            global_mask: 1 = a global token, [B, G]. A masked one attends to nothing and is attended by none, but
                distances between the others still count it, as in the authors' code. Mask only global tokens at an end.
            long_to_global: the number of the global token to which each long token belongs, [B, T], or several,
                [B, T, K]; −1: none.
            global_contexts: the context of each global token, [B, G], if contexts are in no order.
            global_reads_all: 1 = attends to all long tokens whatever `hard_global_to_long` says, [B, G].
            long_contexts: the number of the context of each long token, [B, T]. Neighbouring tokens of one number form
                a context. They attend to no long token outside of it, and an `attention_pattern` applies within it as
                if it were alone. Global tokens are not affected. None: long tokens attend across contexts.
            cpc_mask: 1 = all long tokens that belong to this global token are masked in `input_ids`, [B, G]. With
                `cpc_loss_weight` its state is trained to be closest, among those of all such global tokens, to the
                state that it has when it attends only to its own unmasked tokens.
            cpc_input_ids: the long tokens before they were masked, [B, T].
        """
        if cpc_mask is not None:
            refuse_recording(self.config, kwargs)
        types = (token_type_ids, global_token_type_ids)
        read = (attention_mask, position_ids, global_mask, global_reads_all, long_to_global, long_contexts, *types)
        given = (input_ids, attention_mask, position_ids, inputs_embeds, kwargs, cache)
        call = self.prepare(*given, read_on_host=read)
        mask = call.masks(self.config).token_mask
        given = (global_mask, long_to_global, global_contexts, global_reads_all, types[1])
        ids, globals_ = find_globals(self.config, call, mask.key_mask, global_input_ids, *given)
        mask = cut_at_contexts(mask, long_contexts, call)
        long, states = self.encode(call, ids, globals_, types, mask, kwargs)
        loss = None
        if cpc_mask is not None:
            loss = contrastive_loss(self, states, ids, globals_, types, cpc_mask, cpc_input_ids, mask.segment_ids)
        long, states = with_gradient_of(long, states), with_gradient_of(states, long)
        return EtcOutput(
            last_hidden_state=long,
            global_hidden_state=states,
            # of integers, as masks of inputs are
            global_mask=globals_.real.long(),
            global_documents=globals_.documents,
            auxiliary_loss=expect_use(loss, long, self.config.cpc_loss_weight),
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
