"""Tiny models of transformers that follow patterns, as a family, and cases with the names of `models_cases.Case`."""

from dataclasses import dataclass
from typing import Any

import seq2seq_cases
import torch
import transformers
from family import Family
from models_cases import TINY, built_once, head_inputs

import hf_efficient_attn as hea
from hf_efficient_attn.patterns import Band, Dilated, GlobalTokens, PerHead


@dataclass(frozen=True)
class SparsifiedCase:
    """A model of transformers and its pattern."""

    name: str
    config_class: type
    main_head: str
    pattern: Any
    fields: tuple[tuple[str, Any], ...] = ()

    @property
    def heads(self) -> tuple[str, ...]:
        """Auto classes of it that tests ask for; transformers has more."""
        return self.main_head, "AutoModelForSequenceClassification"

    @property
    def fewest_layers(self) -> dict[str, int]:
        """The change to one layer, for what takes its time by the layer."""
        is_seq2seq = self.main_head == "AutoModelForSeq2SeqLM"
        return {"encoder_layers": 1, "decoder_layers": 1} if is_seq2seq else {"num_hidden_layers": 1}

    def model(self, auto_class: str | None = None, seed: int = 0, **changes: Any) -> Any:
        """Return a model in eval mode whose every parameter is random."""
        name = auto_class or self.main_head

        def build() -> Any:
            config = self.config_class(**{**TINY, **dict(self.fields), **changes})
            return hea.sparsify(getattr(transformers, name).from_config(config).eval(), self.pattern)

        return built_once(self, build, name, seed, changes)

    def inputs(self, auto_class: str) -> dict[str, torch.Tensor]:
        """Return inputs with labels for one head."""
        return (seq2seq_cases.head_inputs if "Seq2Seq" in auto_class else head_inputs)(auto_class)


BART = {"layers": 1, "attention_heads": 4, "ffn_dim": 48}
SPARSIFIED = Family(
    "sparsified",
    (
        SparsifiedCase(
            "llama",
            transformers.LlamaConfig,
            "AutoModelForCausalLM",
            PerHead([Band(3, 0), Dilated(12, 0, 3) | GlobalTokens([0])]),
            (("num_key_value_heads", 2),),
        ),
        SparsifiedCase("bert", transformers.BertConfig, "AutoModelForMaskedLM", Band(2, 2) | GlobalTokens([0])),
        SparsifiedCase(
            "bart",
            transformers.BartConfig,
            "AutoModelForSeq2SeqLM",
            Band(4, 4),
            (
                ("num_hidden_layers", 1),
                *((f"{side}_{name}", size) for side in ("encoder", "decoder") for name, size in BART.items()),
            ),
        ),
    ),
    instead={"Hub with": ("llama", "bart"), "FSDP2": ("llama", "bert")},
)
