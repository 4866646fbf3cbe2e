"""Heads of BP-Transformers: classes of texts and of pairs of sentences, by their roots, and losses of layers."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hf_efficient_attn.errors import InputError
from hf_efficient_attn.models.heads.parts import build_classifier, pool, real_tokens
from hf_efficient_attn.models.heads.task_heads import CausalLMHead, ClassificationHead


class BPTextHead(ClassificationHead):
    """Classifies texts by their root, the span of all tokens, or as `classifier_pooling` says; pairs by both.

    Source: Ye et al. (arXiv:1911.04070); the authors' code.
    """

    def build_head(self, config: Any) -> None:
        width = config.hidden_size * (2 if config.separate_sentences else 1)
        is_dense = config.classifier_head == "dense"
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.classifier = build_classifier(config, self.num_outputs(config), is_dense, width)

    def read(self, inputs: dict[str, Any]) -> tuple[Any, Tensor]:
        """Return the backbone's outputs for these inputs, by name, and the logits."""
        outputs = self.model(**inputs)
        features = torch.cat(self.pooled(outputs, inputs), -1)
        return outputs, self.classifier(self.dropout(features))

    def pooled(self, outputs: Any, inputs: dict[str, Any]) -> list[Tensor]:
        """Return what represents a text, or each of two sentences, [B, hidden_size]."""
        config, hidden = self.config, outputs.last_hidden_state
        if config.classifier_pooling == "root":
            if outputs.root_states is None:
                raise InputError(
                    f"A row holds packed documents or follows cached tokens, and {type(self).__name__} gives a row one "
                    "result, from the root of its tree. Pass one whole text in each row."
                )
            return list(outputs.root_states.unbind(1))
        real = real_tokens(hidden, inputs["input_ids"], inputs["attention_mask"], config.pad_token_id)
        parts = [real]
        if config.separate_sentences:
            types = inputs["token_type_ids"].to(hidden.device)
            parts = [real & (types == number) for number in (0, 1)]
        return [pool(hidden, part, config.classifier_pooling, config.is_causal) for part in parts]


class BPCausalHead(CausalLMHead):
    """Predicts the next token, with `layer_losses` in training from earlier layers, too; the loss is their mean.

    Source: the authors' code.
    """

    def output(
        self, outputs: Any, loss: Tensor | None, labels: Tensor | None = None, num_items: Any = None, **fields: Any
    ) -> Any:
        """Return the outputs; `auxiliary_loss` is what makes of the last layer's loss the mean of the layers'."""
        if loss is not None and outputs.layer_states:
            losses = [self.loss_of(states, labels) for states in outputs.layer_states]
            outputs.auxiliary_loss = torch.stack(losses).mean() - losses[-1]
        return super().output(outputs, loss, labels, num_items, **fields)

    def loss_of(self, states: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss of a layer's states, [B, T, hidden_size], to labels [B, T or T - 1], -100: none."""
        logits = self.logits_of(states[:, : labels.shape[1]]).flatten(0, 1)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        labels = labels.to(logits.device).flatten()
        # a micro-batch may have no label that counts
        return cross_entropy(wide, labels, reduction="sum") / (labels != -100).sum().clamp(min=1)


def num_predicting(num_layers: int, progress: float) -> int:
    """Return how many of the last layers predict after this share of the training, at least one.

    Layer i of n, counted from 1, predicts until the share is i / n.

    >>> [num_predicting(12, share) for share in (0.0, 0.08, 0.09, 0.5, 0.99, 1.0)]
    [12, 12, 11, 6, 1, 1]
    """
    return max(1, num_layers - int(num_layers * progress))
