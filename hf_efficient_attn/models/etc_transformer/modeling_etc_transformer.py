"""ETC: long tokens attend to a band and to all global tokens, and global tokens attend to all tokens.

Every global token stands for a part of the text, such as a sentence. A label marks the pairs of a long token and the
global tokens of its own part:

    long  ← attention over { band of long tokens } ∪ { all global tokens }
    global ← attention over { all global tokens } ∪ { all long tokens }

Each of the two has one softmax, so there are n · (2r + 1) + 2 · n · g + g² scores instead of n². A call may give the
global tokens, links and masks (`structured_inputs` makes them from text). Otherwise every chunk of `chunk_tokens`
tokens has a global token.

Sources: Ainslie et al. (arXiv:2004.08483) and the authors' code; Zaheer et al. (arXiv:2007.14062). We differ in these
points:

- Padding changes nothing. The authors let padding attend to padding.
- Long tokens may attend to each other by any pattern, so BigBird-ETC is a preset. Random blocks are drawn for the
  length of each text.
- The authors did not publish the score of contrastive predictive coding. Here it is the product of two global states
  divided by the root of their width.

As in the authors' models, there are no absolute positions.
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

# The embeddings and the layer.


class EtcEmbeddings(nn.Module):
    """Token types, norms and dropout of both inputs before the first layer. [B, N, hidden_size] → the same."""

    def __init__(self, config: EtcTransformerConfig) -> None:
        super().__init__()
        size = config.type_vocab_size
        self.token_types = nn.Embedding(size, config.hidden_size) if size else None
        self.norm, self.global_norm = build_norm(config), build_norm(config)
        self.dropout = nn.Dropout(config.embedding_dropout)

    def forward(self, embedded: Tensor, types: Tensor | None, default: int, norm: nn.Module, name: str) -> Tensor:
        """Return the embeddings of one input, given the types of its tokens; see `with_types`."""
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


# Heads of ETC that use the global states: text classification, and long answers in question answering.


class EtcTextHead(ClassificationHead):
    """Classifies texts by their global tokens.

    Raises:
        InputError: rows with several packed documents; in a compiled model, positions that may mark such rows.
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
    """Raise InputError for rows with several documents.

    documents: the document of each global token, [B, G]; -1: padding.
    """
    if documents is None:
        return
    if is_tracing(documents):
        raise InputError(
            f"position_ids, cu_seq_lens_q or seq_idx of a compiled {head} may mark packed documents, but it gives one "
            "result per row, from the row's global tokens. Pass one text in each row, and leave these inputs out."
        )
    most = 1 + int(on_host(documents).max()) if documents.numel() else 0
    if most > 1:
        raise InputError(
            f"A row holds {most} packed documents, but {head} gives one result per row, from the row's global tokens. "
            "Pass one text in each row."
        )


@dataclass
class EtcAnswerOutput(QuestionAnsweringHeadOutput):
    """Output with `long_answer_logits` of the global tokens, [B, G]; padding has the lowest value of the dtype."""

    long_answer_logits: Tensor | None = None


class EtcAnswerHead(QuestionAnsweringHead):
    """Predicts start and end of the answer and, with `long_answers`, the global token of the part that contains it.

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
        """Return the logits and, with positions, the loss: the mean of the span's loss and that of the long answer.

        long_answer_positions: the index of the correct global token, [B]; −100: the example has no long answer.

        Raises:
            InputError: long answers for a model without `long_answers`, or an index without a global token.
        """
        if long_answer_positions is not None and self.long_answer_outputs is None:
            raise InputError(
                "long_answer_positions is given, but long_answers=False: the head has no logits for long answers. "
                "Build it with long_answers=True."
            )
        # copied to the host once, together with the masks of the backbone
        prefetch_inputs(attention_mask, position_ids, long_answer_positions, kwargs.get("global_mask"))
        outputs = self.model(input_ids, attention_mask, position_ids, inputs_embeds=inputs_embeds, **kwargs)
        logits = self.qa_outputs(outputs.last_hidden_state)
        start_logits, end_logits = (each.contiguous() for each in logits.unbind(-1))
        losses, long_logits, unused = [], None, 0
        if start_positions is not None and end_positions is not None:
            losses.append(self.loss_function(start_logits, end_logits, start_positions, end_positions, **kwargs))
        if self.long_answer_outputs is not None:
            long_logits = self.long_answer_outputs(outputs.global_hidden_state).squeeze(-1)
            # the loss may use only one of the two outputs, but DDP waits for the gradient of every parameter
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
    """Raise InputError for long answers that are not the index of a global token.

    Args:
        positions: the index of a global token, [B]; -100: no long answer.
        real: 1 = a global token, 0 = padding, [B, G].
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
                "give the index of one that is not padding, or -100 if there is no answer."
            )


@dataclass
class EtcOutput(BackboneOutput):
    """The states of the long and the global tokens.

    Attributes:
        global_hidden_state: [B, G, hidden_size].
        global_mask: 1 = a global token, 0 = padding, [B, G].
        global_documents: the packed document of each global token, [B, G], −1: padding; None: no packed documents.
        attentions: the weights of the long tokens over global and then long tokens, [B, H, T, G + T] per layer.
        global_hidden_states: the global states of each layer, [B, G, hidden_size]; with
            `output_global_hidden_states=True`.
        global_attentions: the weights of the global tokens over global and then long tokens, [B, H, G, G + T] per
            layer; with `output_global_attentions=True`.
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
    """The backbone: embeddings, layers, final norm. input_ids [B, T] → [B, T, hidden_size] and global states."""

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
        global_attends_to_all: Tensor | None = None,
        long_contexts: Tensor | None = None,
        cpc_mask: Tensor | None = None,
        cpc_input_ids: torch.LongTensor | None = None,
        **kwargs: Any,
    ) -> EtcOutput:
        """Return the states of the long and the global tokens.

        Args:
            attention_mask, position_ids: see `prepare`; each packed document has its own global tokens, and nothing
                else depends on positions.
            global_input_ids: [B, G]; `structured_inputs` makes this and the following inputs. None: every chunk of
                `chunk_tokens` real tokens has a global token.
            global_mask: 1 = a global token, 0 = padding, [B, G]. No token attends to a masked global token, and it
                attends to none, but distances between the others still count it, as in the authors' code. Mask only
                global tokens at an end.
            long_to_global: the index of the global token that each long token belongs to, [B, T], or several indices,
                [B, T, K]; −1: none.
            global_contexts: the context of each global token, [B, G], if contexts have no order.
            global_attends_to_all: 1 = attends to all long tokens whatever `hard_global_to_long` says, [B, G].
            long_contexts: the context number of each long token, [B, T]. Neighbouring tokens with the same number form
                a context. They attend to no long token outside of it, and an `attention_pattern` applies within it as
                if it were a separate text. Global tokens are not affected. None: long tokens attend across contexts.
            cpc_mask: 1 = all long tokens that belong to this global token are masked in `input_ids`, [B, G]. With
                `cpc_loss_weight`, the state of this global token is trained to be closer to its own state over its
                unmasked tokens alone than to such states of the other selected global tokens.
            cpc_input_ids: the long tokens before they were masked, [B, T].
        """
        if cpc_mask is not None:
            refuse_recording(self.config, kwargs)
        types = (token_type_ids, global_token_type_ids)
        read = (attention_mask, position_ids, global_mask, global_attends_to_all, long_to_global, long_contexts, *types)
        given = (input_ids, attention_mask, position_ids, inputs_embeds, kwargs, cache)
        call = self.prepare(*given, read_on_host=read)
        mask = call.masks(self.config).token_mask
        given = (global_mask, long_to_global, global_contexts, global_attends_to_all, types[1])
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
            # integers, like input masks
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
        """Return the states of the long and the global tokens after all layers."""
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
