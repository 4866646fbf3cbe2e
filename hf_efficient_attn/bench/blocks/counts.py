"""The parameter counts of the paper's models (He & Hofmann, arXiv:2311.01906), without allocating any of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM
from transformers.utils import logging

from hf_efficient_attn.bench.blocks.models import count_parameters
from hf_efficient_attn.bench.harness.report import markdown_table
from hf_efficient_attn.models.simplified_transformer.configuration_simplified_transformer import (
    SimplifiedTransformerConfig,
)

FOOTNOTE = """\
Tied parameters count once. The paper counts differently from model to model: its figures for GPT with 18 layers hold
everything, those for BERT and for depth 72 the weight matrices only: norms, gains, biases and position tables are left
out. For depth 72 the figure is the sum of the matrices of the shapes it gives."""


@dataclass(frozen=True)
class PaperModel:
    """A model of the paper: its config for a block, which count its figures are, and the figures of the blocks."""

    name: str
    config: Callable[[str], SimplifiedTransformerConfig]
    counted: str
    figures: dict[str, str]


def _deep_gpt(block: str) -> SimplifiedTransformerConfig:
    return SimplifiedTransformerConfig.codeparrot_gpt(block, num_hidden_layers=72, intermediate_size=1536)


PAPER_MODELS = (
    PaperModel("GPT, 18 layers", SimplifiedTransformerConfig.codeparrot_gpt, "all", {"pre_ln": "167M", "sas": "146M"}),
    PaperModel(
        "BERT, 16 layers",
        SimplifiedTransformerConfig.crammed_bert,
        "weight_matrices",
        {"pre_ln": "120M", "sas": "101M"},
    ),
    PaperModel("GPT, 72 layers, MLP 2d", _deep_gpt, "weight_matrices", {"pre_ln": "378.1M", "sas": "293.8M"}),
)


def paper_counts() -> list[dict[str, Any]]:
    """Return one row per model and block: `model`, `block`, `all`, `weight_matrices`, `paper`, `counted` and `saved`.

    `counted` names which of the two counts the paper's figure is; `saved` is the share of it that the block saves
    against `pre_ln`.
    """
    rows = []
    for model in logging.tqdm(PAPER_MODELS, desc="counting", unit="model", leave=False):
        full = _count(model.config("pre_ln"))[model.counted]
        for block, figure in model.figures.items():
            counts = _count(model.config(block))
            saved = 1 - counts[model.counted] / full
            row = {"model": model.name, "block": block, **counts}
            rows.append({**row, "paper": figure, "counted": model.counted, "saved": saved})
    return rows


def _count(config: SimplifiedTransformerConfig) -> dict[str, int]:
    auto_class = AutoModelForCausalLM if config.is_causal else AutoModelForMaskedLM
    with torch.device("meta"):
        return count_parameters(auto_class.from_config(config))


def counts_table(rows: list[dict[str, Any]]) -> str:
    """Return the rows of `paper_counts` as a Markdown table with a footnote."""
    header = ["model", "block", "all", "weight matrices", "paper", "the paper counts", "saved"]
    cells = [
        [
            row["model"],
            row["block"],
            f"{row['all'] / 1e6:.2f}M",
            f"{row['weight_matrices'] / 1e6:.2f}M",
            row["paper"],
            row["counted"].replace("_", " "),
            f"{row['saved']:.1%}" if row["saved"] else "–",
        ]
        for row in rows
    ]
    return f"{markdown_table(header, cells)}\n\n{FOOTNOTE}"
