"""Keep what an example, an experiment or an analysis has measured, for the cards.

    OMP_NUM_THREADS=1 python model_cards/record.py run_classification
    OMP_NUM_THREADS=1 python model_cards/record.py run_qa --name run_qa_512 -- --max_seq_length 512
    python model_cards/record.py outputs/compare_blocks
    python model_cards/record.py spans/spans.json --name spans_adaptive --command "hf-efficient-attn analyze spans ..."

The first two run an example, with the options behind `--`, and write `examples/run_classification.json` beside this
file: the command, the machine, processor seconds, metrics, and samples where the example leaves some. The results.json
that an experiment, or sparsify_llama.py, has left in a folder has its command and machine, and is kept as it is. The
last keeps the JSON of an analysis in few bytes: no blanks, six digits.
"""

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from hf_efficient_attn.bench.harness.report import describe_machine

DIGITS = 6
ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="an example without .py, a folder of results, or an analysis's JSON")
    parser.add_argument("--name", help="of the results; default: that of the example or the folder")
    parser.add_argument("--note", default="", help="a sentence about the machine: what else ran on it")
    parser.add_argument("--command", help="of an analysis: what wrote its JSON")
    parser.add_argument("--to", type=Path, default=ROOT / "model_cards" / "examples", help="folder of what is kept")
    words, options = sys.argv[1:], []
    if "--" in words:
        words, options = words[: words.index("--")], words[words.index("--") + 1 :]
    args = parser.parse_args(words)
    name, left = args.name or args.source.name, args.source / "results.json"
    if args.source.is_file():
        if not (args.name and args.command):
            parser.error("an analysis needs --name and --command")
        found = {"command": args.command, **json.loads(args.source.read_text(encoding="utf-8"))}
        text = json.dumps(shortened(found), separators=(",", ":"), ensure_ascii=False)
    else:
        is_left = left.exists()
        found = json.loads(left.read_text(encoding="utf-8")) if is_left else run(args.source.name, name, options)
        text = json.dumps(found | {"note": args.note}, indent=2, ensure_ascii=False)
    (args.to / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def run(example: str, name: str, options: list[str]) -> dict[str, Any]:
    """Return what an example measures that leaves its model and its metrics in `outputs/NAME`."""
    script, folder = ROOT / "examples" / f"{example}.py", Path("outputs") / name
    subprocess.run([sys.executable, script, *options, "--output_dir", folder], check=True)
    used, samples = resource.getrusage(resource.RUSAGE_CHILDREN), folder / "samples.jsonl"
    written = samples.read_text(encoding="utf-8").splitlines() if samples.exists() else []
    return {
        "command": " ".join([f"python examples/{example}.py", *options]),
        "machine": describe_machine(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 1),
        "metrics": json.loads((folder / "all_results.json").read_text(encoding="utf-8")),
        "samples": [json.loads(line) for line in written],
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
