"""The encoder-decoders under contract, a family of `families.py`, and inputs for them."""

from dataclasses import dataclass
from typing import Any

import torch
import transformers
from family import Family
from models_cases import built_once

import hf_efficient_attn as hea

TINY = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "max_target_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "sep_token_id": 60,
}
HEADS = {
    "AutoModel": "Model",
    "AutoModelForSeq2SeqLM": "ForConditionalGeneration",
    "AutoModelForSequenceClassification": "ForSequenceClassification",
    "AutoModelForQuestionAnswering": "ForQuestionAnswering",
}


@dataclass(frozen=True)
class Seq2SeqCase:
    """One configuration of one family: `config()` builds it, `heads` are its Auto heads."""

    name: str
    config_class: type
    preset: str
    fields: tuple[tuple[str, Any], ...]
    shows_a_route: bool = False
    # whether it is compiled and exported, see `models_cases.Case`
    is_traced: bool = True

    def config(self, **changes: Any) -> transformers.PreTrainedConfig:
        tiny = {name: value for name, value in TINY.items() if hasattr(self.config_class, name)}
        return getattr(self.config_class, self.preset)(**{**tiny, **dict(self.fields), **changes})

    @property
    def heads(self) -> dict[str, type]:
        """Auto class name → model class, for every head this family has."""
        prefix = self.config_class.__name__.removesuffix("Config")
        found = {name: getattr(hea, f"{prefix}{suffix}", None) for name, suffix in HEADS.items()}
        return {name: cls for name, cls in found.items() if cls is not None}

    @property
    def fewest_layers(self) -> dict[str, int]:
        """The change to as few layers as its lists allow, for what takes its time by the layer."""
        has_lists = any(isinstance(value, list) for _, value in self.fields)
        return {} if has_lists else {"encoder_layers": 1, "decoder_layers": 1}

    @property
    def main_head(self) -> str:
        """The language model."""
        return "AutoModelForSeq2SeqLM"

    def model(self, auto_class: str = "AutoModelForSeq2SeqLM", seed: int = 0, **changes: Any) -> Any:
        """Return a model in eval mode whose every parameter is random, so that no special start value hides a bug."""
        return built_once(
            self, lambda: self.heads[auto_class](self.config(**changes)).eval(), auto_class, seed, changes
        )

    def inputs(self, auto_class: str = "AutoModelForSeq2SeqLM") -> dict[str, Any]:
        """Return inputs with labels for one head; see `head_inputs`."""
        return head_inputs(auto_class)


def random_ids(rows: int, tokens: int, seed: int = 2) -> torch.Tensor:
    """Return tokens that are none of the special ones."""
    return torch.randint(3, 60, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def head_inputs(auto_class: str, rows: int = 3, source_tokens: int = 12, target_tokens: int = 6) -> dict[str, Any]:
    """Return inputs with labels for one head: random tokens, the first source and target padded on the right."""
    ids, target = random_ids(rows, source_tokens, seed=1), random_ids(rows, target_tokens, seed=4)
    ids[:, 4], ids[:, 2] = TINY["eos_token_id"], TINY["sep_token_id"]
    mask = torch.ones_like(ids)
    mask[0, -4:] = 0
    inputs: dict[str, Any] = {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}
    if auto_class == "AutoModelForSeq2SeqLM":
        target[0, -2:] = -100
        inputs["labels"] = target
    elif auto_class == "AutoModelForSequenceClassification":
        inputs["labels"] = torch.ones(rows, dtype=torch.long)
    elif auto_class == "AutoModelForQuestionAnswering":
        inputs["start_positions"] = torch.ones(rows, dtype=torch.long)
        inputs["end_positions"] = torch.full((rows,), 3)
    else:
        inputs["decoder_input_ids"] = target
    return inputs


def seq2seq(name: str, preset: str, shows_a_route: bool = False, is_traced: bool = True, **fields: Any) -> Seq2SeqCase:
    fields_of_it = tuple(fields.items())
    return Seq2SeqCase(f"seq2seq-{name}", hea.SparseSeq2SeqConfig, preset, fields_of_it, shows_a_route, is_traced)


SEQ2SEQ = Family(
    "sparse_seq2seq",
    (
        seq2seq("led", "led", shows_a_route=True, attention_window=[4, 6]),
        seq2seq("led-question", "led", attention_window=4, global_tokens={"token_ids": [60]}),
        seq2seq("bigbird_pegasus", "bigbird_pegasus", block_tokens=2, num_random_blocks=1),
        seq2seq("vanilla", "vanilla"),
        seq2seq(
            "vanilla-pre",
            "vanilla",
            is_traced=False,
            norm_position="pre",
            position_embedding_type="learned",
            lm_head_bias=True,
        ),
        seq2seq(
            "both-sparse",
            "vanilla",
            attention_pattern={
                "encoder": {"kind": "band", "left": 2, "right": 2},
                "decoder": {"kind": "band", "left": 3, "right": 0},
            },
            norm_type="rmsnorm",
        ),
    ),
    refuses={"halo": "sparse_seq2seq need whole sequences"},
)
