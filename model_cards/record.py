"""Keep what an example has measured, for the cards: `python model_cards/record.py outputs/run_summarization`.

Writes `model_cards/examples/run_summarization.json`: the run's metrics, its samples and the machine, which must be the
one that this runs on.
"""

import argparse
import json
from pathlib import Path

import torch

from hf_efficient_attn.bench.harness.report import describe_machine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the run's --output_dir, with the name of the example")
    parser.add_argument("--options", default="", help="what the run was started with")
    parser.add_argument("--note", default="", help="a sentence about the machine: what else ran on it")
    args = parser.parse_args()
    name = args.folder.name
    samples = (args.folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    found = {
        "command": f"python examples/{name}.py {args.options}".strip(),
        "machine": describe_machine(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        "note": args.note,
        "metrics": json.loads((args.folder / "all_results.json").read_text(encoding="utf-8")),
        "samples": [json.loads(line) for line in samples],
    }
    file = Path(__file__).parent / "examples" / f"{name}.json"
    file.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
