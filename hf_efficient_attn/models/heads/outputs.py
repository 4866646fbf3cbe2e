"""What heads return: transformers' outputs, and the penalty of the backbone's spans for a loss computed elsewhere.

`span_penalty` is a number in training, where the backbone has spans that are trained, and None otherwise. A `loss` that
comes with it contains it.
"""

from dataclasses import dataclass

from torch import Tensor
from transformers.modeling_outputs import (
    CausalLMOutputWithPast,
    MaskedLMOutput,
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)


@dataclass
class CausalLMHeadOutput(CausalLMOutputWithPast):
    span_penalty: Tensor | None = None


@dataclass
class MaskedLMHeadOutput(MaskedLMOutput):
    span_penalty: Tensor | None = None


@dataclass
class SequenceClassificationHeadOutput(SequenceClassifierOutput):
    span_penalty: Tensor | None = None


@dataclass
class TokenClassificationHeadOutput(TokenClassifierOutput):
    span_penalty: Tensor | None = None


@dataclass
class QuestionAnsweringHeadOutput(QuestionAnsweringModelOutput):
    span_penalty: Tensor | None = None


@dataclass
class MultipleChoiceHeadOutput(MultipleChoiceModelOutput):
    span_penalty: Tensor | None = None
