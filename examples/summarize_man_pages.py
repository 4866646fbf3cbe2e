"""Summarize long documents: a manual page of up to 8,192 tokens to its one-line name.

    pip install "hf-efficient-attn[train]"
    python examples/summarize_man_pages.py

downloads two Debian packages by apt-get (3.4 MB, kept), trains a small encoder-decoder of LED's kind (windows and a
global first token in the encoder) on whole pages, and the same model on their first 512 tokens, for equally many steps,
and compares ROUGE of what they write with that of the first words of DESCRIPTION. In `outputs/summarize_man_pages` it
leaves both models, which `AutoModelForSeq2SeqLM` loads, their tokenizer, results.json, results.md and rouge.png. Takes
about ten minutes on one core, in which models that begin with random weights learn what such a line looks like, but not
yet to read the page: they write one text for all and lose to the first words. What reading helps takes longer. More:

    python examples/summarize_man_pages.py --max_steps 5000 --config_overrides "hidden_size=256,encoder_layers=4"
    python examples/summarize_man_pages.py --train_file articles.jsonl --text_column article --summary_column highlights
    python examples/summarize_man_pages.py --dataset_name ccdv/arxiv-summarization --text_column article \\
        --summary_column abstract --max_source_length 16384 --max_target_length 256
"""

import copy
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from corpora import man_pages
from datasets import Dataset
from seq2seq.rouge_report import COLUMNS, draw_rouge_by_length, length_table, mean_rouge, rouge_by_length, verdict
from seq2seq.seq2seq_task import WritingTrainer, WritingTrainingArguments, encode_pairs, save_and_check
from shared.arguments import UsageError, parse_arguments
from shared.own_data import Column
from shared.task_data import TaskDataArguments, spread
from shared.task_run import (
    closing_words,
    open_run_folder,
    results_table,
    run_example,
    with_overrides,
    write_results,
)
from shared.task_tokenizer import special_token_ids, train_task_tokenizer
from transformers import PreTrainedTokenizerBase, set_seed

import hf_efficient_attn as hea

SMALL_SHAPE = {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4}
SMALL_SHAPE |= {"encoder_layers": 2, "decoder_layers": 2}
PICTURE = "rouge.png"
NUM_SAMPLES = 5
Pairs = list[tuple[str, str]]


@dataclass
class ModelArguments:
    """Which model."""

    config_overrides: str | None = field(
        default=None, metadata={"help": 'Fields of SparseSeq2SeqConfig.led: "hidden_size=256,encoder_layers=4".'}
    )
    vocab_size: int = field(default=4000, metadata={"help": "Tokens of the tokenizer that is trained."})
    attention_window: int = field(
        default=256, metadata={"help": "Source tokens that a source token reads around itself, even."}
    )


@dataclass
class SummaryDataArguments(TaskDataArguments):
    """Which documents. With none named, Linux manual pages."""

    text_column: str = field(default="document", metadata={"help": "Column of the documents."})
    summary_column: str = field(default="summary", metadata={"help": "Column of their summaries."})
    max_source_length: int = field(default=8192, metadata={"help": "Tokens of a document; what is longer is cut off."})
    short_source_length: int = field(default=512, metadata={"help": "Tokens that the model it is compared with reads."})
    max_target_length: int = field(default=32, metadata={"help": "Tokens of a summary; what is longer is cut off."})
    baseline_words: int = field(default=12, metadata={"help": "Words of the document taken as a summary to beat."})
    num_beams: int = field(default=4, metadata={"help": "Beams of the final summaries."})

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 4 <= self.short_source_length <= self.max_source_length:
            raise UsageError(
                f"--short_source_length {self.short_source_length} must be from 4 to --max_source_length "
                f"{self.max_source_length}."
            )


@dataclass
class SummaryTrainingArguments(WritingTrainingArguments):
    """`Seq2SeqTrainingArguments` with a short run on a small machine as defaults."""

    output_dir: str | None = "outputs/summarize_man_pages"
    max_steps: int = 600
    learning_rate: float = 2e-3
    warmup_steps: float = 0.1
    weight_decay: float = 0.01
    per_device_train_batch_size: int = 4
    per_device_eval_batch_size: int = 8
    eval_steps: float | None = 0.5


@dataclass(frozen=True)
class Run:
    """What both models of a run share."""

    model: ModelArguments
    data: SummaryDataArguments
    training: SummaryTrainingArguments
    pairs: dict[str, Pairs]
    tokenizer: PreTrainedTokenizerBase
    folder: Path

    @property
    def documents(self) -> str:
        """What is summarized, in words."""
        return self.data.source or "Linux manual pages"


def main() -> None:
    """Train on whole documents and on their starts, summarize, and report."""
    run = prepare_run(*parse_arguments((ModelArguments, SummaryDataArguments, SummaryTrainingArguments)))
    lengths = {"whole": run.data.max_source_length, "start": run.data.short_source_length}
    systems = [baseline(run), *(train_and_summarize(run, name, length) for name, length in lengths.items())]
    report(run, systems, list(lengths))


def prepare_run(model: ModelArguments, data: SummaryDataArguments, training: SummaryTrainingArguments) -> Run:
    """Check every argument, load the documents and train the tokenizer."""
    folder = open_run_folder(training)
    columns = [Column(data.text_column, "--text_column"), Column(data.summary_column, "--summary_column")]
    splits = data.load(man_pages.load, columns)
    pairs = {name: [(row[data.text_column], row[data.summary_column]) for row in rows] for name, rows in splits.items()}
    texts = (text for pair in pairs["train"] for text in pair)
    tokenizer = train_task_tokenizer(texts, model.vocab_size, data.max_source_length)
    run = Run(model, data, training, pairs, tokenizer, folder)
    build_config(run)  # refused now, not after the first model is trained
    return run


def baseline(run: Run) -> dict[str, Any]:
    """Return the summaries that take no model."""
    words = run.data.baseline_words
    return {
        "system": f"its first {words} words",
        "written": [first_words(document, words) for document, _ in run.pairs["test"]],
    }


def first_words(document: str, num_words: int) -> str:
    """Return the first words of the section DESCRIPTION or, without one, of the document.

    >>> first_words("SYNOPSIS\\nls\\n\\nDESCRIPTION\\nList information about files.", 2)
    'List information'
    """
    found = re.search(r"^DESCRIPTION\n(.+)", document, re.MULTILINE | re.DOTALL)
    return " ".join((found[1] if found else document).split()[:num_words])


def build_config(run: Run) -> hea.SparseSeq2SeqConfig:
    """Return the config of both models."""
    tokenizer = run.tokenizer
    config = hea.SparseSeq2SeqConfig.led(
        attention_window=run.model.attention_window,
        **SMALL_SHAPE,
        vocab_size=len(tokenizer),
        max_position_embeddings=run.data.max_source_length,
        max_target_position_embeddings=run.data.max_target_length + 1,
        **special_token_ids(tokenizer),
        decoder_start_token_id=tokenizer.eos_token_id,
    )
    return with_overrides(config, run.model.config_overrides)


def train_and_summarize(run: Run, name: str, max_source_length: int) -> dict[str, Any]:
    """Train a model on the first `max_source_length` tokens of the documents; return its summaries and what it took."""
    title = f"model, first {max_source_length:,} tokens"
    print(f"\n{title}", flush=True)
    rows = {
        split: encode_pairs(pairs, run.tokenizer, max_source_length, run.data.max_target_length)
        for split, pairs in run.pairs.items()
    }
    trainer = build_trainer(run, rows)
    trainer.train()
    longest = sorted(rows["train"]["length"])[-1]
    return {
        "system": title,
        "written": trainer.write(rows["test"], num_beams=run.data.num_beams),
        "parameters": trainer.model.num_parameters(),
        "train_seconds": trainer.clock.seconds,
        "longest_source_tokens": longest,
        "history": trainer.history("eval_rougeL"),
        **save_and_check(
            trainer,
            run.folder / name,
            longest_rows(rows["train"], run.training.per_device_train_batch_size),
            title=f"Summaries of {run.documents}, read up to token {max_source_length:,}",
            text="An encoder-decoder of LED's kind, trained from scratch by `examples/summarize_man_pages.py`.",
            limits="A demonstration at a small size. It gives titles to documents like those it was trained on.",
            shown=run.pairs["test"][0][0][:60],
        ),
    }


def build_trainer(run: Run, rows: dict[str, Dataset]) -> WritingTrainer:
    """Return the trainer of a freshly initialised model."""
    training = copy.copy(run.training)
    set_seed(training.seed)
    model = hea.SparseSeq2SeqForConditionalGeneration(build_config(run))
    model.generation_config.update(max_length=run.data.max_target_length, num_beams=run.data.num_beams)
    optimizer = torch.optim.AdamW(hea.optimizer_groups(model, training.weight_decay), lr=training.learning_rate)
    return WritingTrainer(
        model,
        training,
        run.tokenizer,
        lambda written, wanted: mean_rouge(written, wanted),
        train_dataset=rows["train"],
        eval_dataset=rows["validation"],
        optimizers=(optimizer, None),
    )


def longest_rows(rows: Dataset, num_rows: int) -> Dataset:
    """Return the rows with the longest sources: the batch that takes most memory."""
    order = sorted(range(len(rows)), key=rows["length"].__getitem__, reverse=True)
    return rows.select(order[:num_rows])


def report(run: Run, systems: list[dict[str, Any]], models: list[str]) -> None:
    """Write the tables and the picture, and print the closing words."""
    documents, wanted = (list(texts) for texts in zip(*run.pairs["test"], strict=True))
    lengths = [len(ids) for ids in run.tokenizer(documents, verbose=False).input_ids]
    by_length = rouge_by_length({one["system"]: one["written"] for one in systems}, wanted, lengths)
    results = [
        {**one, **mean_rouge(one["written"], wanted), "num_different": len(set(one["written"]))} for one in systems
    ]
    samples = []
    for place in spread(list(range(len(wanted))), NUM_SAMPLES):
        samples += [f"- wanted: {wanted[place]}", *(f"  - {one['system']}: {one['written'][place]}" for one in systems)]
    tables = [results_table(COLUMNS, results), length_table(by_length), *verdict(results[0], results[1:])]
    text = "\n\n".join([*tables, "From the test split:", "\n".join(samples)])
    draw_rouge_by_length(by_length, run.folder / PICTURE)
    content = {
        "data": run.documents,
        "num_documents": {name: len(pairs) for name, pairs in run.pairs.items()},
        "systems": results,
        "rougeL_by_source_tokens": by_length,
    }
    text = write_results(run.folder, f"Summaries of {run.documents}", content, text, run.training.device)
    print(closing_words(run.folder, text, models, [PICTURE]))


if __name__ == "__main__":
    sys.exit(run_example(main))
