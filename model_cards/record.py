"""Keep what a run or an analysis has measured, for the cards.

    python model_cards/record.py outputs/run_summarization
    python model_cards/record.py spans/spans.json --name spans_adaptive --command "hf-efficient-attn analyze spans ..."

The first writes `examples/run_summarization.json` beside this file. Experiments leave a results.json with their command
and machine, which is kept as it is; of the other examples it is the metrics, the samples and the machine, which must be
the one that this runs on. The second keeps the JSON of an analysis in few bytes: no blanks, six digits.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from hf_efficient_attn.bench.harness.report import describe_machine

DIGITS = 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "source", type=Path, help="a run's --output_dir, with the name of the example, or an analysis's JSON"
    )
    parser.add_argument("--options", default="", help="what an example was started with; experiments note it")
    parser.add_argument("--note", default="", help="a sentence about the machine: what else ran on it")
    parser.add_argument("--name", help="of an analysis: what its file is called")
    parser.add_argument("--command", help="of an analysis: what wrote its JSON")
    args = parser.parse_args()
    if args.source.is_file():
        if not (args.name and args.command):
            parser.error("an analysis needs --name and --command")
        found = {"command": args.command, **json.loads(args.source.read_text(encoding="utf-8"))}
        text = json.dumps(shortened(found), separators=(",", ":"), ensure_ascii=False)
    else:
        results = args.source / "results.json"
        found = json.loads(results.read_text(encoding="utf-8")) if results.exists() else of_example(args)
        text = json.dumps(found | {"note": args.note}, indent=2, ensure_ascii=False)
    file = Path(__file__).parent / "examples" / f"{args.name or args.source.name}.json"
    file.write_text(text + "\n", encoding="utf-8")


def of_example(args: argparse.Namespace) -> dict[str, Any]:
    """Return the command, the machine, and what Trainer and the example have written."""
    samples = (args.source / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    return {
        "command": f"python examples/{args.source.name}.py {args.options}".strip(),
        "machine": describe_machine(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        "metrics": json.loads((args.source / "all_results.json").read_text(encoding="utf-8")),
        "samples": [json.loads(line) for line in samples],
    }


def shortened(value: Any) -> Any:
    """Return JSON data with six digits of every number."""
    if isinstance(value, dict):
        return {name: shortened(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [shortened(entry) for entry in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
