"""Star-Transformer: tokens on a ring attend to their neighbours, and a relay to all tokens, in linear time.

An update of the tokens h₁ … hₙ ("satellites") and of the relay s, from their embeddings e and the update before:

    hᵢ ← N(relu(attention(hᵢ; hᵢ₋₁, hᵢ, hᵢ₊₁, eᵢ, s)))
    s ← N(relu(attention(s; s, h₁, …, hₙ)))

Tokens attend to the old relay, and the relay to the new tokens. Any two tokens are two steps apart, and 6n + 1 scores
replace n². There is no skip connection; instead, every update attends to the embeddings again. There is no causal form,
because every token attends to the relay, which has attended to all tokens.

Sources: Guo et al. (arXiv:1902.09113); fastNLP, a library of the authors' lab, whose form is `norm_position="pre"` with
`hidden_act="leaky_relu"` and `ring="zero_ends"` (the preset `fastnlp`). We differ in these points:

- Padding changes nothing. In fastNLP the mean for the first relay includes padding, and the last token attends to the
  padding after it. Here a text has the same states however it is padded, and the states of padding are zeros.
- Packed documents, and with `separate_sentences` the two sentences of a row, are separate stars.
- Attention weights may have dropout; fastNLP has none there.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.import_utils import is_tracing
from transformers.utils.output_capturing import OutputRecorder

from hf_efficient_attn.errors import InputError, UnsupportedBackendError
from hf_efficient_attn.models.base import EfficientPreTrainedModel
from hf_efficient_attn.models.heads.outputs import BackboneOutput, with_gradient_of
from hf_efficient_attn.models.heads.task_heads import (
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
from hf_efficient_attn.models.parts.blocks import build_norm, finite
from hf_efficient_attn.models.parts.embeddings import EmbeddingSum
from hf_efficient_attn.models.prologue import backbone_forward

from .attention import RelayAttention, SatelliteAttention
from .configuration_star_transformer import StarTransformerConfig
from .ring import CLOSED, Ring, find_stars, mean_of_documents

# Heads of stars, as in fastNLP: classifiers of texts, which use the relay and the maximum over tokens, and of tokens.


class StarClassificationHead(ClassificationHead):
    """Dropout and a linear map; `classifier_head="dense"` adds a map and an activation between them.

    Source: Guo et al. (arXiv:1902.09113) and fastNLP, which has the first dropout only for pairs of sentences.
    """

    def build_head(self, config: Any) -> None:
        # u, v, |u − v| and u · v of two sentences
        width = config.hidden_size * (4 if self.pools and config.separate_sentences else 1)
        is_dense = config.classifier_head == "dense"
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.classifier = build_classifier(config, self.num_outputs(config), is_dense, width, config.intermediate_size)

    def classify(self, features: Tensor) -> Tensor:
        """Return the logits of features [..., width]."""
        return self.classifier(self.dropout(features))


class StarTextHead(StarClassificationHead):
    """Classifies whole texts, or pairs of sentences, by their relays and tokens."""

    def read(self, inputs: dict[str, Any]) -> tuple[Any, Tensor]:
        """Return the backbone's outputs for these inputs, by name, and the logits."""
        outputs = self.model(**inputs)
        hidden, relays = outputs.last_hidden_state, outputs.relay_states
        real = real_tokens(hidden, inputs["input_ids"], inputs["attention_mask"], self.config.pad_token_id)
        if self.config.separate_sentences:
            types = inputs["token_type_ids"].to(hidden.device)
            first, second = (self.pooled(hidden, relays[:, number], real & (types == number)) for number in (0, 1))
            features = torch.cat((first, second, (first - second).abs(), first * second), -1)
        else:
            if outputs.pooler_output is None:
                self._refuse_documents(relays)
            features = self.pooled(hidden, relays[:, 0], real)
        return outputs, self.classify(features)

    def pooled(self, hidden: Tensor, relay: Tensor, real: Tensor) -> Tensor:
        """Return the vector that represents a text, [B, hidden_size]; the maximum over no tokens is 0."""
        how = self.config.classifier_pooling
        if how == "mean":
            return pool(hidden, real, how, is_causal=False)
        if how == "relay":
            return relay
        highest = hidden.masked_fill(~real.unsqueeze(-1), torch.finfo(hidden.dtype).min).amax(1)
        highest = torch.where(real.any(1, keepdim=True), highest, 0)
        return highest if how == "max" else (relay + highest) / 2

    def _refuse_documents(self, relays: Tensor) -> None:
        """Raise InputError for a row of several packed documents, each with a relay."""
        # while tracing, every token has a relay, because the number of documents is not known
        message = "position_ids, cu_seq_lens_q or seq_idx of a compiled model may mark"
        held = message if is_tracing(relays) else f"A row holds {relays.shape[1]}"
        raise InputError(
            f"{held} packed documents, but {type(self).__name__} gives one result per row. Pass one text in each row, "
            "without these inputs if the model is compiled. For pairs of sentences, build the model with "
            "separate_sentences=True."
        )


class StarTokenHead(StarClassificationHead):
    """Classifies tokens."""

    pools = False

    def compute_logits(self, hidden: Tensor, *_: Any) -> Tensor:
        return self.classify(hidden)


@dataclass
class StarOutput(BackboneOutput):
    """The states of the tokens, and those of the relays.

    Attributes:
        relay_states: the relay of each document of a row, [B, R, hidden_size].
        pooler_output: the relay of a row, [B, hidden_size]; None if rows have several.
        attentions: for each update, the attention weights of tokens for their left neighbour, themselves, their right
            neighbour, their embedding and their relay, [B, H, T, 5].
        relay_attentions: for each update, the attention weights of relays for each token of their document, followed
            by those of each relay for itself, [B, H, T + R]; with `output_relay_attentions=True`.
    """

    relay_states: Tensor | None = None
    pooler_output: Tensor | None = None
    relay_attentions: tuple[Tensor, ...] | None = None


class StarLayer(GradientCheckpointingLayer):
    """One update of all tokens, and then of the relays. [B, T, hidden_size] and [B, R, hidden_size] → the same."""

    def __init__(self, config: StarTransformerConfig, layer_idx: int) -> None:
        super().__init__()
        self.is_pre_norm = config.norm_position == "pre"
        self.self_attn, self.relay_attn = SatelliteAttention(config, layer_idx), RelayAttention(config, layer_idx)
        self.attention_norm = build_norm(config)
        self.relay_norm = nn.Identity() if self.is_pre_norm else build_norm(config)
        self.act_fn = ACT2FN[config.hidden_act]
        self.dropout, self.activation_dropout = nn.Dropout(config.hidden_dropout), nn.Dropout(config.activation_dropout)

    def forward(
        self, nodes: Tensor, relays: Tensor, embedded: Tensor, ring: Ring, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        read = self.attention_norm(nodes) if self.is_pre_norm else nodes
        nodes = self.activated(self.self_attn(read, embedded, relays, ring, **kwargs)[0])
        nodes = finite(nodes if self.is_pre_norm else self.attention_norm(nodes))
        read = self.relay_attn(relays, nodes, ring)[0]
        return nodes, finite(self.relay_norm(self.activated(read)))

    def activated(self, attended: Tensor) -> Tensor:
        """Return the output of attention after dropout and activation, before the norm."""
        return self.activation_dropout(self.act_fn(self.dropout(attended)))


class FirstRelay(nn.Module):
    """The relays before the first update: the mean embedding of a document, or a learned vector."""

    def __init__(self, config: StarTransformerConfig) -> None:
        super().__init__()
        self.std, is_learned = config.initializer_range, config.relay_init == "learned"
        self.vector = nn.Parameter(torch.empty(config.hidden_size)) if is_learned else None

    def initialize(self) -> None:
        """Initialise the vector like the embedding of a token."""
        if self.vector is not None:
            init.normal_(self.vector, std=self.std)

    def forward(self, embedded: Tensor, ring: Ring) -> Tensor:
        """Return the relays [B, R, hidden_size] of embeddings [B, T, hidden_size]."""
        if self.vector is None:
            return mean_of_documents(embedded, ring)
        # `repeat` copies: torch multiplies an expanded vector by frozen and by trainable weights in kernels that round
        # differently, so that a loaded adapter would not give the same outputs as in training
        return self.vector.to(embedded.dtype).repeat(embedded.shape[0], ring.num_relays, 1)


class StarTransformerPreTrainedModel(EfficientPreTrainedModel):
    """Weight initialisation, loading checks and capabilities shared by the backbone and its heads."""

    config_class = StarTransformerConfig
    config: StarTransformerConfig
    base_model_prefix = "model"
    model_tags = ["efficient-attention", "star-transformer", "hf_efficient_attn"]
    extra_inputs = ("token_type_ids",)
    closed_pairs, uncached = CLOSED, "A star"
    _no_split_modules = ["StarLayer"]
    _can_record_outputs = {
        "hidden_states": StarLayer,
        "attentions": SatelliteAttention,
        "relay_attentions": OutputRecorder(RelayAttention, index=1),
    }

    @classmethod
    def maybe_distribute_model(cls, model: Any, distributed_config: Any, *args: Any, **kwargs: Any) -> Any:
        """Distribute the model as every family does, but refuse tensor parallelism that would split a head."""
        processes, heads = getattr(distributed_config, "tp_size", None) or 1, model.config.num_attention_heads
        if heads % processes:
            raise UnsupportedBackendError(
                f"tp_size={processes} does not divide the {heads} heads of {cls.__name__}, so processes would share a "
                "head's projections. Use a tp_size that divides the number of heads, or use fsdp_size."
            )
        return super().maybe_distribute_model(model, distributed_config, *args, **kwargs)


class StarTransformerModel(StarTransformerPreTrainedModel):
    """The backbone: embeddings and updates. Shapes: input_ids [B, T] → [B, T, hidden_size], and relays."""

    def __init__(self, config: StarTransformerConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.embedding_width, config.pad_token_id)
        is_mapped = config.embedding_size is not None
        self.embedding_map = nn.Linear(config.embedding_width, config.hidden_size) if is_mapped else nn.Identity()
        self.embeddings = EmbeddingSum(config, num_types=config.type_vocab_size)
        self.first_relay = FirstRelay(config)
        layers = range(1 if config.share_layers else config.num_hidden_layers)
        self.layers = nn.ModuleList(StarLayer(config, index) for index in layers)
        # post-norm layers end with a norm, and pre-norm stars have no final norm
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
        token_type_ids: torch.LongTensor | None = None,
        **kwargs: Any,
    ) -> StarOutput:
        """Return the states of the tokens, which are zeros for padding, and those of the relays.

        Args:
            attention_mask, position_ids: see `prepare`; each packed document has a relay.
            inputs_embeds: [B, T, embedding_size or hidden_size].
            token_type_ids: [B, T]; with `separate_sentences` the number of the sentence, 0 or 1.
        """
        given = (input_ids, attention_mask, position_ids, inputs_embeds, kwargs, cache)
        read = (attention_mask, position_ids, token_type_ids)
        call = self.prepare(*given, token_type_ids=token_type_ids, read_on_host=read)
        call = replace(call, embedded=self.embedding_map(call.embedded))
        sentences = token_type_ids if self.config.separate_sentences else None
        ring = find_stars(self.config, call, sentences)
        # sentence numbers have embeddings only if the config has token types
        has_types = self.config.type_vocab_size or sentences is None
        embedded, _ = self.embeddings(call, token_type_ids if has_types else None)
        nodes, relays = self.update(embedded, ring, kwargs)
        pooled = relays[:, 0] if ring.num_relays == 1 else None
        return StarOutput(last_hidden_state=self.norm(nodes), relay_states=relays, pooler_output=pooled)

    def update(self, embedded: Tensor, ring: Ring, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Return tokens and relays after all updates."""
        nodes, relays = embedded, self.first_relay(embedded, ring)
        for number in range(self.config.num_hidden_layers):
            nodes, relays = self.layers[number % len(self.layers)](nodes, relays, embedded, ring, **options)
        if ring.real is not None:
            nodes = torch.where(ring.real.unsqueeze(-1), nodes, 0)
        # token heads do not use the last relay
        return with_gradient_of(nodes, relays), relays


class StarTransformerForMaskedLM(MaskedLMHead, StarTransformerPreTrainedModel):
    backbone_class = StarTransformerModel


class StarTransformerForSequenceClassification(
    SequenceClassificationHead, StarTextHead, StarTransformerPreTrainedModel
):
    backbone_class = StarTransformerModel


class StarTransformerForTokenClassification(StarTokenHead, TokenClassificationHead, StarTransformerPreTrainedModel):
    backbone_class = StarTransformerModel


class StarTransformerForQuestionAnswering(QuestionAnsweringHead, StarTransformerPreTrainedModel):
    backbone_class = StarTransformerModel


class StarTransformerForMultipleChoice(MultipleChoiceHead, StarTextHead, StarTransformerPreTrainedModel):
    backbone_class = StarTransformerModel


__all__ = [
    "StarTransformerForMaskedLM",
    "StarTransformerForMultipleChoice",
    "StarTransformerForQuestionAnswering",
    "StarTransformerForSequenceClassification",
    "StarTransformerForTokenClassification",
    "StarTransformerModel",
    "StarTransformerPreTrainedModel",
]
