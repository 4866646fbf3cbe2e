"""What backbones and heads return: transformers' outputs, and the losses besides the task's in one field.

`auxiliary_loss` is what the layers of a backbone ask for in training beside the loss of the task, a number with its
weight in it: the penalty of learned spans. It is None in evaluation, and where a model asks for nothing. A head adds it
to its `loss`, once; whoever computes a loss from the outputs adds it, too.
"""

from dataclasses import dataclass

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
