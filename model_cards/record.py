"""Keep what a run has measured, for the cards: `python model_cards/record.py outputs/run_summarization`.

Writes `model_cards/examples/run_summarization.json`. Experiments leave a results.json with their command and machine,
which is kept as it is; of the other examples it is the metrics, the samples and the machine, which must be the one that
this runs on.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from hf_efficient_attn.bench.harness.report import describe_machine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the run's --output_dir, with the name of the example")
    parser.add_argument("--options", default="", help="what an example was started with; experiments note it")
    parser.add_argument("--note", default="", help="a sentence about the machine: what else ran on it")
    args = parser.parse_args()
    results = args.folder / "results.json"
    found = json.loads(results.read_text(encoding="utf-8")) if results.exists() else of_example(args)
    file = Path(__file__).parent / "examples" / f"{args.folder.name}.json"
    file.write_text(json.dumps(found | {"note": args.note}, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def of_example(args: argparse.Namespace) -> dict[str, Any]:
    """Return the command, the machine, and what Trainer and the example have written."""
    samples = (args.folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    return {
        "command": f"python examples/{args.folder.name}.py {args.options}".strip(),
        "machine": describe_machine(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        "metrics": json.loads((args.folder / "all_results.json").read_text(encoding="utf-8")),
        "samples": [json.loads(line) for line in samples],
    }


if __name__ == "__main__":
    main()
