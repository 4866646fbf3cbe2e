"""What each family can do with a neighbour, as the tests find it: the table of model_cards/engine.md.

A test says at its end, in a line, what it has shown, by the fixture `capability`:

    capability("sparse_transformer", "PEFT")
    capability("sparse_transformer", "ONNX", refusal="A big_bird pattern is laid out anew for every length.")
    capability("sparse_seq2seq", "TRL", reason="TRL trains decoders.")

Where the variable CAPABILITIES names a file, this is written there, a line each; `python tests/capabilities.py FILE`
puts the cells that were tested into model_cards/neighbours.json, `... FILE whole` only these, so that no cell outlives
its test, and `python model_cards/figures.py` makes the table. A test that fails says nothing, and `tests/neighbours.sh`
then writes no table.
"""

import importlib.metadata
import json
import os
import sys
from pathlib import Path
from typing import Any

from families import FAMILIES, SPARSIFIED

VARIABLE = "CAPABILITIES"
TABLE = Path(__file__).parents[1] / "model_cards" / "neighbours.json"
ROWS = tuple(family.name for family in FAMILIES)
COLUMNS = (
    "Hub with",
    "Hub without",
    "DDP",
    "FSDP2",
    "TP",
    "halo",
    "Ulysses",
    "ZeRO",
    "PEFT",
    "TRL",
    "sentence-transformers",
    "serve",
    "lm-eval",
    "export",
    "ONNX",
)
LIBRARIES = (
    "torch",
    "transformers",
    "accelerate",
    "peft",
    "trl",
    "sentence-transformers",
    "lm_eval",
    "onnxruntime",
    "deepspeed",
)


def capability(family: str, column: str, refusal: str | None = None, reason: str | None = None) -> None:
    """Note that a family can do what a column says; or what of it is refused, with the sentence that says so; or a
    reason for which the neighbour cannot do it.

    A refusal or a reason beside what a family can do is a note to its cell; alone, it is the cell.
    """
    assert family in ROWS, family
    assert column in COLUMNS, column
    file = os.environ.get(VARIABLE)
    if file:
        with open(file, "a", encoding="utf-8") as lines:
            lines.write(json.dumps([family, column, refusal, reason]) + "\n")


def family_of(config: Any) -> str:
    """Return the row of a config, or of its class, in the table."""
    return config.model_type if config.model_type in ROWS else SPARSIFIED.name


def main(file: str, is_whole: bool) -> None:
    """Put the cells that a file names into the table, beside those of other tests unless all of them have run."""
    table = json.loads(TABLE.read_text(encoding="utf-8")) if TABLE.exists() else {"cells": {}}
    cells: dict[str, dict[str, dict[str, Any]]] = {}
    for line in Path(file).read_text(encoding="utf-8").splitlines():
        family, column, refusal, reason = json.loads(line)
        cell = cells.setdefault(family, {}).setdefault(column, {"works": False, "refused": []})
        cell["works"] |= refusal is None and reason is None
        for kind, note in (("refused", refusal), ("reasons", reason)):
            if note is not None:
                cell[kind] = sorted({*cell.get(kind, []), note})
    kept, versions = ({}, {}) if is_whole else (table["cells"], table.get("versions", {}))
    known = {family: {**kept.get(family, {}), **cells.get(family, {})} for family in ROWS}
    table["cells"] = {row: {name: known[row][name] for name in COLUMNS if name in known[row]} for row in ROWS}
    installed = {each.name: each.version for each in importlib.metadata.distributions() if each.name in LIBRARIES}
    # what is not installed has filled no cell, and the versions of older cells stay with them
    versions = {**versions, **installed}
    table["columns"] = list(COLUMNS)
    table["versions"] = {name: versions[name] for name in LIBRARIES if name in versions}
    TABLE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], "whole" in sys.argv[2:])
