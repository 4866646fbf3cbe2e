r"""Train a star, a dense Transformer and a BiLSTM to add up marked vectors, and test them on longer sequences.

    pip install ".[train]"
    python examples/experiments/masked_summation.py

needs no network and no data: of a sequence of random vectors a few are marked, anywhere, and the networks learn to say
their sum (masked summation: Guo et al., arXiv:1902.09113). Dense attention reaches every vector in one step, an LSTM
through all those in between, a star through its relay. All read the same sequences in equally many steps, without
positions and with about equally many parameters. Tables give the error on sequences shorter and up to eight times
longer than the longest of the training, and what a sequence costs. `outputs/masked_summation` then holds the star,
which `AutoModelForSequenceClassification` loads, results.json, results.md and errors.png. More steps, or longer ones:

    python examples/experiments/masked_summation.py --max_steps 5000 --output_dir outputs/masked_summation_5000
    python examples/experiments/masked_summation.py --train_lengths 100 200 --test_lengths 100 200 400 800 1600 \
        --output_dir outputs/masked_summation_200
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comparison.marked_vectors import MarkedVectors, draw_errors, relative_error
from comparison.option_checks import known_once
from comparison.run_folder import open_run, results_table, run_experiment, save_picture, say_where, write_results
from comparison.shape import Shape
from comparison.summation_networks import DenseSummation, LSTMSummation
from comparison.training import ClockedTrainer, share, training_arguments
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, set_seed
from transformers.hf_argparser import HfArg

import hf_efficient_attn as hea
from hf_efficient_attn.bench.harness.seeds import over_seeds, spread

KINDS = ("star", "dense", "lstm")


@dataclass
class Arguments(Shape):
    """What is added up, by which networks, and how long they are trained."""

    output_dir: str = HfArg(default="outputs/masked_summation", help="Folder of the run.")
    kinds: list[str] = HfArg(default_factory=lambda: list(KINDS), help=f"Networks, of {', '.join(KINDS)}.")
    num_marked: int = HfArg(default=4, help="Marked vectors of a sequence.")
    vector_size: int = HfArg(default=4, help="Numbers of a vector, beside its mark.")
    train_lengths: list[int] = HfArg(default_factory=lambda: [16, 64], help="Shortest and longest in training.")
    test_lengths: list[int] = HfArg(default_factory=lambda: [16, 32, 64, 128, 256, 512], help="Lengths of the test.")
    test_batches: int = HfArg(default=8, help="Batches of the test at every length.")
    max_steps: int = HfArg(default=1200, help="Optimizer steps of each network.")
    batch_size: int = HfArg(default=32, help="Sequences of a step.")
    learning_rate: float = HfArg(default=2e-3, help="Highest rate of AdamW.")
    seeds: list[int] = HfArg(default_factory=lambda: [0, 1], help="Train each network once for each.")

    def __post_init__(self) -> None:
        self.kinds = known_once("kinds", self.kinds, KINDS)
        if len(self.train_lengths) != 2 or self.train_lengths[0] > self.train_lengths[1]:
            raise SystemExit("--train_lengths takes the shortest and the longest length.")
        if not 1 <= self.num_marked <= min(*self.train_lengths, *self.test_lengths):
            raise SystemExit(f"--num_marked {self.num_marked} must be from 1 to the shortest length.")

    def batches(self, lengths: tuple[int, int], seed: int) -> MarkedVectors:
        """Return sequences of these lengths."""
        return MarkedVectors(lengths, self.num_marked, self.vector_size, self.batch_size, seed)

    def network(self, kind: str) -> nn.Module:
        """Return a new network."""
        if kind == "dense":
            return DenseSummation(self.vector_size, self.hidden_size, self.num_hidden_layers, self.num_attention_heads)
        return LSTMSummation(self.vector_size, self.hidden_size) if kind == "lstm" else self.star()

    def star(self) -> nn.Module:
        """Return a new star, which reads vectors in place of embeddings of tokens."""
        config = hea.StarTransformerConfig(
            vocab_size=1,
            embedding_size=self.vector_size + 1,
            num_labels=self.vector_size,
            problem_type="regression",
            position_embedding_type="none",
            # about as torch starts the others' maps, and much more than the default for large models
            initializer_range=0.1,
            **self.shape(),
        )
        return hea.StarTransformerForSequenceClassification(config)


def main(args: Arguments) -> None:
    """Train every network from every seed, test it, and report."""
    args.network("star")  # refused now, not after the run has begun
    folder = open_run(args)
    networks = {kind: [train_and_test(args, kind, seed, folder) for seed in args.seeds] for kind in args.kinds}
    report(args, folder, {kind: joined(runs) for kind, runs in networks.items()})


def train_and_test(args: Arguments, kind: str, seed: int, folder: Path) -> dict[str, Any]:
    """Train one network, save it if it is a star, and return what it reaches at every length."""
    set_seed(seed)
    model = args.network(kind)
    trainer = SummationTrainer(args, model, seed, folder / kind)
    trainer.run()
    model.eval()
    tests = {length: args.batches((length, length), seed=1000 + length) for length in args.test_lengths}
    found = {str(length): relative_error(model, test, args.test_batches) for length, test in tests.items()}
    print(f"{kind}, seed {seed}: " + ", ".join(f"{length}: {error:.3f}" for length, (error, _) in found.items()))
    if kind == "star":
        model.save_pretrained(folder / kind)
        loaded = AutoModelForSequenceClassification.from_pretrained(folder / kind)
        batch = next(iter(tests[args.test_lengths[0]]))["inputs_embeds"]
        difference = (loaded(inputs_embeds=batch).logits - model(inputs_embeds=batch).logits).abs().max().item()
    return {
        "parameters": sum(each.numel() for each in model.parameters()),
        "train_seconds": trainer.clock.seconds,
        "num_steps": trainer.state.global_step,
        "found": found,
        "reload_difference": difference if kind == "star" else None,
    }


class SummationTrainer(ClockedTrainer):
    """`Trainer` on endless batches; the rate warms up, and then falls to 0."""

    def __init__(self, args: Arguments, model: nn.Module, seed: int, folder: Path) -> None:
        training = training_arguments(
            folder,
            seed,
            max_steps=args.max_steps,
            learning_rate=args.learning_rate,
            warmup_steps=share(args.max_steps, 0.1),
            logging_steps=share(args.max_steps, 0.1),
        )
        batches = args.batches((args.train_lengths[0], args.train_lengths[1]), seed)
        super().__init__(model=model, args=training, train_dataset=batches)

    def get_train_dataloader(self) -> DataLoader:
        return DataLoader(self.train_dataset, batch_size=None)


def joined(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the results of a network: of every length its errors, one a seed, and the median of the times."""
    lengths = list(runs[0]["found"])
    times = {length: sorted(run["found"][length][1] for run in runs)[len(runs) // 2] for length in lengths}
    return {
        "parameters": runs[0]["parameters"],
        "num_steps": runs[0]["num_steps"],
        "train_seconds": over_seeds([run["train_seconds"] for run in runs])[0],
        "errors": {length: [run["found"][length][0] for run in runs] for length in lengths},
        "milliseconds": times,
        "reload_difference": runs[-1]["reload_difference"],
    }


def report(args: Arguments, folder: Path, networks: dict[str, dict[str, Any]]) -> None:
    """Write the tables and the picture, and print the tables."""
    lengths = [str(length) for length in args.test_lengths]
    columns = {"kind": ("network", "{}"), **{length: (f"{int(length):,}", "{}") for length in lengths}}
    sizes = {"parameters": ("parameters", "{:,}"), "train_seconds": ("training (s)", "{:.0f}")}
    errors, times = [], []
    for kind, row in networks.items():
        errors.append({"kind": kind, **row, **{length: spread(row["errors"][length]) for length in lengths}})
        times.append({"kind": kind, **{length: f"{row['milliseconds'][length]:.2f}" for length in lengths}})
    shortest, longest = args.train_lengths
    text = f"""Error by length:

{results_table({**columns, **sizes}, errors)}

Milliseconds of a forward pass per sequence, in batches of {args.batch_size}:

{results_table(columns, times)}

The sum of {args.num_marked} marked vectors of {args.vector_size} numbers, uniform from 0 to 1, among as many as the \
column says;
trained on {shortest:,} to {longest:,} vectors in {args.max_steps:,} steps of {args.batch_size}. The error is the \
root of the mean squared one, over that of always
saying the expected sum, which has 1: mean ± standard deviation of {len(args.seeds)} seeds, over \
{args.test_batches * args.batch_size:,} sequences."""
    content = {"num_marked": args.num_marked, "train_lengths": args.train_lengths, "networks": networks}
    save_picture(draw_errors(content), folder / "errors.png")
    print(write_results(folder, "Masked summation", content, text))
    say_where(folder, ["star"] if "star" in networks else [], "errors.png")


if __name__ == "__main__":
    run_experiment(main, Arguments, hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
