"""Heads of BP-Transformers that classify whole texts, by default by the root of their tree."""

from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.errors import InputError
from hf_efficient_attn.models.heads.task_heads import ClassificationHead


class BPTextHead(ClassificationHead):
    """Classifies texts by their root, the span of all tokens, or as `classifier_pooling` says.

    Source: Ye et al. (arXiv:1911.04070); the authors' code.
    """

    def read(self, inputs: dict[str, Any]) -> tuple[Any, Tensor]:
        """Return the backbone's outputs for these inputs, by name, and the logits."""
        outputs = self.model(**inputs)
        if self.config.classifier_pooling != "root":
            hidden = outputs.last_hidden_state
            return outputs, self.compute_logits(hidden, inputs["input_ids"], inputs["attention_mask"])
        root = outputs.pooler_output
        if root is None:
            raise InputError(
                f"A row holds packed documents or follows cached tokens, and {type(self).__name__} gives a row one "
                "result, from the root of its tree. Pass one whole text in each row."
            )
        return outputs, self.classifier(self.dense(self.dropout(self.transform(root))))


def take_roots(tokens: Tensor, spans: Tensor, roots: Tensor) -> Tensor:
    """Return the states of the roots, [B, T, hidden_size] twice and [B] → [B, hidden_size]."""
    index = (roots >> 1)[:, None, None].expand(-1, 1, tokens.shape[2])
    is_span = (roots % 2 == 1)[:, None]
    return torch.where(is_span, spans.gather(1, index)[:, 0], tokens.gather(1, index)[:, 0])
