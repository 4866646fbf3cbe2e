r"""Train Reformers to copy symbols with full attention and with few hashes, and evaluate them with more.

    pip install ".[train]"
    python examples/experiments/copy_task.py

needs no network and no data: a text is 0w0w, and the model learns to say the second w, whose symbols it can only find
where the first one stands (Kitaev et al., arXiv:2001.04451, section 5 and table 2). Each network has one layer, reads
equal texts in equal steps, and starts from equal weights; one has full attention, the others hash with one, two and
four rounds. Every one is then evaluated with full attention and with one to eight rounds: the table gives the share of
the symbols that are copied. `outputs/copy_task` then holds a folder for each network, which `AutoModelForCausalLM`
loads, results.json, results.md and accuracy.png. Several seeds, longer words as in the paper, and two networks alone:

    python examples/experiments/copy_task.py --seeds 0 1 2 --output_dir outputs/copy_task_seeds
    python examples/experiments/copy_task.py --word_length 511 --num_symbols 127 --hidden_size 256 \
        --intermediate_size 256 --num_attention_heads 4 --chunk_length 64 --max_steps 150000
    python examples/experiments/copy_task.py --train_hashes 0 8 --output_dir outputs/copy_task_8
"""

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from comparison.copied_symbols import FULL, CopiedWords, copied_share, draw_copies, reading, reading_name
from comparison.run_folder import (
    open_run,
    reload_difference,
    results_table,
    run_experiment,
    save_picture,
    say_where,
    write_results,
)
from comparison.training import ClockedTrainer, share, training_arguments
from transformers import set_seed
from transformers.hf_argparser import HfArg

import hf_efficient_attn as hea
from hf_efficient_attn.bench.harness.seeds import spread


@dataclass
class Arguments:
    """How long the words are, how large the networks, and with what they are trained and evaluated."""

    output_dir: str = HfArg(default="outputs/copy_task", help="Folder of the run.")
    train_hashes: list[int] = HfArg(
        default_factory=lambda: [FULL, 4, 2, 1], help="Train a network with each number of rounds; 0: full attention."
    )
    eval_hashes: list[int] = HfArg(default_factory=lambda: [FULL, 8, 4, 2, 1], help="Evaluate each with these.")
    word_length: int = HfArg(default=63, help="Symbols of w; a text has twice as many, and two zeros.")
    num_symbols: int = HfArg(default=31, help="Different symbols.")
    hidden_size: int = HfArg(default=64, help="Width.")
    intermediate_size: int = HfArg(default=128, help="Width of the MLP.")
    num_attention_heads: int = HfArg(default=2, help="Heads.")
    chunk_length: int = HfArg(default=4, help="Tokens of a chunk of the sorted text.")
    max_steps: int = HfArg(default=300, help="Optimizer steps of each network.")
    batch_size: int = HfArg(default=16, help="Texts of a step.")
    learning_rate: float = HfArg(default=3e-3, help="Highest rate of AdamW.")
    max_test_samples: int = HfArg(default=256, help="Texts of the evaluation.")
    seeds: list[int] = HfArg(
        default_factory=lambda: [42], help="Of weights, hashes and texts; train each network once for each."
    )

    def __post_init__(self) -> None:
        self.train_hashes, self.eval_hashes = (list(dict.fromkeys(x)) for x in (self.train_hashes, self.eval_hashes))
        for name in ("train_hashes", "eval_hashes"):
            if min(getattr(self, name), default=-1) < 0:
                raise SystemExit(f"--{name} needs numbers of rounds, or 0 for full attention.")
        for name in ("word_length", "num_symbols", "max_steps", "batch_size", "max_test_samples"):
            if getattr(self, name) < 1:
                raise SystemExit(f"--{name} {getattr(self, name)} must be at least 1.")

    def config(self) -> hea.EfficientReformerConfig:
        """Return the config of all networks; what they read is set on top."""
        tokens = 2 * (self.word_length + 1)
        return hea.EfficientReformerConfig.copy_task(
            vocab_size=self.num_symbols + 1,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_attention_heads=self.num_attention_heads,
            lsh_attn_chunk_length=self.chunk_length,
            # half a chunk falls into a bucket, whatever is read
            num_buckets=2 * -(-tokens // self.chunk_length),
            max_position_embeddings=tokens,
            position_embedding_type="learned",
            pad_token_id=None,
            eos_token_id=None,
        )


def main(args: Arguments) -> None:
    """Train every network, evaluate it in every way, and report."""
    args.config()  # refused now, not after the run has begun
    folder = open_run(args)
    rows = [
        joined([train_and_evaluate(args, hashes, seed, folder) for seed in args.seeds]) for hashes in args.train_hashes
    ]
    report(args, folder, rows)


def train_and_evaluate(args: Arguments, hashes: int, seed: int, folder: Path) -> dict[str, Any]:
    """Train one network from one seed, save it, and return what it copies."""
    name = reading_name(hashes)
    print(f"\n{name}, seed {seed}", flush=True)
    train = CopiedWords(args.max_steps * args.batch_size, args.word_length, args.num_symbols, seed)
    test = CopiedWords(args.max_test_samples, args.word_length, args.num_symbols, seed + 1)
    set_seed(seed)
    model = hea.EfficientReformerForCausalLM(args.config())
    with reading(model, hashes, test.num_tokens):
        trainer = train_network(args, model, train, seed, folder / name)
        model.save_pretrained(folder / name)
        difference = reload_difference(model, folder / name, test.input_ids[:2])
    copied = {}
    for count in args.eval_hashes:
        with reading(model, count, test.num_tokens):
            copied[reading_name(count)] = copied_share(model, test, args.batch_size)
    print(", ".join(f"{reader}: {part:.1%}" for reader, part in copied.items()), flush=True)
    return {
        "trained": name,
        "copied": copied,
        "parameters": model.num_parameters(),
        "num_steps": trainer.state.global_step,
        "train_seconds": trainer.clock.seconds,
        "reload_difference": difference,
        "losses": trainer.losses,
    }


def train_network(
    args: Arguments, model: hea.EfficientReformerForCausalLM, train: CopiedWords, seed: int, folder: Path
) -> ClockedTrainer:
    """Train a network on all texts once."""
    training = training_arguments(
        folder,
        seed,
        max_steps=args.max_steps,
        learning_rate=args.learning_rate,
        per_device_train_batch_size=args.batch_size,
        warmup_steps=share(args.max_steps, 0.1),
        logging_steps=share(args.max_steps, 0.02),
        # equal texts in equal order for all
        train_sampling_strategy="sequential",
    )
    trainer = ClockedTrainer(model=model, args=training, train_dataset=train)
    trainer.run()
    return trainer


def joined(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the row of a network: of every reading the shares copied, one a seed, and the losses of the first."""
    copied = {reader: [run["copied"][reader] for run in runs] for reader in runs[0]["copied"]}
    return runs[0] | {"copied": copied, "train_seconds": fmean(run["train_seconds"] for run in runs)}


def report(args: Arguments, folder: Path, rows: list[dict[str, Any]]) -> None:
    """Write the table and the picture, and print the table."""
    columns = {"trained": ("trained with", "{}"), **{reader: (reader, "{}") for reader in rows[0]["copied"]}}
    columns |= {"num_steps": ("steps", "{:,}"), "train_seconds": ("training (s)", "{:.0f}")}
    lines = [row | {reader: spread(shares, ".1%") for reader, shares in row["copied"].items()} for row in rows]
    guessed = 1 / args.num_symbols
    text = f"""{results_table(columns, lines)}

The share of the {args.word_length:,} symbols of the second w that the most probable symbol is right for, over
{args.max_test_samples:,} texts that were not trained on; a guess has {guessed:.1%}. Rows are networks, by what they \
were trained with;
columns are what they are evaluated with. {len(args.seeds)} seed(s): mean ± standard deviation."""
    save_picture(draw_copies(rows), folder / "accuracy.png")
    content = {"tokens": 2 * (args.word_length + 1), "guessed": guessed, "seeds": args.seeds, "rows": rows}
    print(write_results(folder, "Copying symbols by full attention and by hashes", content, text))
    say_where(folder, [row["trained"] for row in rows], "accuracy.png")


if __name__ == "__main__":
    run_experiment(main, Arguments)
