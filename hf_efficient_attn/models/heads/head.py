"""The base of every task head: a mixin over a family's `PreTrainedModel` that puts layers on its `backbone_class`."""

from typing import Any

import torch
from transformers.utils import can_return_tuple

from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.models.heads.auxiliary_loss import add_auxiliary_loss
from hf_efficient_attn.models.heads.outputs import LabelHeadOutput
from hf_efficient_attn.models.heads.parts import name_inputs, own_inputs


class Head:
    """Builds the backbone and then, in `build_head`, the layers on top; assembles loss and outputs.

    Inputs that only one family has are named in `extra_inputs` of its `PreTrainedModel`, those of a decoder in
    `decoder_inputs`, and passed on to the backbone.

    Attributes:
        backbone_class: the class of `self.model`.
        requires_causal: the value that the config's `is_causal` must have; None: either.
        task: what the outputs are used for, which the backbone is told.
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

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        named = own_inputs(cls)
        if named:
            cls.forward = name_inputs(cls.forward, named)

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

        labels, num_items: what the loss is divided by; see `add_auxiliary_loss`.
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
            labels: as the head's docstring says.
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
