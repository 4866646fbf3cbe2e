"""BP-Transformer: attention over a binary tree of spans. A token reads near tokens one by one, and far ones as spans.

A span has the tokens i · 2^j to (i + 1) · 2^j - 1, as far as the text goes. It reads them; a token reads itself and, on
each side and size by size, the k nodes next to those read before, so that every token is read once, in about
k · log2(n / k) nodes. Tokens and spans are updated together, by the same parameters:

    h ← N(h + attention(h; what it reads)),  h ← N(h + W2 relu(W1 h))

Tokens start as their embeddings and spans as zeros, so that in the first layer a span is the mean of its tokens. A
score of a token and a node also has the product of its query with a vector of their relation: level, side, place.

In a causal model tokens read to their left alone, and there only spans that end before them. A span is so the same
whatever follows, and a cache keeps it once its last token is there: decoding reads about k · log2(n) nodes a token.

Sources: Ye, Guo, Gan, Qiu, Zhang (arXiv:1911.04070); the authors' code. We differ in these points:

- The tree of a text is that of its own tokens, however it is padded or packed.
- The released code gives some tokens wrong nodes at the end of a text whose length is no power of two; here every
  token is read once (`builder="fixed"` of `SpanTree`).
- Spans at the end of a text that have the same tokens are one node. Without dropout of weights their states are equal.
- The released code classifies texts with a causal tree; here a config says so with `is_causal=True`.
- How their network for pairs of sentences (SNLI) reads across is not said; here tokens of a sentence read those of the
  other as a decoder reads its source (`cross_layers`).
"""

from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from hf_efficient_attn.attention.cache_argument import takes_cache
from hf_efficient_attn.attention.processes import compare_processes
from hf_efficient_attn.errors import InputError
from hf_efficient_attn.layout.transfer import on_host
from hf_efficient_attn.models.base import EfficientPreTrainedModel
from hf_efficient_attn.models.heads.auxiliary_loss import LAYERS_LEFT_OUT, expect_use
from hf_efficient_attn.models.heads.outputs import BackboneOutput
from hf_efficient_attn.models.heads.task_heads import (
    MaskedLMHead,
    MultipleChoiceHead,
    QuestionAnsweringHead,
    SequenceClassificationHead,
    TokenClassificationHead,
)
from hf_efficient_attn.models.implementations import backend_of
from hf_efficient_attn.models.inputs.masks import bring_inputs, padding_mask
from hf_efficient_attn.models.inputs.sentences import check_sentences, sentence_positions
from hf_efficient_attn.models.parts.blocks import build_norm
from hf_efficient_attn.models.parts.positions import Positions
from hf_efficient_attn.models.prologue import TableGeneration, prepare_call
from hf_efficient_attn.models.sparse.inputs import check_inputs
from hf_efficient_attn.models.tree.attention import TreeAttention
from hf_efficient_attn.models.tree.block import BPCrossLayer, BPLayer
from hf_efficient_attn.models.tree.call_nodes import CLOSED, nodes_of

from .configuration_bp_transformer import BPTransformerConfig
from .heads import BPCausalHead, BPTextHead, num_predicting
from .pairs import check_pieces, roots_of_rows, sentences_of


@dataclass
class BPOutput(BackboneOutput):
    """The states of the tokens, and those of spans.

    Attributes:
        span_states: of the span whose left half ends with each token, [B, T, hidden_size]; behind cached tokens those
            of the spans that end with new ones.
        root_states: the root of each row, [B, 1, hidden_size], or of its two sentences, [B, 2, hidden_size]; None: rows
            have several documents, or cached tokens.
        pooler_output: the only root of each row, [B, hidden_size]; None: there is none, or are several.
        layer_states: with `layer_losses`, in training, the tokens of the layers that predict, the last layer last.
        attentions: of each layer, how much tokens read each token so far and the span behind it, [B, H, T, 2K].
    """

    span_states: Tensor | None = None
    root_states: Tensor | None = None
    layer_states: tuple[Tensor, ...] | None = None
    pooler_output: Tensor | None = None


class BPTransformerPreTrainedModel(EfficientPreTrainedModel):
    """Weight initialisation, loading checks and capabilities shared by the backbone and its heads."""

    config_class = BPTransformerConfig
    config: BPTransformerConfig
    base_model_prefix = "model"
    model_tags = ["efficient-attention", "bp-transformer", "hf_efficient_attn"]
    extra_inputs = ("token_type_ids",)
    _no_split_modules = ["BPLayer"]
    _can_record_outputs = {"hidden_states": BPLayer, "attentions": TreeAttention}


class BPTransformerModel(BPTransformerPreTrainedModel):
    """The backbone: embeddings and layers over tokens and spans. Shapes: input_ids [B, T] → [B, T, hidden_size]."""

    def __init__(self, config: BPTransformerConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.positions = Positions(config)
        self.dropout = nn.Dropout(config.embedding_dropout)
        self.embedding_norm = build_norm(config)
        self.layers = nn.ModuleList(BPLayer(config, index) for index in range(config.num_hidden_layers))
        across = range(config.num_hidden_layers, config.num_hidden_layers + (config.cross_layers or 0))
        self.cross_layers = nn.ModuleList(BPCrossLayer(config, index) for index in across)
        if config.cross_layers is not None:
            self._no_split_modules = ["BPLayer", "BPCrossLayer"]
        # the share of the training that is over; a callback sets it
        self.progress = 0.0
        # a post-norm layer ends with one
        self.norm = nn.Identity()
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
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        token_type_ids: torch.LongTensor | None = None,
        **kwargs: Any,
    ) -> BPOutput:
        """Return the last states of tokens, spans and root, and the cache with `use_cache`.

        Args:
            attention_mask: 1 = real token, [B, K] over cached and new tokens, padded on either side; or [B, 1, T, K]
                with True or 0.0 = allowed, if it only leaves out padding and, in a causal model, later tokens.
            position_ids: [B, T]; by default counted over the real tokens. Where they restart (with nothing cached
                yet), a packed document begins; documents do not read each other, and each has a tree.
            token_type_ids: [B, T], with `separate_sentences` the number of the sentence, 0 or 1; else zeros.

        Raises:
            InputError: inputs that contradict each other, or a mask with other pairs.
            UnsupportedBackendError: a cache that cannot hold spans, or an attention implementation that is not ours.
        """
        check_inputs(self.config, input_ids, inputs_embeds)
        backend_of(self.config)
        bring_inputs(attention_mask, position_ids, token_type_ids)
        compare_processes(self)
        embedded = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        attention_mask = padding_mask(attention_mask, embedded.shape[0], CLOSED, self.config.is_causal)
        position_ids = self.pair_positions(token_type_ids, attention_mask, position_ids, embedded, kwargs)
        call = prepare_call(self.config, embedded, attention_mask, position_ids, cache, kwargs, use_cache)
        nodes = nodes_of(self.config, call, self.config.is_causal)
        tokens = self.embedding_norm(self.dropout(self.positions(call.embedded, call)[0]))
        spans, of_layers = nodes.first_spans(tokens), []
        for layer in islice(self.layers, self.config.num_hidden_layers):
            tokens, spans = layer(tokens, spans, nodes, cache=call.cache, **kwargs)
            of_layers.append(tokens)
        sentences = sentences_of(token_type_ids, nodes) if self.config.separate_sentences else None
        for layer in self.cross_layers:
            tokens, spans = layer(tokens, spans, nodes, tokens, sentences.other, **kwargs)
        tokens, spans = self.norm(tokens), self.norm(spans)
        roots = roots_of_rows(tokens, spans, nodes, sentences)
        root = None if roots is None or sentences is not None else roots[:, 0]
        predicting = self.predicting(of_layers)
        return BPOutput(
            tokens, call.cache, span_states=spans, root_states=roots, pooler_output=root, layer_states=predicting
        )

    def predicting(self, of_layers: list[Tensor]) -> tuple[Tensor, ...] | None:
        """Return the states of the layers that predict now, or None if that is the last one alone."""
        if not (self.config.layer_losses and self.training):
            return None
        number = num_predicting(len(of_layers), self.progress)
        if number == 1:
            return None
        first, *others = of_layers[-number:]
        # a view, which no later layer reads
        first = expect_use(first.view_as(first), of_layers[-1], left_out=LAYERS_LEFT_OUT)
        return first, *others

    def pair_positions(
        self, types: Tensor | None, mask: Any, position_ids: Tensor | None, embedded: Tensor, options: dict[str, Any]
    ) -> Tensor | None:
        """Return the positions of a call: those given, or, of pairs, in each sentence.

        Raises:
            InputError: types that no model without pairs has, or that no pair has.
        """
        if self.config.separate_sentences:
            check_sentences(types, position_ids, embedded, options)
            check_pieces(types, mask)
            return sentence_positions(types, mask)
        if types is not None and not torch.compiler.is_compiling() and bool(on_host(types).any()):
            raise InputError(
                "token_type_ids has types other than 0, but this model reads no pairs. Leave them out, or build it "
                "with separate_sentences=True."
            )
        return position_ids


class BPTransformerForCausalLM(TableGeneration, BPCausalHead, BPTransformerPreTrainedModel, GenerationMixin):
    backbone_class = BPTransformerModel


class BPTransformerForMaskedLM(MaskedLMHead, BPTransformerPreTrainedModel):
    backbone_class = BPTransformerModel


class BPTransformerForSequenceClassification(SequenceClassificationHead, BPTextHead, BPTransformerPreTrainedModel):
    backbone_class = BPTransformerModel


class BPTransformerForTokenClassification(TokenClassificationHead, BPTransformerPreTrainedModel):
    backbone_class = BPTransformerModel


class BPTransformerForQuestionAnswering(QuestionAnsweringHead, BPTransformerPreTrainedModel):
    backbone_class = BPTransformerModel


class BPTransformerForMultipleChoice(MultipleChoiceHead, BPTextHead, BPTransformerPreTrainedModel):
    backbone_class = BPTransformerModel


__all__ = [
    "BPTransformerForCausalLM",
    "BPTransformerForMaskedLM",
    "BPTransformerForMultipleChoice",
    "BPTransformerForQuestionAnswering",
    "BPTransformerForSequenceClassification",
    "BPTransformerForTokenClassification",
    "BPTransformerModel",
    "BPTransformerPreTrainedModel",
]
