"""Heads of stars: classifiers of texts, which read relay and maximum, and of tokens, as fastNLP has them."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils.import_utils import is_tracing

from hf_efficient_attn.errors import InputError
from hf_efficient_attn.models.heads.parts import build_classifier, pool, real_tokens
from hf_efficient_attn.models.heads.task_heads import ClassificationHead


class StarClassificationHead(ClassificationHead):
    """Dropout and a linear map, with `classifier_head="dense"` a map and an activation between them.

    Source: Guo et al. (arXiv:1902.09113) and fastNLP, which has the first dropout for pairs of sentences alone.
    """

    def build_head(self, config: Any) -> None:
        # u, v, |u − v| and u · v of two sentences
        width = config.hidden_size * (4 if self.pools and config.separate_sentences else 1)
        is_dense = config.classifier_head == "dense"
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.classifier = build_classifier(config, self.num_outputs(config), is_dense, width, config.intermediate_size)

    def classify(self, features: Tensor) -> Tensor:
        """Return the logits of features [..., width]."""
        return self.classifier(self.dropout(features))


class StarTextHead(StarClassificationHead):
    """Classifies whole texts, or pairs of sentences, by their relays and tokens."""

    def read(self, inputs: dict[str, Any]) -> tuple[Any, Tensor]:
        """Return the backbone's outputs for these inputs, by name, and the logits."""
        outputs = self.model(**inputs)
        hidden, relays = outputs.last_hidden_state, outputs.relay_states
        real = real_tokens(hidden, inputs["input_ids"], inputs["attention_mask"], self.config.pad_token_id)
        if self.config.separate_sentences:
            types = inputs["token_type_ids"].to(hidden.device)
            first, second = (self.pooled(hidden, relays[:, number], real & (types == number)) for number in (0, 1))
            features = torch.cat((first, second, (first - second).abs(), first * second), -1)
        else:
            if outputs.pooler_output is None:
                self._refuse_documents(relays)
            features = self.pooled(hidden, relays[:, 0], real)
        return outputs, self.classify(features)

    def pooled(self, hidden: Tensor, relay: Tensor, real: Tensor) -> Tensor:
        """Return what represents a text, [B, hidden_size]; the maximum of no tokens is 0."""
        how = self.config.classifier_pooling
        if how == "mean":
            return pool(hidden, real, how, is_causal=False)
        if how == "relay":
            return relay
        highest = hidden.masked_fill(~real.unsqueeze(-1), torch.finfo(hidden.dtype).min).amax(1)
        highest = torch.where(real.any(1, keepdim=True), highest, 0)
        return highest if how == "max" else (relay + highest) / 2

    def _refuse_documents(self, relays: Tensor) -> None:
        """Raise InputError for a row of several packed documents, each with a relay."""
        # a compiler gives every token one, since it does not know how many documents there are
        said = "position_ids, cu_seq_lens_q or seq_idx of a compiled model may hold"
        held = said if is_tracing(relays) else f"A row holds {relays.shape[1]}"
        raise InputError(
            f"{held} packed documents, and {type(self).__name__} gives a row one result. Pass one text in each row, "
            "and none of these while compiling, or build the model with separate_sentences=True for pairs of sentences."
        )


class StarTokenHead(StarClassificationHead):
    """Classifies tokens."""

    pools = False

    def compute_logits(self, hidden: Tensor, *_: Any) -> Tensor:
        return self.classify(hidden)
