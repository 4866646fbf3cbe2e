"""Heads of ETC that read global tokens: classes of texts, and long answers to questions."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import can_return_tuple
from transformers.utils.import_utils import is_tracing

from hf_efficient_attn.errors import InputError
from hf_efficient_attn.layout.transfer import on_host
from hf_efficient_attn.models.heads.outputs import QuestionAnsweringHeadOutput
from hf_efficient_attn.models.heads.parts import pool
from hf_efficient_attn.models.heads.task_heads import ClassificationHead, QuestionAnsweringHead
from hf_efficient_attn.models.inputs.masks import bring_inputs


class EtcTextHead(ClassificationHead):
    """Classifies texts by their global tokens.

    Raises:
        InputError: rows of several packed documents; in a compiled model, positions that may be theirs.
    """

    def read(self, inputs: dict[str, Any]) -> tuple[Any, Tensor]:
        """Return the backbone's outputs for these inputs, by name, and the logits."""
        outputs = self.model(**inputs)
        _refuse_documents(outputs.global_documents, type(self).__name__)
        pooled = pool(
            outputs.global_hidden_state, outputs.global_mask != 0, self.config.classifier_pooling, is_causal=False
        )
        return outputs, self.classifier(self.dropout(pooled))


def _refuse_documents(documents: Tensor | None, head: str) -> None:
    """Raise InputError for rows of several documents; documents: of each global token, [B, G], -1: it is none."""
    if documents is None:
        return
    if is_tracing(documents):
        raise InputError(
            f"position_ids, cu_seq_lens_q or seq_idx of a compiled {head} may hold packed documents, and it gives a "
            "row one result, from its global tokens. Pass one text in each row, and none of them."
        )
    most = 1 + int(on_host(documents).max()) if documents.numel() else 0
    if most > 1:
        raise InputError(
            f"A row holds {most} packed documents, and {head} gives a row one result, from its global tokens. Pass one "
            "text in each row."
        )


@dataclass
class EtcAnswerOutput(QuestionAnsweringHeadOutput):
    """As of every head of questions; `long_answer_logits`: of each global token, [B, G], lowest where there is none."""

    long_answer_logits: Tensor | None = None


class EtcAnswerHead(QuestionAnsweringHead):
    """Start and end of the answer in the text and, with `long_answers`, the global token of the part that holds it.

    Shapes: input_ids [B, T] → start_logits, end_logits [B, T], long_answer_logits [B, G]. Source: Ainslie et al.
    (arXiv:2004.08483), section 5 (Natural Questions, whose paragraphs each have a global token).
    """

    output_class = EtcAnswerOutput

    def build_head(self, config: Any) -> None:
        super().build_head(config)
        self.long_answer_outputs = nn.Linear(config.hidden_size, 1) if config.long_answers else None

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: Tensor | None = None,
        start_positions: torch.LongTensor | None = None,
        end_positions: torch.LongTensor | None = None,
        long_answer_positions: torch.LongTensor | None = None,
        **kwargs: Any,
    ) -> EtcAnswerOutput:
        """Return the logits and, with positions, the loss: the mean of that of the span and that of the long answer.

        long_answer_positions: the number of the right global token, [B]; −100: the example has none.

        Raises:
            InputError: long answers for a model without `long_answers`, or that no global token stands for.
        """
        if long_answer_positions is not None and self.long_answer_outputs is None:
            raise InputError(
                "long_answer_positions is given, but long_answers=False: the head has no logits of long answers. Build "
                "it with long_answers=True."
            )
        # read once, with the masks of the backbone
        bring_inputs(attention_mask, position_ids, long_answer_positions, kwargs.get("global_mask"))
        outputs = self.model(input_ids, attention_mask, position_ids, inputs_embeds=inputs_embeds, **kwargs)
        logits = self.qa_outputs(outputs.last_hidden_state)
        start_logits, end_logits = (each.contiguous() for each in logits.unbind(-1))
        losses, long_logits, unused = [], None, 0
        if start_positions is not None and end_positions is not None:
            losses.append(self.loss_function(start_logits, end_logits, start_positions, end_positions, **kwargs))
        if self.long_answer_outputs is not None:
            long_logits = self.long_answer_outputs(outputs.global_hidden_state).squeeze(-1)
            # a loss may be of spans or of long answers alone, and DDP waits for the gradient of every parameter
            unused = 0 * (start_logits[0, 0] + long_logits[0, 0])
            long_logits = long_logits.masked_fill(outputs.global_mask == 0, torch.finfo(long_logits.dtype).min)
        if long_answer_positions is not None and long_logits is not None:
            _check_long_answers(long_answer_positions, outputs.global_mask)
            right = long_answer_positions.to(logits.device)
            total = nn.functional.cross_entropy(long_logits.float(), right, reduction="sum")
            # a batch may have no answer
            losses.append(total / (right != -100).sum().clamp(min=1))
        loss = torch.stack(losses).mean() if losses else None
        if loss is not None and long_logits is not None:
            loss = loss + unused
        fields = {"start_logits": start_logits, "end_logits": end_logits, "long_answer_logits": long_logits}
        return self.output(outputs, loss, **fields)


def _check_long_answers(positions: Tensor, real: Tensor) -> None:
    """Raise InputError for long answers that no global token stands for.

    Args:
        positions: the number of a global token, [B]; -100: none.
        real: 1 = a global token, [B, G].
    """
    if is_tracing(positions):
        return
    if tuple(positions.shape) != (len(real),):
        raise InputError(f"long_answer_positions has shape {list(positions.shape)}; it must be [{len(real)}].")
    numbers, is_token = on_host(positions), on_host(real) != 0
    for row, number in enumerate(numbers.tolist()):
        if number != -100 and not (0 <= number < is_token.shape[1] and is_token[row, number]):
            raise InputError(
                f"long_answer_positions has {number} in row {row}, which has {int(is_token[row].sum())} global tokens; "
                "give the number of one of them that is no padding, or -100 where there is no answer."
            )
