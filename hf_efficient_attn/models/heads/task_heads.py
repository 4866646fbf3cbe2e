"""Task heads, written once: mixins over a family's `PreTrainedModel` that put a head on its `backbone_class`.

A family writes `class XForTokenClassification(TokenClassificationHead, XPreTrainedModel)` and sets `backbone_class`;
its config has `is_causal`.
"""

from typing import Any

import torch
from torch import nn
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.utils import can_return_tuple

from hf_efficient_attn.attention.cache_argument import CACHE_ARGUMENT, CacheGeneration, takes_cache
from hf_efficient_attn.models.heads.auxiliary_loss import predicted_labels
from hf_efficient_attn.models.heads.head import Head, LabelHead
from hf_efficient_attn.models.heads.outputs import (
    CausalLMHeadOutput,
    MaskedLMHeadOutput,
    MultipleChoiceHeadOutput,
    QuestionAnsweringHeadOutput,
    SequenceClassificationHeadOutput,
    TokenClassificationHeadOutput,
)
from hf_efficient_attn.models.heads.parts import (
    PredictionTransform,
    ResidualMLP,
    build_classifier,
    exclude_question,
    output_width,
    pool,
    real_tokens,
)
from hf_efficient_attn.models.heads.sliced_loss import sliced_loss
from hf_efficient_attn.models.inputs.axes import check_axes


class LanguageModelHead(Head):
    """A projection to the vocabulary, tied to the embedding if the config says so.

    A config may set `lm_head_bias`, and `lm_head_transform`: a dense map, activation and norm before the projection.
    """

    task = "language_modeling"
    accepts_loss_kwargs = True

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _fsdp_plan = {"lm_head": "keep_full_weight"}

    def build_head(self, config: Any) -> None:
        has_bias = getattr(config, "lm_head_bias", False)
        self.lm_head = nn.Linear(output_width(config), config.vocab_size, bias=has_bias)

    def logits_of(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the logits of hidden states, [..., output_width] → [..., vocab_size]."""
        return self.lm_head(hidden_states)

    def slices(self, labels: torch.Tensor | None) -> int:
        """Return how many tokens the loss takes at once, `chunk_size_lm_head` in training; 0: all."""
        return 0 if labels is None or not self.training else getattr(self.config, "chunk_size_lm_head", 0)

    def loss_in_slices(self, hidden_states: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Return the loss without a tensor of all logits, see `sliced_loss`."""
        options = {**kwargs, "vocab_size": self.config.vocab_size}
        sizes = (self.slices(labels), self.config.is_causal, options.pop("num_items_in_batch", None))
        return sliced_loss(self.logits_of, self.loss_function, hidden_states, labels, *sizes, **options)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.lm_head = new_embeddings


class CausalLMHead(CacheGeneration, LanguageModelHead):
    """Next-token prediction; a family adds `GenerationMixin`. Shapes: input_ids [B, T] → logits [B, T, vocab_size].

    Libraries compute the loss of decoders from the backbone's last states and `lm_head` (TRL), so that there is nothing
    in between: with `lm_head_transform` the backbone applies the map, as its `transform`, behind its last norm. Files
    have it under the name that it has in heads that predict masked tokens; `AutoModel` and other heads, which read the
    states before it, leave it out.
    """

    requires_causal, output_class = True, CausalLMHeadOutput

    def build_head(self, config: Any) -> None:
        if getattr(config, "lm_head_transform", False):
            self.model.set_submodule("transform", PredictionTransform(config), strict=True)
            renamed = [WeightRenaming(r"^transform\.", "model.transform.")]
            register_checkpoint_conversion_mapping(type(self).__name__, renamed, overwrite=True)
            # Trainer reads the files of its checkpoints by itself
            self.register_load_state_dict_pre_hook(rename_transform)
        super().build_head(config)

    @takes_cache
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMHeadOutput:
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        is_sliced = self.slices(labels) > 0
        logits = None if is_sliced else self.logits_of(outputs.last_hidden_state[:, kept])
        loss, counted = None, None
        if is_sliced:
            loss = self.loss_in_slices(outputs.last_hidden_state, labels, **kwargs)
        elif labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        if labels is not None:
            counted = predicted_labels(labels, kwargs)
        num_items = kwargs.get("num_items_in_batch")
        return self.output(
            outputs, loss, counted, num_items, logits=logits, **{CACHE_ARGUMENT: getattr(outputs, CACHE_ARGUMENT)}
        )


def rename_transform(_: nn.Module, weights: dict[str, Any], prefix: str, *args: Any) -> None:
    """Give weights that are about to be loaded into a causal language model the names in its backbone."""
    saved, own = f"{prefix}transform.", f"{prefix}model.transform."
    for name in [name for name in weights if name.startswith(saved)]:
        weights[own + name.removeprefix(saved)] = weights.pop(name)


class MaskedLMHead(LanguageModelHead, LabelHead):
    """Prediction of masked tokens (labels −100 elsewhere). Shapes: input_ids [B, T] → logits [B, T, vocab_size]."""

    requires_causal, output_class = False, MaskedLMHeadOutput

    def build_head(self, config: Any) -> None:
        has_transform = getattr(config, "lm_head_transform", False)
        self.transform = PredictionTransform(config) if has_transform else nn.Identity()
        super().build_head(config)

    def logits_of(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().logits_of(self.transform(hidden_states))

    def compute_logits(self, hidden: torch.Tensor, *_: Any) -> torch.Tensor:
        return self.logits_of(hidden)

    def outputs_and_loss(self, inputs: dict[str, Any], labels: torch.Tensor | None, options: dict[str, Any]) -> Any:
        """Return outputs, logits and loss, as every such head; the logits are None where the loss goes by slices."""
        if labels is None or not self.slices(labels):
            return super().outputs_and_loss(inputs, labels, options)
        outputs = self.model(**inputs, **options)
        return outputs, None, self.loss_in_slices(outputs.last_hidden_state, labels, **options)

    def compute_loss(self, logits: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)


class ClassificationHead(LabelHead):
    """Dropout and a linear map, to classify tokens, sequences or choices.

    A config may ask for `classifier_head="transform"` (first a dense map, activation and norm, as in ModernBERT) or, if
    whole sequences are classified, for "dense" (first a dense map).
    """

    pools = True

    def build_head(self, config: Any) -> None:
        self.dropout = nn.Dropout(config.classifier_dropout)
        kind = getattr(config, "classifier_head", "linear")
        self.transform = PredictionTransform(config) if kind == "transform" else nn.Identity()
        self.classifier = build_classifier(config, self.num_outputs(config), is_dense=self.pools and kind == "dense")

    def num_outputs(self, config: Any) -> int:
        return config.num_labels

    def compute_logits(
        self, hidden: torch.Tensor, input_ids: torch.Tensor | None, attention_mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the logits of whole sequences. Shapes: hidden [B, T, hidden_size] → [B, num_outputs]."""
        real = real_tokens(hidden, input_ids, attention_mask, self.config.pad_token_id)
        pooled = pool(hidden, real, self.config.classifier_pooling, self.config.is_causal)
        return self.classifier(self.dropout(self.transform(pooled)))


class SequenceClassificationHead(ClassificationHead):
    """One label, several, or numbers per sequence. Shapes: input_ids [B, T] → logits [B, num_labels]."""

    task, output_class = "sequence_classification", SequenceClassificationHeadOutput

    def compute_loss(self, logits: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return self.loss_function(logits=logits, labels=labels, pooled_logits=logits, config=self.config)


class TokenClassificationHead(ClassificationHead):
    """One label per token. Shapes: input_ids [B, T] → logits [B, T, num_labels]."""

    task, pools, output_class = "token_classification", False, TokenClassificationHeadOutput

    def compute_logits(self, hidden: torch.Tensor, *_: Any) -> torch.Tensor:
        return self.classifier(self.dropout(self.transform(hidden)))

    def compute_loss(self, logits: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return self.loss_function(logits, labels, self.config)


class QuestionAnsweringHead(Head):
    """Start and end of the answer in the text. Shapes: input_ids [B, T] → start_logits, end_logits [B, T].

    A config may ask for `question_answering_head="residual_mlp"` or "transform" (a dense map, activation and norm), and
    for `question_answering_excludes_question`: no answer then begins or ends in the tokens up to the first
    `sep_token_id`, except in token 0.
    """

    task, output_class = "question_answering", QuestionAnsweringHeadOutput

    def build_head(self, config: Any) -> None:
        kind = getattr(config, "question_answering_head", "linear")
        self.transform = PredictionTransform(config) if kind == "transform" else nn.Identity()
        self.residual_mlp = ResidualMLP(config) if kind == "residual_mlp" else nn.Identity()
        self.qa_outputs = nn.Linear(output_width(config), 2)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        start_positions: torch.LongTensor | None = None,
        end_positions: torch.LongTensor | None = None,
        **kwargs: Any,
    ) -> QuestionAnsweringHeadOutput:
        outputs = self.model(input_ids, attention_mask, position_ids, inputs_embeds=inputs_embeds, **kwargs)
        logits = self.qa_outputs(self.residual_mlp(self.transform(outputs.last_hidden_state)))
        if getattr(self.config, "question_answering_excludes_question", False) and input_ids is not None:
            real = real_tokens(logits, input_ids, attention_mask, None)
            logits = exclude_question(logits, input_ids, real, self.config.sep_token_id)
        start_logits, end_logits = (each.contiguous() for each in logits.unbind(-1))
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = self.loss_function(start_logits, end_logits, start_positions, end_positions, **kwargs)
        return self.output(outputs, loss, start_logits=start_logits, end_logits=end_logits)


class MultipleChoiceHead(ClassificationHead):
    """One of C candidate sequences. Shapes: input_ids [B, C, T] → logits [B, C]."""

    task, output_class = "multiple_choice", MultipleChoiceHeadOutput

    def num_outputs(self, config: Any) -> int:
        return 1

    def read(self, inputs: dict[str, Any]) -> tuple[Any, torch.Tensor]:
        """Return the backbone's outputs, with an example for each candidate, and the logits [B, C]."""
        input_ids, inputs_embeds = inputs["input_ids"], inputs["inputs_embeds"]
        check_axes(input_ids, inputs_embeds, ("batch", "choices", "tokens"))
        choices = (input_ids if input_ids is not None else inputs_embeds).shape[1]
        folded = ("input_ids", "attention_mask", "position_ids", "inputs_embeds", *getattr(self, "extra_inputs", ()))
        given = {name: inputs[name].flatten(0, 1) for name in folded if inputs.get(name) is not None}
        outputs, logits = super().read({**inputs, **given})
        return outputs, logits.view(-1, choices)

    def compute_loss(self, logits: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(logits, labels.to(logits.device))
