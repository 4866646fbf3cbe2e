"""List the model families: papers, heads, presets, kinds of blocks, causal or bidirectional, and cost of attention.

    hf-efficient-attn families
    hf-efficient-attn families --json

Import hf_efficient_attn, then build a model with AutoModelFor….from_config(Config(...)) or load one with
from_pretrained. A cost is the number of scores that a head computes in a layer for n tokens.

--json prints a list of {"model_type", "config", "papers", "heads", "presets", "blocks", "causal", "cost"}. "papers" are
arXiv ids, "heads" are names of Auto classes of transformers, "presets" are class methods of the config, and "blocks"
are the values that the config field block can have.
"""

import argparse
import json
from textwrap import fill
from types import ModuleType
from typing import Any

from transformers import PreTrainedConfig

from hf_efficient_attn.models.register import FAMILIES, auto_classes

COLUMNS = 110
OTHERS = "For any other model of transformers with full attention, hea.sparsify(model, pattern) sets a pattern."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def main(args: argparse.Namespace) -> None:
    """Print the families."""
    listed = [family_facts(family) for family in FAMILIES]
    if args.json:
        print(json.dumps(listed, indent=1, ensure_ascii=False))
        return
    print("\n\n".join(map(_text, listed)), OTHERS, sep="\n\n")


def family_facts(family: ModuleType) -> dict[str, Any]:
    """Return what is known about a family, in JSON types.

    family: its modeling module, an entry of `FAMILIES`.
    """
    classes = auto_classes(family)
    config = classes["AutoModel"].config_class
    # presets are class methods that the base class of transformers does not have
    methods = [name for name, value in vars(config).items() if isinstance(value, classmethod)]
    presets = [name for name in methods if not hasattr(PreTrainedConfig, name)]
    return {
        "model_type": config.model_type,
        "config": config.__name__,
        "papers": list(config.papers),
        "heads": list(classes),
        "presets": presets,
        "blocks": list(getattr(config, "blocks", ())),
        "causal": _direction(config()),
        "cost": config.attention_cost,
    }


def _direction(config: Any) -> str:
    if config.is_encoder_decoder:
        return "the decoder; the encoder is bidirectional"
    return f"{'yes' if config.is_causal else 'no'} by default; set is_causal"


def _text(facts: dict[str, Any]) -> str:
    papers = ", ".join(f"arXiv:{paper}" for paper in facts["papers"])
    rows = {
        "config": facts["config"],
        "papers": papers,
        "heads": ", ".join(facts["heads"]),
        "presets": ", ".join(facts["presets"]),
        "blocks": ", ".join(facts["blocks"]),
        "causal": facts["causal"],
        "cost": facts["cost"],
    }
    lines = (
        fill(f"  {name.ljust(8)}{text}", COLUMNS, subsequent_indent=" " * 10) for name, text in rows.items() if text
    )
    return "\n".join([facts["model_type"], *lines])
