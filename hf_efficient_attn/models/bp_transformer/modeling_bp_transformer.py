"""BP-Transformer: a token attends to near tokens one by one, and to far ones as spans of a binary tree.

A span covers the tokens i · 2^j to (i + 1) · 2^j - 1, up to the end of the text, and attends to them. A token attends
to itself and then, on each side and size by size, to the k nodes that come next, so that it covers every token exactly
once, with about k · log2(n / k) nodes. Tokens and spans are updated together, with the same parameters:

    h ← N(h + attention(h; its nodes)),  h ← N(h + W2 relu(W1 h))

Tokens start as their embeddings and spans as zeros, so in the first layer, the attention output of a span is the mean
over its tokens. The product of the query with a learned vector is added to the score of a token and a node. The vector
depends on the relation of the two: level, side and place.

In a causal model, tokens attend only to their left, and only to spans that end before them. Later tokens do not change
a span, so a cache keeps it once its last token is there. In decoding, a token attends to about k · log2(n) nodes.

Sources: Ye, Guo, Gan, Qiu, Zhang (arXiv:1911.04070); the authors' code. We differ in these points:

- The tree of a text depends on its own tokens only, not on how the text is padded or packed.
- The released code gives some tokens wrong nodes at the end of a text whose length is not a power of two. Here a token
  covers every token exactly once (`builder="fixed"` of `SpanTree`).
- Spans at the end of a text that cover the same tokens are one node. Without attention dropout, their states would be
  equal.
- The released code classifies texts with a causal tree; here this takes `is_causal=True` in the config.
- The sources do not say how the network for sentence pairs (SNLI) attends to the other sentence. Here the tokens of one
  sentence attend to those of the other as a decoder attends to its source (`cross_layers`).
"""

from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.utils.import_utils import is_tracing

from hf_efficient_attn.errors import InputError
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.layout.transfer import on_host
from hf_efficient_attn.models.base import EfficientPreTrainedModel
from hf_efficient_attn.models.heads.outputs import LAYERS_LEFT_OUT, BackboneOutput, expect_use
from hf_efficient_attn.models.heads.task_heads import (
    CausalLMHead,
    ClassificationHead,
    MaskedLMHead,
    MultipleChoiceHead,
    QuestionAnsweringHead,
    SequenceClassificationHead,
    TokenClassificationHead,
    build_classifier,
    pool,
    real_tokens,
)
from hf_efficient_attn.models.parts.blocks import build_norm
from hf_efficient_attn.models.parts.embeddings import Positions
from hf_efficient_attn.models.prologue import TableGeneration, backbone_forward
from hf_efficient_attn.models.tree.attention import BPCrossLayer, BPLayer, TreeAttention
from hf_efficient_attn.models.tree.nodes import CLOSED, NextNodes, WholeTree, nodes_of, roots_of

from .configuration_bp_transformer import BPTransformerConfig

# Heads of BP-Transformers: classification of texts and sentence pairs by their roots, and losses of earlier layers.


class BPTextHead(ClassificationHead):
    """Classifies texts by their root, the span of all tokens, or by `classifier_pooling`; pairs by both sentences.

    Source: Ye et al. (arXiv:1911.04070); the authors' code.
    """

    def build_head(self, config: Any) -> None:
        width = config.hidden_size * (2 if config.separate_sentences else 1)
        is_dense = config.classifier_head == "dense"
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.classifier = build_classifier(config, self.num_outputs(config), is_dense, width)

    def read(self, inputs: dict[str, Any]) -> tuple[Any, Tensor]:
        """Return the backbone's outputs for these inputs, by name, and the logits."""
        outputs = self.model(**inputs)
        features = torch.cat(self.pooled(outputs, inputs), -1)
        return outputs, self.classifier(self.dropout(features))

    def pooled(self, outputs: Any, inputs: dict[str, Any]) -> list[Tensor]:
        """Return the pooled states of each text, or of its two sentences, [B, hidden_size] each."""
        config, hidden = self.config, outputs.last_hidden_state
        if config.classifier_pooling == "root":
            if outputs.root_states is None:
                raise InputError(
                    f"A row holds packed documents or continues cached tokens, but {type(self).__name__} gives one "
                    "result per row, from the root of its tree. Pass one whole text in each row."
                )
            return list(outputs.root_states.unbind(1))
        real = real_tokens(hidden, inputs["input_ids"], inputs["attention_mask"], config.pad_token_id)
        parts = [real]
        if config.separate_sentences:
            types = inputs["token_type_ids"].to(hidden.device)
            parts = [real & (types == number) for number in (0, 1)]
        return [pool(hidden, part, config.classifier_pooling, config.is_causal) for part in parts]


class BPCausalHead(CausalLMHead):
    """Predicts the next token; in training with `layer_losses`, the loss is the mean over several layers.

    Source: the authors' code.
    """

    def output(
        self, outputs: Any, loss: Tensor | None, labels: Tensor | None = None, num_items: Any = None, **fields: Any
    ) -> Any:
        """Return the outputs; `auxiliary_loss` is the mean loss of the layers minus the loss of the last one."""
        if loss is not None and outputs.layer_states:
            losses = [self.loss_of(states, labels) for states in outputs.layer_states]
            outputs.auxiliary_loss = torch.stack(losses).mean() - losses[-1]
        return super().output(outputs, loss, labels, num_items, **fields)

    def loss_of(self, states: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss of a layer's states [B, T, hidden_size] for labels [B, T or T - 1]; -100 is ignored."""
        logits = self.logits_of(states[:, : labels.shape[1]]).flatten(0, 1)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        labels = labels.to(logits.device).flatten()
        # a micro-batch may have no label that counts
        return cross_entropy(wide, labels, reduction="sum") / (labels != -100).sum().clamp(min=1)


def num_predicting(num_layers: int, progress: float) -> int:
    """Return how many of the last layers predict at this fraction of the training, at least one.

    Layer i of n, counted from 1, predicts until the fraction is i / n.

    >>> [num_predicting(12, share) for share in (0.0, 0.08, 0.09, 0.5, 0.99, 1.0)]
    [12, 12, 11, 6, 1, 1]
    """
    return max(1, num_layers - int(num_layers * progress))


# The roots of a row's trees, and the two sentences of a pair.


@dataclass(frozen=True)
class Sentences:
    """The two sentences of each row.

    Attributes:
        own: the real tokens of each sentence, bool [B, 2, T].
        other: token mask of the cross-attention: a token attends to the tokens of the other sentence.
    """

    own: Tensor
    other: TokenMask


def sentences_of(types: Tensor, nodes: Any) -> Sentences:
    """Return the sentences of each row, given the types of its tokens, 0 or 1, [B, T]."""
    mask = nodes.mask.key_mask
    real = torch.ones_like(types, dtype=torch.bool) if mask is None else mask[:, ::2]
    own = torch.stack((real & (types == 0), real & (types == 1)), 1)
    of_keys = None if mask is None else real
    return Sentences(own, TokenMask(of_keys, segment_ids=types, query_segment_ids=1 - types))


def check_pieces(types: Tensor, mask: Any) -> None:
    """Raise InputError if the real tokens of a sentence are not contiguous, because each sentence has one tree."""
    if torch.compiler.is_compiling() or is_tracing(types):
        return
    numbers = on_host(types)
    if isinstance(mask, Tensor) and mask.ndim == 2:
        # padding takes the type of the token before it
        real = on_host(mask) != 0
        index = torch.where(real, torch.arange(numbers.shape[1]), -1).cummax(1).values
        first = real.int().argmax(1, keepdim=True)
        numbers = numbers.gather(1, torch.where(index < 0, first, index))
    changes = (numbers[:, 1:] != numbers[:, :-1]).sum(1)
    if bool((changes > 1).any()):
        row = int((changes > 1).nonzero()[0])
        raise InputError(
            f"token_type_ids of row {row} change {int(changes[row])} times, but each of the two sentences must be "
            "contiguous. Pass 0 for all tokens of the first and 1 for all tokens of the second."
        )


def roots_of_rows(
    tokens: Tensor, spans: Tensor, nodes: WholeTree | NextNodes, sentences: Sentences | None
) -> Tensor | None:
    """Return the states of the roots, [B, 1, hidden_size], or [B, 2, hidden_size] for pairs; None: unknown."""
    if sentences is not None:
        found = [take_roots(tokens, spans, roots_of(own)) for own in sentences.own.unbind(1)]
        # an empty sentence has no root
        exists = sentences.own.any(2).unsqueeze(-1)
        return torch.where(exists, torch.stack(found, 1), 0)
    roots = nodes.roots if isinstance(nodes, WholeTree) else None
    return None if roots is None else take_roots(tokens, spans, roots)[:, None]


def take_roots(tokens: Tensor, spans: Tensor, roots: Tensor) -> Tensor:
    """Return the states of the roots, [B, T, hidden_size] twice and [B] → [B, hidden_size]."""
    index = (roots >> 1)[:, None, None].expand(-1, 1, tokens.shape[2])
    is_span = (roots % 2 == 1)[:, None]
    return torch.where(is_span, spans.gather(1, index)[:, 0], tokens.gather(1, index)[:, 0])


@dataclass
class BPOutput(BackboneOutput):
    """The states of tokens and spans.

    Attributes:
        span_states: for each token, the state of the span whose left half ends with it, [B, T, hidden_size]; with
            cached tokens, the states of the spans that end with a new token.
        root_states: the root of each row, [B, 1, hidden_size], or the roots of its two sentences, [B, 2, hidden_size];
            None: rows have several documents, or cached tokens.
        pooler_output: the root of each row, [B, hidden_size]; None: a row has no root, or two.
        layer_states: in training with `layer_losses`, the tokens' states of the layers that predict, in order.
        attentions: the tokens' weights of each layer, [B, H, T, 2K]: column 2i is token i, column 2i + 1 the span whose
            left half ends with it.
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
    closed_pairs = CLOSED
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
        # the fraction of the training that is over; `LayerLossCallback` sets it
        self.progress = 0.0
        # post-norm layers end with a norm
        self.norm = nn.Identity()
        self.gradient_checkpointing = False
        self.post_init()

    @backbone_forward
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
            attention_mask, position_ids: see `prepare`; each packed document has its own tree.
            token_type_ids: [B, T]; with `separate_sentences` the number of the sentence, 0 or 1, otherwise zeros.
        """
        given = (input_ids, attention_mask, position_ids, inputs_embeds, kwargs, cache, use_cache, token_type_ids)
        call = self.prepare(*given, read_on_host=(attention_mask, position_ids, token_type_ids))
        self.check_types(token_type_ids, call.attention_mask)
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
        """Return the states of the layers that predict at this point of the training; None: only the last one."""
        if not (self.config.layer_losses and self.training):
            return None
        number = num_predicting(len(of_layers), self.progress)
        if number == 1:
            return None
        first, *others = of_layers[-number:]
        # a view that later layers do not use, so that only this loss reaches it in the backward pass
        first = expect_use(first.view_as(first), of_layers[-1], left_out=LAYERS_LEFT_OUT)
        return first, *others

    def check_types(self, types: Tensor | None, mask: Any) -> None:
        """Raise InputError for token types that do not form a pair, or for a pair if the model does not take pairs."""
        if self.config.separate_sentences:
            check_pieces(types, mask)
        elif types is not None and not torch.compiler.is_compiling() and bool(on_host(types).any()):
            raise InputError(
                "token_type_ids has types other than 0, but this model takes no pairs of sentences. Leave "
                "token_type_ids out, or build the model with separate_sentences=True."
            )


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
