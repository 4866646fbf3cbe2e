r"""Train language models of long texts whose heads read their neighbours, or partly their cluster, at equal cost.

    pip install ".[train]"
    python examples/experiments/compare_routing.py

trains two networks on the documentation of Python (13 MB, by apt-get, kept), 8,192 tokens at once. In `local` every
head reads as many tokens back; in `routing` half of the heads instead read as many earlier tokens of their cluster,
however far away, which online k-means finds (the Routing Transformer, Roy et al., arXiv:2003.05997). So both compute
equally many scores; text, steps and all other settings are equal, too. A table compares bits per token of held-out
text, of all tokens and of those that have much text before them, and the time. `outputs/compare_routing` then holds
`local` and `routing`, which `AutoModelForCausalLM` and `pipeline` load, results.json, results.md and loss_curves.png.
More: only the last layers route, as the authors' for books, and full attention for comparison, which costs much more:

    python examples/experiments/compare_routing.py --layers_with_routing 2 3 --output_dir outputs/last_layers
    python examples/experiments/compare_routing.py --kinds full --output_dir outputs/compare_routing_full
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from comparison.loss_curves import draw_loss_curves
from comparison.losses_by_place import late, losses_by_place
from comparison.option_checks import known_once
from comparison.run_folder import (
    open_run,
    reload_difference,
    results_table,
    run_experiment,
    save,
    save_picture,
    say_where,
    write_results,
)
from comparison.shape import Shape
from comparison.span_curves import add_equal_time
from comparison.token_blocks import TokenBlocks, cut, train_tokenizer
from comparison.training import BitsPerByteTrainer, share, training_arguments
from datasets import Dataset
from example_data import python_documentation
from transformers import set_seed
from transformers.hf_argparser import HfArg

import hf_efficient_attn as hea
from hf_efficient_attn.patterns import Band

KINDS = ("local", "routing", "full")
COLUMNS = {
    "kind": ("heads", "{}"),
    "parameters": ("parameters", "{:,}"),
    "scores_per_token": ("scores per token and head, at most", "{:,}"),
    "bits_per_token": ("bits per token", "{:.3f}"),
    "bits_per_late_token": ("second half of a block", "{:.3f}"),
    "bits_per_byte": ("bits per byte", "{:.3f}"),
    "bits_per_byte_at_equal_time": ("bits per byte, equal time", "{:.3f}"),
    "train_seconds": ("training (s)", "{:.0f}"),
    "train_tokens_per_second": ("trained tokens/s", "{:,.0f}"),
}


@dataclass
class Arguments(Shape):
    """How much every head reads, in which network, trained on what for how long."""

    output_dir: str = HfArg(default="outputs/compare_routing", help="Folder of the run.")
    kinds: list[str] = HfArg(default_factory=lambda: ["local", "routing"], help=f"Networks, of {', '.join(KINDS)}.")
    keys_per_token: int = HfArg(default=128, help="Tokens that a token reads in a head, itself among them.")
    num_clusters: int = HfArg(default=16, help="Clusters of a routing head.")
    layers_with_routing: list[int] | None = HfArg(default=None, help="Layers that route. Default: all.")
    block_size: int = HfArg(default=8192, help="Tokens of a text.")
    vocab_size: int = HfArg(default=2048, help="Tokens of the tokenizer, which is trained on the text.")
    max_train_samples: int | None = HfArg(default=None, help="Train on at most so many files of the documentation.")
    max_eval_blocks: int = HfArg(default=8, help="Blocks of held-out text.")
    max_steps: int = HfArg(default=300, help="Optimizer steps of each network, of one block each.")
    learning_rate: float = HfArg(default=2e-3, help="Highest rate of AdamW.")
    seed: int = HfArg(default=42, help="Of weights, centroids and the order of the blocks.")

    def __post_init__(self) -> None:
        self.kinds = known_once("kinds", self.kinds, KINDS)
        if not 1 <= self.keys_per_token <= self.block_size:
            raise SystemExit(f"--keys_per_token {self.keys_per_token} must be from 1 to --block_size.")

    def config(self, kind: str, num_tokens: int) -> hea.RoutingTransformerConfig:
        """Return the config of one network; they differ in what heads read alone."""
        return hea.RoutingTransformerConfig(
            layers_with_routing=self.layers_with_routing if kind == "routing" else [],
            num_clusters=self.num_clusters,
            cluster_tokens=self.keys_per_token,
            attention_pattern=None if kind == "full" else Band(self.keys_per_token - 1, 0),
            vocab_size=num_tokens,
            max_position_embeddings=self.block_size,
            position_embedding_type="rope",
            norm_position="pre",
            # the default of 0.999 remembers the random start for a thousand steps
            centroid_decay=0.99,
            **self.shape(),
        )

    def scores_per_token(self, kind: str) -> int:
        """Return how many tokens a token reads in a head, at most."""
        return self.block_size if kind == "full" else self.keys_per_token


def main(args: Arguments) -> None:
    """Train every network, and report."""
    for kind in args.kinds:
        args.config(kind, args.vocab_size)  # refused now, not after the first model is trained
    data = load_blocks(args)
    folder = open_run(args)
    print(f"{len(data.train):,} blocks to train on, {len(data.validation):,} held out.", flush=True)
    report(args, folder, data, {kind: train(args, kind, data, folder / kind) for kind in args.kinds})


def load_blocks(args: Arguments) -> TokenBlocks:
    """Return the documentation of Python in blocks, and its tokenizer."""
    pages = python_documentation()
    train, held_out = list(pages["train"]["text"])[: args.max_train_samples], list(pages["validation"]["text"])
    tokenizer = train_tokenizer(train, args.vocab_size, args.block_size)
    parts = [cut(texts, tokenizer, args.block_size) for texts in (train, held_out)]
    if not all(parts):
        raise SystemExit(f"--block_size {args.block_size}: the text has fewer tokens than one block.")
    parts[1] = parts[1][: args.max_eval_blocks]
    return TokenBlocks(tokenizer, *(Dataset.from_dict({"input_ids": blocks, "labels": blocks}) for blocks in parts))


def train(args: Arguments, kind: str, data: TokenBlocks, folder: Path) -> dict[str, Any]:
    """Train and test one network, save it, and return the result."""
    print(f"\n{kind}", flush=True)
    trainer = build_trainer(args, kind, data, folder)
    trainer.run()
    model, seconds = trainer.model, trainer.clock.seconds
    tokens = args.max_steps * args.block_size
    bits = losses_by_place(model, data.validation["input_ids"]) / math.log(2)
    result = {
        "parameters": model.num_parameters(),
        "scores_per_token": args.scores_per_token(kind),
        "num_steps": trainer.state.global_step,
        "train_tokens": tokens,
        "train_seconds": seconds,
        "train_tokens_per_second": tokens / seconds,
        "bits_per_token": bits.mean().item(),
        "bits_per_late_token": late(bits, 0.5).mean().item(),
        "bits_per_byte": bits.mean().item() * math.log(2) * data.bits_per_byte_of_one_nat,
        "history": trainer.history("loss", "eval_loss", "eval_bits_per_byte"),
    }
    text = f"Trained on {tokens:,} tokens: {result['bits_per_token']:.3f} bits per token of held-out documentation."
    save(model, data.tokenizer, folder, "text-generation", f"A language model, {kind} attention", text)
    # more than a head reads
    input_ids = torch.tensor([data.validation[0]["input_ids"][: 2 * args.keys_per_token]])
    return {**result, "reload_difference": reload_difference(model, folder, input_ids)}


def build_trainer(args: Arguments, kind: str, data: TokenBlocks, folder: Path) -> BitsPerByteTrainer:
    """Return the trainer of a new network; all read the same blocks in the same order."""
    training = training_arguments(
        folder,
        args.seed,
        max_steps=args.max_steps,
        learning_rate=args.learning_rate,
        weight_decay=0.01,
        per_device_train_batch_size=1,
        per_device_eval_batch_size=1,
        warmup_steps=share(args.max_steps, 0.1),
        eval_strategy="steps",
        eval_steps=share(args.max_steps, 0.1),
        logging_steps=share(args.max_steps, 0.025),
        prediction_loss_only=True,
    )
    set_seed(args.seed)
    model = hea.RoutingTransformerForCausalLM(args.config(kind, len(data.tokenizer)))
    groups = hea.optimizer_groups(model, training.weight_decay)
    return BitsPerByteTrainer(
        model=model,
        args=training,
        train_dataset=data.train,
        eval_dataset=data.validation,
        optimizers=(torch.optim.AdamW(groups, lr=args.learning_rate), None),
        bits_per_byte_of_one_nat=data.bits_per_byte_of_one_nat,
    )


def report(args: Arguments, folder: Path, data: TokenBlocks, kinds: dict[str, dict[str, Any]]) -> None:
    """Write the table and the picture, and print the table."""
    seconds = add_equal_time(kinds)
    sizes = {"train_blocks": len(data.train), "held_out_blocks": len(data.validation), "block_size": args.block_size}
    text = f"""{results_table(COLUMNS, [{"kind": kind, **result} for kind, result in kinds.items()])}

Python's documentation in blocks of {args.block_size:,} tokens: {args.max_steps:,} steps of one of \
{sizes["train_blocks"]:,} blocks, {sizes["held_out_blocks"]:,} held out, equal for all.
The second half of a block has the most text before it. Equal time: bits per byte of the held-out text when the
fastest network had finished, after {seconds:.0f} s of training. A score is a token that a head may read; what finding
clusters costs is in the seconds alone."""
    histories = {kind: result["history"] for kind, result in kinds.items()}
    save_picture(draw_loss_curves(histories, data.bits_per_byte_of_one_nat), folder / "loss_curves.png")
    content = {"data": sizes, "kinds": kinds}
    print(write_results(folder, "Routing and local attention at equal cost", content, text))
    say_where(folder, kinds, "loss_curves.png")


if __name__ == "__main__":
    run_experiment(main, Arguments, hidden_size=128, num_hidden_layers=4, num_attention_heads=4)
