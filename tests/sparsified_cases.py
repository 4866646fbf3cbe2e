"""Tiny models of transformers that follow patterns, with the names of `models_cases.Case`."""

from dataclasses import dataclass
from typing import Any

import seq2seq_cases
import torch
import transformers
from models_cases import TINY, head_inputs, randomize

import hf_efficient_attn as hea


@dataclass(frozen=True)
class SparsifiedCase:
    """A model of transformers and its pattern."""

    name: str
    config_class: type
    main_head: str
    pattern: Any
    fields: tuple[tuple[str, Any], ...] = ()

    @property
    def fewest_layers(self) -> dict[str, int]:
        """The change to one layer, for what takes its time by the layer."""
        is_seq2seq = self.main_head == "AutoModelForSeq2SeqLM"
        return {"encoder_layers": 1, "decoder_layers": 1} if is_seq2seq else {"num_hidden_layers": 1}

    def model(self, auto_class: str | None = None, seed: int = 0, **changes: Any) -> Any:
        """Return a model in eval mode whose every parameter is random."""
        torch.manual_seed(seed)
        config = self.config_class(**{**TINY, **dict(self.fields), **changes})
        model = getattr(transformers, auto_class or self.main_head).from_config(config)
        return randomize(hea.sparsify(model.eval(), self.pattern), seed)

    def inputs(self, auto_class: str) -> dict[str, torch.Tensor]:
        """Return inputs with labels for one head."""
        return (seq2seq_cases.head_inputs if "Seq2Seq" in auto_class else head_inputs)(auto_class)
