"""Try every class of transformers, print what is wrong, and write the verdicts: `python -m sweep OUTPUT.json`.

For a new version of transformers, from `tests/` with the package installed: `python -m sweep sweep/verdicts.json
--against sweep/verdicts.json` tries every class that it can make tiny against its own eager attention, with and without
a pattern (`--only Llama` for some, `--share 0 2` for every second; four minutes on one core); each is right or refused
with a sentence. `python -m sweep.table` then writes the table of `model_cards/engine.md`. A class that needs values no
rule can know gets them in `OWN_FIELDS` of `sweep/tiny.py`.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from sweep.classes import candidates
from sweep.verdict import RIGHT, WRONG, quietly


def main() -> int:
    """Return 1 if a class is wrong, or was right before."""
    parser = argparse.ArgumentParser(
        prog="python -m sweep", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path, nargs="?", help="JSON file to write")
    parser.add_argument("--only", nargs="+", default=[], help="parts of class names")
    parser.add_argument("--share", nargs=2, type=int, help="I N: every N-th class from the I-th on")
    parser.add_argument("--against", type=Path, help="verdicts of before: what was right there must be right again")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    verdicts = []
    for number, candidate in enumerate(candidates()):
        if arguments.share and number % arguments.share[1] != arguments.share[0]:
            continue
        if arguments.only and not any(part in candidate.name for part in arguments.only):
            continue
        start = time.perf_counter()
        verdict = quietly(candidate)
        verdicts.append(verdict)
        seconds = time.perf_counter() - start
        reasons = " | ".join(filter(None, (verdict.own_reason, verdict.sparse_reason)))
        print(f"{verdict.name}: {verdict.own}, {verdict.sparse} ({seconds:.1f} s) {reasons}", flush=True)
    if arguments.output:
        arguments.output.write_text(as_json([each.as_dict() for each in verdicts]))
    wrong = [each for each in verdicts if WRONG in (each.own, each.sparse)]
    if arguments.against:
        before = {each["name"]: each for each in json.loads(arguments.against.read_text())["classes"]}
        lost = [each for each in verdicts if was_right(before.get(each.name)) and not was_right(each.as_dict())]
        print(f"right in {arguments.against}, and no more: {', '.join(each.name for each in lost) or 'none'}")
        wrong += lost
    print(f"{len(verdicts)} classes, {len(wrong)} wrong: {', '.join(each.name for each in wrong)}")
    return 1 if wrong else 0


def as_json(verdicts: list[dict[str, Any]]) -> str:
    """Return the verdicts as a file, one class a line."""
    lines = ",\n".join(json.dumps(each) for each in verdicts)
    return f'{{"transformers": "{transformers.__version__}", "classes": [\n{lines}\n]}}\n'


def was_right(verdict: dict[str, Any] | None) -> bool:
    """Return whether a class is right with and without a pattern."""
    return verdict is not None and verdict["own"] == verdict["sparse"] == RIGHT


if __name__ == "__main__":
    raise SystemExit(main())
