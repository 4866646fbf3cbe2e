"""Task heads, written once: mixins over a family's `PreTrainedModel` that put a head on its `backbone_class`.

A family writes `class XForTokenClassification(TokenClassificationHead, XPreTrainedModel)` and sets `backbone_class`;
its config has `is_causal`.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.utils import can_return_tuple

from hf_efficient_attn.attention.layer import readable_keys
from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.integration.forward_context import CACHE_ARGUMENT, CacheGeneration, takes_cache
from hf_efficient_attn.integration.names import is_table
from hf_efficient_attn.models.heads.outputs import (
    CausalLMHeadOutput,
    LabelHeadOutput,
    MaskedLMHeadOutput,
    MultipleChoiceHeadOutput,
    QuestionAnsweringHeadOutput,
    SequenceClassificationHeadOutput,
    TokenClassificationHeadOutput,
    add_auxiliary_loss,
    predicted_labels,
    sliced_loss,
)
from hf_efficient_attn.models.inputs import check_axes
from hf_efficient_attn.models.parts.blocks import build_norm

# Parts of task heads: dense maps before the last one, pooling, and the names of inputs that only one family has.


def output_width(config: Any) -> int:
    """Return the width of the backbone's last hidden state: the config's `output_width` or `hidden_size`."""
    return getattr(config, "output_width", config.hidden_size)


class PredictionTransform(nn.Module):
    """A dense map, an activation and a norm, as before BERT's projection to the vocabulary. [..., hidden_size] → same.

    The activation is the config's `transform_activation`, or that of its MLPs if it has none.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size, bias=getattr(config, "lm_transform_bias", True))
        self.act_fn = ACT2FN[getattr(config, "transform_activation", config.hidden_act)]
        self.norm = build_norm(config)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.norm(self.act_fn(self.dense(hidden_states)))


class DenseClassifier(nn.Module):
    """A dense map, `classifier_activation`, dropout and a map to labels, as in RoBERTa. [..., width] → [..., labels].

    They are one module, as in RoBERTa, because PEFT trains and saves the module `classifier` and nothing else.
    """

    def __init__(self, config: Any, num_outputs: int, width: int, inner: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, inner)
        self.act_fn = ACT2FN[config.classifier_activation]
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.out_proj = nn.Linear(inner, num_outputs)

    def forward(self, pooled: torch.Tensor) -> torch.Tensor:
        return self.out_proj(self.dropout(self.act_fn(self.dense(pooled))))


def build_classifier(
    config: Any, num_outputs: int, is_dense: bool, width: int | None = None, inner: int | None = None
) -> nn.Module:
    """Return the module that maps features [..., width] to labels.

    width, inner: None: `output_width` and `hidden_size`.
    """
    width = output_width(config) if width is None else width
    if is_dense:
        return DenseClassifier(config, num_outputs, width, config.hidden_size if inner is None else inner)
    return nn.Linear(width, num_outputs)


class ResidualMLP(nn.Module):
    """Norm(x + MLP(x)), as in transformers' BigBird for question answering. [B, T, hidden_size] → same."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size)
        self.act_fn = ACT2FN[config.hidden_act]
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size)
        self.norm = build_norm(config)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        inner = self.act_fn(self.up_proj(self.dropout(hidden_states)))
        return self.norm(hidden_states + self.dropout(self.down_proj(inner)))


def exclude_question(
    logits: torch.Tensor, input_ids: torch.Tensor, real: torch.Tensor, sep_token_id: int
) -> torch.Tensor:
    """Return the logits [B, T, 2] with the question excluded: the tokens up to the first separator, except token 0."""
    is_separator = (input_ids == sep_token_id) & real
    last = torch.where(is_separator.any(1), is_separator.int().argmax(1), -1)
    index = torch.arange(input_ids.shape[1], device=input_ids.device)
    in_question = (index <= last[:, None]) & (index > 0)
    return logits.masked_fill(in_question.unsqueeze(-1), torch.finfo(logits.dtype).min)


def own_inputs(family: type) -> tuple[str, ...]:
    """Return the names of the inputs of a backbone or decoder that only the family of a class has."""
    return (*getattr(family, "extra_inputs", ()), *getattr(family, "decoder_inputs", ()))


def name_inputs(forward: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., Any]:
    """Return `forward` with these keyword arguments added to its signature; it receives them as `**kwargs`.

    Trainer drops the columns of a dataset that the signature does not name.
    """
    signature = inspect.signature(forward)
    parameters = list(signature.parameters.values())
    # a subclass, such as sharding makes, already has them
    missing = [name for name in names if name not in signature.parameters]
    new = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in missing]

    @functools.wraps(forward)
    def named(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    named.__signature__ = signature.replace(parameters=[*parameters[:-1], *new, parameters[-1]])  # type: ignore[attr-defined]
    return named


class NamesOwnInputs:
    """Mixin: the signature of `forward` names the inputs that only the family of the class has."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        named = own_inputs(cls)
        if named:
            cls.forward = name_inputs(cls.forward, named)  # type: ignore[attr-defined]


def real_tokens(
    hidden: torch.Tensor, input_ids: torch.Tensor | None, attention_mask: torch.Tensor | None, pad_token_id: int | None
) -> torch.Tensor:
    """Return which tokens are not padding, by the mask or, without one, by `pad_token_id`: bool [B, T].

    attention_mask: [B, T], or a matrix [B or 1, 1, T, K]; its keys that no token attends to are padding.
    """
    if attention_mask is not None and attention_mask.ndim == 2:
        return attention_mask.to(hidden.device).bool()
    if attention_mask is not None and attention_mask.ndim == 4 and not is_table(attention_mask):
        # cached keys come first
        return readable_keys(attention_mask.to(hidden.device), hidden.shape[0])[:, -hidden.shape[1] :]
    if input_ids is not None and pad_token_id is not None:
        return (input_ids != pad_token_id).to(hidden.device)
    return torch.ones(hidden.shape[:2], dtype=torch.bool, device=hidden.device)


def pool(hidden: torch.Tensor, real: torch.Tensor, how: str | None, is_causal: bool) -> torch.Tensor:
    """Return one vector per sequence: its `first` or `last` real token or the `mean` of all of them.

    By default this is the last if causal (the only one that depends on the whole sequence), otherwise the mean.
    Shapes: hidden [B, T, hidden_size], real [B, T] → [B, hidden_size].
    """
    how = how or ("last" if is_causal else "mean")
    if how == "mean":
        # fp16 would overflow
        wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        total = torch.where(real.unsqueeze(-1), wide, 0).sum(1)
        return (total / real.sum(1, keepdim=True).clamp(min=1)).to(hidden.dtype)
    tokens = torch.arange(hidden.shape[1], device=hidden.device)
    index = torch.where(real, tokens, 0).argmax(-1) if how == "last" else real.int().argmax(-1)
    return hidden[torch.arange(hidden.shape[0], device=hidden.device), index]


# The base of every task head: a mixin over a family's `PreTrainedModel` that puts layers on its `backbone_class`.


class Head(NamesOwnInputs):
    """Builds the backbone and then, in `build_head`, the layers on top; assembles loss and outputs.

    Inputs that only one family has are named in `extra_inputs` of its `PreTrainedModel`, those of a decoder in
    `decoder_inputs`, and passed on to the backbone.

    Attributes:
        backbone_class: the class of `self.model`.
        requires_causal: the value that the config's `is_causal` must have; None: either.
        task: the name of the task, which the backbone gets.
        accepts_loss_kwargs: whether the loss is divided by `num_items_in_batch`, which Trainer wants to know when it
            accumulates gradients.
        output_class: the class of what `forward` returns.
        recorded: the outputs of the backbone that are passed on.
    """

    backbone_class: type
    requires_causal: bool | None = None
    task: str
    accepts_loss_kwargs = False
    output_class: type
    recorded: tuple[str, ...] = ("hidden_states", "attentions", "auxiliary_loss")

    def __init__(self, config: Any) -> None:
        if self.requires_causal is not None and config.is_causal is not self.requires_causal:
            raise ConfigurationError(
                f"{type(self).__name__} needs is_causal={self.requires_causal}, but the config says "
                f"is_causal={config.is_causal}. Pass is_causal={self.requires_causal} when you build or load it."
            )
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = self.backbone_class(config)
        self.model.task = self.task
        self.build_head(config)
        self.post_init()

    def output(
        self,
        outputs: Any,
        loss: torch.Tensor | None,
        labels: torch.Tensor | None = None,
        num_items: Any = None,
        **fields: Any,
    ) -> Any:
        """Return `output_class`: the loss with the backbone's auxiliary loss, `fields`, and what the backbone recorded.

        labels, num_items: the labels that count, and the divisor of the loss; see `add_auxiliary_loss`.
        """
        loss = add_auxiliary_loss(loss, getattr(outputs, "auxiliary_loss", None), labels, num_items)
        return self.output_class(loss=loss, **fields, **{name: getattr(outputs, name) for name in self.recorded})


class LabelHead(Head):
    """A head whose loss compares logits with `labels`, as its `compute_logits` and `compute_loss` define them."""

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> LabelHeadOutput:
        """Return the head's outputs, with a loss if `labels` are given.

        Args:
            input_ids: [B, T]; alternatively inputs_embeds, [B, T, hidden_size].
            attention_mask, position_ids: as for the backbone.
            labels: see the docstring of the head.
        """
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "inputs_embeds": inputs_embeds}
        outputs, logits, loss = self.outputs_and_loss({**inputs, "position_ids": position_ids}, labels, kwargs)
        num_items = kwargs.get("num_items_in_batch") if self.accepts_loss_kwargs else None
        return self.output(outputs, loss, labels, num_items, logits=logits)

    def outputs_and_loss(
        self, inputs: dict[str, Any], labels: torch.Tensor | None, options: dict[str, Any]
    ) -> tuple[Any, torch.Tensor, torch.Tensor | None]:
        """Return the backbone's outputs, the logits, and the loss if there are labels."""
        outputs, logits = self.read({**inputs, **options})
        return outputs, logits, None if labels is None else self.compute_loss(logits, labels, **options)

    def read(self, inputs: dict[str, Any]) -> tuple[Any, torch.Tensor]:
        """Return the backbone's outputs for these inputs, by name, and the logits."""
        outputs = self.model(**inputs)
        return outputs, self.compute_logits(outputs.last_hidden_state, inputs["input_ids"], inputs["attention_mask"])


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

    Libraries such as TRL compute the loss of decoders from the backbone's last states and `lm_head`, so nothing may lie
    between them: with `lm_head_transform` the backbone itself applies the map, as its `transform`, after its last norm.
    In saved files it has the same name as in `MaskedLMHead`. `AutoModel` and other heads use the states before the map,
    and leave it out.
    """

    requires_causal, output_class = True, CausalLMHeadOutput

    def build_head(self, config: Any) -> None:
        if getattr(config, "lm_head_transform", False):
            self.model.set_submodule("transform", PredictionTransform(config), strict=True)
            renamed = [WeightRenaming(r"^transform\.", "model.transform.")]
            register_checkpoint_conversion_mapping(type(self).__name__, renamed, overwrite=True)
            # Trainer loads its checkpoints itself, without this mapping
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
    """Rename the transform's weights, before they are loaded into a causal language model, as in its backbone."""
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
        """Return outputs, logits and loss; the logits are None if the loss is computed in slices."""
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
