"""What backbones and heads return: transformers' outputs, and the losses besides the task's in one field.

`auxiliary_loss` is a loss that the layers of a backbone add to the task's in training, already weighted: the penalty of
learned spans. It is None in evaluation, and in models that have none. A head adds it to its `loss` once; code that
computes a loss from the outputs has to add it, too.
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


# of heads that take `labels`; sentence-transformers reads the fields of an output from annotations
LabelHeadOutput = (
    SequenceClassificationHeadOutput | TokenClassificationHeadOutput | MultipleChoiceHeadOutput | MaskedLMHeadOutput
)
