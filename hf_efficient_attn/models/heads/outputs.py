"""What backbones and heads return: transformers' outputs, and the losses besides the task's in one field.

`auxiliary_loss` is a loss that the layers of a backbone add to the task's in training, already weighted: the penalty of
learned spans, the commitment of centroids. It is None in evaluation, and in models that have none. A head adds it to
its `loss` once; code that computes a loss from the outputs has to add it, too, or `expect_use` warns.
"""

from dataclasses import dataclass, make_dataclass
from typing import Any

from torch import Tensor
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    MaskedLMOutput,
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)


@dataclass
class BackboneOutput(BaseModelOutputWithPast):
    auxiliary_loss: Tensor | None = None


@dataclass
class CausalLMHeadOutput(CausalLMOutputWithPast):
    auxiliary_loss: Tensor | None = None


@dataclass
class MaskedLMHeadOutput(MaskedLMOutput):
    auxiliary_loss: Tensor | None = None


@dataclass
class SequenceClassificationHeadOutput(SequenceClassifierOutput):
    auxiliary_loss: Tensor | None = None


@dataclass
class TokenClassificationHeadOutput(TokenClassifierOutput):
    auxiliary_loss: Tensor | None = None


@dataclass
class QuestionAnsweringHeadOutput(QuestionAnsweringModelOutput):
    auxiliary_loss: Tensor | None = None


@dataclass
class MultipleChoiceHeadOutput(MultipleChoiceModelOutput):
    auxiliary_loss: Tensor | None = None


# of heads that take `labels`; sentence-transformers reads the fields of an output from annotations
LabelHeadOutput = (
    SequenceClassificationHeadOutput | TokenClassificationHeadOutput | MultipleChoiceHeadOutput | MaskedLMHeadOutput
)

# classes of outputs of transformers, and what they become with the field
_extended: dict[type, Any] = {}


def with_auxiliary_loss(outputs: Any, auxiliary_loss: Tensor) -> Any:
    """Return outputs of a model of transformers with `auxiliary_loss`, a field as in our own.

    What is no field is lost where outputs are made anew: under autocast of accelerate, DDP and FSDP.
    """
    kind = type(outputs)
    if kind not in _extended:
        field: Any = ("auxiliary_loss", Tensor | None, None)
        _extended[kind] = make_dataclass(
            kind.__name__, [field], bases=(kind,), namespace={"__module__": kind.__module__}
        )
    return _extended[kind](**outputs, auxiliary_loss=auxiliary_loss)
