r"""Train every mechanism of this package on ListOps of the Long Range Arena, at one size, for equally many steps.

    pip install ".[train]"
    python examples/experiments/listops.py

draws nested operations on digits by the published rules (comparison/list_operations.py) and trains a small encoder of
each mechanism to tell their value: a short version, of 50 to 200 tokens, which says what trains, and how fast, in less
than ten minutes. The task of the Arena, which takes days on two cores:

    python examples/experiments/listops.py --output_dir outputs/listops_full --min_tokens 500 --max_tokens 2000 \\
        --train_rows 96000 --test_rows 2000 --max_steps 5000 --tokens_per_step 65536 --keys 128 --seeds 0 1 2

`outputs/listops` then holds results.json, results.md and listops.png. After Ctrl-C the same command with `--resume`
goes on with the models that are missing. What the Arena published stands beside: of 2,000 tokens, 5,000 steps of 32
texts, larger models and authors' own implementations.
"""

import json
import sys
import time
from collections import Counter
from dataclasses import dataclass
from itertools import islice
from math import inf
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from comparison.list_operations import NUM_CLASSES, NUMBERS, PAD, TOKENS, expressions
from comparison.list_scores import draw_listops, results_text
from comparison.option_checks import known_once
from comparison.run_folder import open_run, run_experiment, save_picture, write_results
from comparison.shape import Shape
from comparison.timed_training import TimedTrainer
from comparison.token_batches import TokenBatches, pad_batch, token_batches
from transformers import AutoModelForSequenceClassification, set_seed
from transformers.hf_argparser import HfArg

# every mechanism, as its benchmark builds them
sys.path.append(str(Path(__file__).parents[2] / "model_cards" / "benchmarks"))

import mechanisms as cases  # noqa: E402

ENCODERS = [name for name, mechanism in cases.ALL.items() if False in mechanism.directions]
# in per cent: Tay et al., "Long Range Arena" (arXiv:2011.04006), table 1; nystrom: Xiong et al. (arXiv:2102.03902)
PUBLISHED = {
    "dense": 36.37, "band": 15.82, "bigbird": 36.05, "reformer": 37.27, "linformer": 35.70, "linear": 16.13,
    "performer": 18.01, "nystrom": 37.15,
}  # fmt: skip
# of the arguments, those that results depend on
SETTINGS = (
    *("min_tokens", "max_tokens", "keys", "max_steps", "tokens_per_step", "seeds"),
    *("num_hidden_layers", "hidden_size"),
)


@dataclass
class Arguments(Shape):
    """Which mechanisms, on how long expressions, for how many steps."""

    output_dir: str = HfArg(default="outputs/listops", help="Folder of the run.")
    resume: bool = HfArg(default=False, help="Go on with the run in --output_dir.")
    mechanisms: list[str] = HfArg(default_factory=lambda: list(ENCODERS), help=f"Of {', '.join(ENCODERS)}.")
    min_tokens: int = HfArg(default=50, help="Expressions have more tokens than these.")
    max_tokens: int = HfArg(default=200, help="Expressions have fewer tokens than these.")
    max_depth: int = HfArg(default=10, help="Depth of nested operations, digits included.")
    max_args: int = HfArg(default=10, help="Most arguments of an operation.")
    train_rows: int = HfArg(default=4000, help="Expressions to train on.")
    test_rows: int = HfArg(default=500, help="Expressions to test on.")
    keys: int = HfArg(default=32, help="Keys that a token reads, about, where that can be chosen.")
    seeds: list[int] = HfArg(default_factory=lambda: [0], help="Train every model once with each.")
    max_steps: int = HfArg(default=150, help="Steps of every model.")
    tokens_per_step: int = HfArg(default=3200, help="Tokens of a batch with padding.")
    learning_rate: float = HfArg(default=1e-3, help="Highest rate.")
    processor_time: bool = HfArg(default=False, help="Count the processor's time: for a busy machine, on one thread.")

    def __post_init__(self) -> None:
        self.mechanisms = known_once("mechanisms", self.mechanisms, ENCODERS)
        if not 1 <= self.min_tokens < self.max_tokens - 1 or min(self.train_rows, self.test_rows, self.max_steps) < 1:
            raise SystemExit("--max_tokens is at least --min_tokens + 2, and all numbers are at least 1.")


@dataclass(frozen=True)
class Rows:
    """Expressions, and what they are worth."""

    tokens: list[list[int]]
    values: list[int]

    def examples(self) -> list[dict[str, Any]]:
        """Return them as a model reads them."""
        return [{"input_ids": ids, "labels": value} for ids, value in zip(self.tokens, self.values, strict=True)]


def main(args: Arguments) -> None:
    """Train all mechanisms, and report."""
    folder = open_run(args, args.resume)
    # all of one stream: no expression of the test is drawn again for training
    drawn = expressions(0, args.min_tokens, args.max_tokens, args.max_depth, args.max_args)
    test, train = (Rows(*map(list, zip(*islice(drawn, num), strict=True))) for num in (args.test_rows, args.train_rows))
    found = {name: [kept(args, folder, name, seed, train, test) for seed in args.seeds] for name in args.mechanisms}
    report(args, folder, found, train, test)


def kept(args: Arguments, folder: Path, name: str, seed: int, train: Rows, test: Rows) -> dict[str, Any]:
    """Return what a model reached, of an earlier run if it was finished there."""
    file = folder / name / f"seed_{seed}.json"
    if not file.exists():
        result = train_and_score(args, folder / name, name, seed, train, test)
        # last: marks the model finished
        file.write_text(json.dumps(result) + "\n")
    return json.loads(file.read_text())


def build(args: Arguments, name: str) -> Any:
    """Return a new classifier; those whose mechanism knows no places learn positions."""
    shape = cases.Shape(
        args.max_tokens, 1, args.hidden_size, args.num_attention_heads, args.keys, False, "float32", "cpu",
        layers=args.num_hidden_layers,
    )  # fmt: skip
    places = {"position_embedding_type": "learned"} if name in ("reformer", "routing") else {}
    # the last bracket ends an expression, which an encoder-decoder reads its value from
    special = {"pad_token_id": PAD, "eos_token_id": NUMBERS["]"]}
    config = cases.config_of(name, shape, vocab_size=len(TOKENS), num_labels=NUM_CLASSES, **special, **places)
    return AutoModelForSequenceClassification.from_config(config)


def train_and_score(args: Arguments, folder: Path, name: str, seed: int, train: Rows, test: Rows) -> dict[str, Any]:
    """Train one model and return its accuracy and what it cost."""
    folder.mkdir(exist_ok=True)
    set_seed(seed)
    model = build(args, name)
    batches = TokenBatches(train.examples(), list(map(len, train.tokens)), args.tokens_per_step, PAD, seed)
    trainer = TimedTrainer(
        *(model, batches, folder, inf, args.max_steps, args.learning_rate, seed, f"{name}, seed {seed}"),
        now=time.process_time if args.processor_time else time.perf_counter,
    )
    result = trainer.run()
    return {
        "seed": seed,
        "parameters": model.num_parameters(),
        "accuracy": accuracy(model, test, args.tokens_per_step),
        "seconds_per_step": result["train_seconds"] / result["num_steps"],
        **{key: result[key] for key in ("num_steps", "train_tokens", "stopped", "losses")},
    }


@torch.no_grad()
def accuracy(model: Any, rows: Rows, max_tokens: int) -> float:
    """Return the share of expressions whose value is told."""
    model.eval()
    lengths, examples, right = list(map(len, rows.tokens)), rows.examples(), 0
    for indices in token_batches(sorted(range(len(lengths)), key=lengths.__getitem__), lengths, max_tokens):
        batch = pad_batch([examples[index] for index in indices], PAD)
        right += int((model(**batch).logits.argmax(-1) == batch["labels"]).sum())
    return right / len(lengths)


def report(args: Arguments, folder: Path, found: dict[str, list[dict[str, Any]]], train: Rows, test: Rows) -> None:
    """Write the table and the picture, and print the table."""
    most_frequent = Counter(train.values).most_common(1)[0][0]
    content = {
        "settings": {name: getattr(args, name) for name in SETTINGS},
        "rows": {"train": len(train.values), "test": len(test.values)},
        "most_frequent_value": test.values.count(most_frequent) / len(test.values),
        "mechanisms": {name: over_seeds(results) for name, results in found.items()},
        "published": PUBLISHED,
        # losses stay in the folders of the mechanisms
        "seeds": {
            name: [{key: each[key] for key in each if key != "losses"} for each in results]
            for name, results in found.items()
        },
    }
    save_picture(draw_listops(content), folder / "listops.png")
    print(write_results(folder, "ListOps: every mechanism at one size", content, results_text(content)))


def over_seeds(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the means over seeds, and the deviation of the accuracy; None: there is one seed."""
    means = {key: fmean(result[key] for result in results) for key in ("accuracy", "seconds_per_step")}
    spread = stdev(result["accuracy"] for result in results) if len(results) > 1 else None
    return {**means, "deviation": spread, "parameters": results[0]["parameters"]}


if __name__ == "__main__":
    run_experiment(main, Arguments, hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
