"""Reformer: attention within hash buckets, reversible layers, MLP and loss in slices, axial positions.

Queries and keys share one projection, and a token attends to the tokens whose queries point in a similar direction:
random rotations assign each token to a bucket, tokens are sorted by bucket and split into chunks of c tokens, and a
chunk attends to itself and the chunk before. Several rounds with other rotations make misses rare. Layers of this kind
stand among local layers, whose tokens attend to chunks of neighbouring tokens.

Sources: Kitaev et al. (arXiv:2001.04451) and, where it is silent or its code disagrees, the code (google/trax): tokens
of different buckets in a chunk attend to each other, and a key found in several rounds counts several times. The form
of the paper can be chosen in the config. We differ in these points:

- Every document is hashed, sorted and split as if it were alone: padding, packing and other rows change nothing.
- Rotations are a function of one number. In training, every call draws it as dropout does; in evaluation it is fixed.
- The number of buckets never depends on the text.
- With `chunk_by_bucket` every bucket starts a new chunk, so the keys of a causal token depend only on the past. Without
  it, causality holds for values but not for the choice of keys: later tokens move the borders of chunks.

Decoding with a cache: new tokens are hashed by the same rotations, and attend to what they would attend to if the text
ended with the last of them; tokens in the cache keep the states that they got when they were new. This equals the full
forward pass with `chunk_by_bucket`, in local layers, or as long as a text fits into one chunk.
"""

from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.output_capturing import OutputRecorder

from hf_efficient_attn.errors import UnsupportedBackendError
from hf_efficient_attn.messages import warn_once
from hf_efficient_attn.models.base import EfficientPreTrainedModel
from hf_efficient_attn.models.heads.outputs import BackboneOutput
from hf_efficient_attn.models.heads.task_heads import (
    CausalLMHead,
    MaskedLMHead,
    MultipleChoiceHead,
    QuestionAnsweringHead,
    SequenceClassificationHead,
    TokenClassificationHead,
)
from hf_efficient_attn.models.parts.blocks import MLP, are_released_by_layers, build_norm, finite
from hf_efficient_attn.models.parts.embeddings import Positions
from hf_efficient_attn.models.prologue import PreparedCall, TableGeneration, backbone_forward

from .attention import ReformerAttention, build_attention
from .configuration_efficient_reformer import LSH, EfficientReformerConfig
from .reversible import ReversibleStack, Streams, stretches_of

# rotations are drawn from a number below this
MAX_STEP = 2**31
# the attribute of a cache that a Reformer has filled
FILLED_HERE = "_filled_by_reformer"
KEPT = (
    "DeepSpeed's ZeRO-3 releases a layer's weights after each run, also when the backward pass recomputes the layer. "
    "So the layers of this Reformer keep their activations, and memory grows with the number of layers. With ZeRO-2, "
    "DDP and FSDP2 they keep none."
)


class ReformerLayer(GradientCheckpointingLayer):
    """Two steps of the two streams: y₁ = x₁ + Attention(N(x₂)), y₂ = x₂ + MLP(N(y₁)). [B, T, hidden_size] each."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = build_attention(config, layer_idx)
        self.attention_norm, self.mlp_norm = build_norm(config), build_norm(config)
        self.mlp = MLP(config, config.gated_mlp)
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.stretch_tokens = config.chunk_size_feed_forward

    @property
    def gradient_checkpointing(self) -> bool:
        """False: the layer keeps nothing that checkpointing could save, so switching it on changes nothing."""
        return False

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, value: bool) -> None:
        del value

    def forward(
        self,
        states: Tensor,
        streams: Streams,
        mark: Tensor | None = None,
        stack: ReversibleStack | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Return the streams after the layer; `states`: the first stream before it, which is only recorded."""
        first, second = streams.opened(states, mark)
        kept: dict[str, Tensor] = {}

        def attend(states: Tensor) -> Tensor:
            normed = self.attention_norm(narrowed(states, self.attention_norm))
            return self.dropout(self.self_attn(normed, kept=kept, **kwargs)[0])

        if stack is None:
            first = first + attend(second)
            # one graph for all lengths; the compiler decides by itself what is computed at once
            size = 0 if torch.compiler.is_compiling() else self.stretch_tokens
            parts = [self.transform(first[:, tokens]) for tokens in stretches_of(first.shape[1], size)]
            return first, second + (parts[0] if len(parts) == 1 else torch.cat(parts, 1))
        stack.enter(streams.first, streams.second)
        first = first + stack.run(attend, second, (self.attention_norm, self.self_attn))
        added = stack.run(self.transform, first, (self.mlp_norm, self.mlp), self.stretch_tokens)
        return stack.leave(first, second + added)

    def transform(self, states: Tensor) -> Tensor:
        """Return what the MLP adds."""
        return self.dropout(self.mlp(self.mlp_norm(narrowed(states, self.mlp_norm))))


class EfficientReformerPreTrainedModel(EfficientPreTrainedModel):
    """Weight initialisation, loading checks and capabilities shared by the backbone and its heads."""

    config_class = EfficientReformerConfig
    config: EfficientReformerConfig
    base_model_prefix = "model"
    model_tags = ["efficient-attention", "efficient-reformer", "hf_efficient_attn"]
    _no_split_modules = ["ReformerLayer"]
    _can_record_outputs = {
        "hidden_states": OutputRecorder(ReformerLayer, index=1),
        "attentions": OutputRecorder(ReformerAttention, index=1),
    }


class EfficientReformerModel(EfficientReformerPreTrainedModel):
    """The backbone: embedding, layers, final norm. Shapes: input_ids [B, T] → [B, T, config.output_width].

    Memory for training does not grow with the number of layers, because the backward pass computes them again; gradient
    checkpointing is accepted and changes nothing. Compiled training, and training with DeepSpeed's ZeRO-3, saves
    activations like any other model. In training no cache is made.
    """

    def __init__(self, config: EfficientReformerConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.positions = Positions(config)
        self.embedding_dropout = nn.Dropout(config.embedding_dropout)
        self.layers = nn.ModuleList(ReformerLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = build_norm(config, width=config.output_width)
        self.dropout = nn.Dropout(config.hidden_dropout)
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
        **kwargs: Any,
    ) -> BackboneOutput:
        """Return the last hidden state and, with `use_cache` in a causal model, the cache; see `prepare`."""
        use_cache = use_cache and not (self.training and torch.is_grad_enabled())
        call = self.prepare(input_ids, attention_mask, position_ids, inputs_embeds, kwargs, cache, use_cache)
        check_cache(call)
        embedded, where = self.positions(call.embedded, call)
        embedded = self.embedding_dropout(embedded)
        if self.training and self.config.hash_seed is None and LSH in self.config.layer_kinds:
            where["hash_step"] = self._hash_step(embedded.device)
        kwargs |= {**where, "inputs": call.masks(self.config), "cache": call.cache}
        stack = self._reversible_stack(call.cache)
        # at least float32, because the backward pass could not recompute narrower streams exactly enough
        first = second = embedded.to(torch.promote_types(embedded.dtype, torch.float32))
        for layer in islice(self.layers, self.config.num_hidden_layers):
            streams = Streams(first, second)
            first, second = layer(first, streams, streams.mark(), stack=stack, **kwargs)
        if stack is not None:
            stack.close(first, second)
        if self.config.stream_join == "concat":
            self._warn_of_width()
            joined = torch.cat((first, second), -1)
        else:
            joined = (first + second) / 2
        return BackboneOutput(self.dropout(self.norm(narrowed(joined, self.norm))), call.cache)

    def _warn_of_width(self) -> None:
        """Warn that the last hidden state is wider than `hidden_size`, unless one of our heads uses it."""
        if self.task is not None or torch.compiler.is_compiling():
            return
        config = self.config
        warn_once(
            f"stream_join='concat': the last hidden state has {config.output_width} numbers per token, twice "
            f"hidden_size={config.hidden_size}, like the authors' and transformers' Reformer. Libraries that take "
            "hidden_size for its width (sentence-transformers, EncoderDecoderModel) are then wrong: pass "
            f"{config.output_width} to them if they accept a width, or train a Reformer with stream_join='mean'."
        )

    def _hash_step(self, device: torch.device) -> Tensor:
        """Return a random number for hashing, another one for every batch."""
        # drawn like dropout, so that the same seed, and a resumed training, give the same numbers
        return torch.randint(MAX_STEP, (), device=device)

    def _reversible_stack(self, cache: Cache | None) -> ReversibleStack | None:
        """Return what recomputes activations in the backward pass; None: they are kept, or none are needed."""
        if not torch.is_grad_enabled() or cache is not None or torch.compiler.is_compiling():
            return None
        if are_released_by_layers(self.parameters()):
            warn_once(KEPT)
            return None
        return ReversibleStack()


def check_cache(call: PreparedCall) -> None:
    """Mark a cache as filled by this model, and raise UnsupportedBackendError if something else has filled it.

    Prefix tuning adds keys to which every token should attend in every layer. Here a token would attend only to those
    that hashing has put next to it, in local layers only in the first chunks, and no gradient would move a key into
    another bucket.
    """
    cache: Any = call.cache
    if cache is None or torch.compiler.is_exporting():
        return
    is_filled = not torch.compiler.is_compiling() and isinstance(call.past_tokens, int) and call.past_tokens > 0
    if is_filled and not hasattr(cache, FILLED_HERE):
        raise UnsupportedBackendError(
            "The cache has keys that this model has not computed. Prefix tuning cannot put keys before the text of a "
            "Reformer: only tokens of the same hash bucket, or of the first chunks, would attend to them. Use prompt "
            "tuning or LoRA instead."
        )
    setattr(cache, FILLED_HERE, True)


def narrowed(states: Tensor, norm: Any) -> Tensor:
    """Return the states in the dtype of a norm's weight."""
    return finite(states.to(norm.weight.dtype))


class EfficientReformerForCausalLM(TableGeneration, CausalLMHead, EfficientReformerPreTrainedModel, GenerationMixin):
    backbone_class = EfficientReformerModel

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        # transformers returns False for every class whose name contains "reformer"
        return True


class EfficientReformerForMaskedLM(MaskedLMHead, EfficientReformerPreTrainedModel):
    backbone_class = EfficientReformerModel


class EfficientReformerForSequenceClassification(SequenceClassificationHead, EfficientReformerPreTrainedModel):
    backbone_class = EfficientReformerModel


class EfficientReformerForTokenClassification(TokenClassificationHead, EfficientReformerPreTrainedModel):
    backbone_class = EfficientReformerModel


class EfficientReformerForQuestionAnswering(QuestionAnsweringHead, EfficientReformerPreTrainedModel):
    backbone_class = EfficientReformerModel


class EfficientReformerForMultipleChoice(MultipleChoiceHead, EfficientReformerPreTrainedModel):
    backbone_class = EfficientReformerModel


__all__ = [
    "EfficientReformerForCausalLM",
    "EfficientReformerForMaskedLM",
    "EfficientReformerForMultipleChoice",
    "EfficientReformerForQuestionAnswering",
    "EfficientReformerForSequenceClassification",
    "EfficientReformerForTokenClassification",
    "EfficientReformerModel",
    "EfficientReformerPreTrainedModel",
]
