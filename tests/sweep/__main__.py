"""Try every class of transformers, print what is wrong, and write the verdicts: `python -m sweep OUTPUT.json`."""

import argparse
import json
import time
from pathlib import Path

import torch
import transformers

from sweep.classes import candidates
from sweep.verdict import WRONG, quietly


def main() -> int:
    """Return 1 if a class is wrong."""
    parser = argparse.ArgumentParser(prog="python -m sweep", description=__doc__)
    parser.add_argument("output", type=Path, nargs="?", help="JSON file to write")
    parser.add_argument("--only", nargs="+", default=[], help="parts of class names")
    parser.add_argument("--share", nargs=2, type=int, help="I N: every N-th class from the I-th on")
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
        table = {"transformers": transformers.__version__, "classes": [each.as_dict() for each in verdicts]}
        arguments.output.write_text(json.dumps(table, indent=1) + "\n")
    wrong = [each for each in verdicts if WRONG in (each.own, each.sparse)]
    print(f"{len(verdicts)} classes, {len(wrong)} wrong: {', '.join(each.name for each in wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
