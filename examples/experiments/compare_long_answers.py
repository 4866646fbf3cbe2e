"""Compare ways to read a long text: cut, in windows, whole with full attention, whole with sparse attention.

    pip install ".[train]"
    python examples/experiments/compare_long_answers.py

trains small encoders on one task, at equal shape, data and training time. A text is 48 entries of a dictionary in
random order, some 4,300 tokens. The question names two of them and asks which comes first; the answer is the first
sentence of that entry. The two are usually far apart, so a model that sees a part of the text cannot tell.

    first      the first 512 tokens, full attention
    windows    all of it, in windows of 512 tokens that overlap; full attention in each; the surest answer counts
    dense      all of it at once, full attention
    band       each token attends to 64 on either side
    longformer as band; tokens of the question attend to all, and all to them
    bigbird    blocks of 64: three around each, three at random, and the first and the last, global

Token type 1 marks the words of the question in the text, because such a short training does not teach a model to
compare words. Six models and two seeds take an hour and a half on one core. `outputs/compare_long_answers` then holds a
folder for each model, which `AutoModelForQuestionAnswering` loads, results.json, results.md and answers.png.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
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
from comparison.timed_training import TimedTrainer
from datasets import Dataset, DatasetDict
from example_data import new_tokenizer, order_questions
from example_data.question_answering import best_answers, squad_scores, token_f1, windows_of
from transformers import (
    AutoModelForQuestionAnswering,
    DataCollatorWithPadding,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)
from transformers.hf_argparser import HfArg

import hf_efficient_attn as hea
from hf_efficient_attn.patterns import Band
from hf_efficient_attn.pictures import new_figure

READINGS = ("first", "windows", "dense", "band", "longformer", "bigbird")
DISTANCES = {"up to 256": 256, "up to 1,024": 1024, "more": math.inf}
COLUMNS = {
    "reading": ("reads", "{}"),
    "num_steps": ("steps", "{:,.0f}"),
    "train_tokens": ("tokens trained on", "{:,.0f}"),
    "exact_match": ("exact match", "{:.1f}"),
    "f1": ("F1", "{:.1f}"),
    "lowest": ("lowest seed", "{:.1f}"),
    "highest": ("highest seed", "{:.1f}"),
    **{name: (f"F1, {name} tokens apart", "{:.1f}") for name in DISTANCES},
}


@dataclass
class Arguments(Shape):
    """The ways to read a text, the task and the training."""

    output_dir: str = HfArg(default="outputs/compare_long_answers", help="Folder of the run.")
    readings: list[str] = HfArg(default_factory=lambda: [*READINGS], help=f"Ways to read: {', '.join(READINGS)}.")
    num_entries: int = HfArg(default=48, help="Entries of the dictionary in a text.")
    num_train: int = HfArg(default=1500, help="Questions to train on.")
    num_validation: int = HfArg(default=400, help="Questions to evaluate on.")
    vocab_size: int = HfArg(default=4096, help="Tokens of the tokenizer, which is trained on the texts.")
    window_length: int = HfArg(default=512, help="Tokens in a window of `first` and `windows`.")
    doc_stride: int = HfArg(default=128, help="Tokens that neighbouring windows have in common.")
    attention_window: int = HfArg(default=128, help="`band`: tokens that a token attends to; even.")
    seeds: list[int] = HfArg(default_factory=lambda: [1, 2], help="Train each model once with each.")
    seconds_per_model: float = HfArg(default=300.0, help="Training time of each model and seed.")
    tokens_per_step: int = HfArg(default=16384, help="Tokens of a training step, about.")
    learning_rate: float = HfArg(default=2e-3, help="Highest learning rate.")
    resume: bool = HfArg(default=False, help="Continue the run in --output_dir; finished models are kept.")

    def __post_init__(self) -> None:
        if self.attention_window < 2 or self.attention_window % 2:
            raise SystemExit(f"--attention_window {self.attention_window} must be even and at least 2.")
        self.readings = known_once("readings", self.readings, READINGS)


@dataclass(frozen=True)
class Run:
    """What all models share; `windows` are the texts in parts, `texts` the same ones whole."""

    args: Arguments
    folder: Path
    tokenizer: PreTrainedTokenizerBase
    data: DatasetDict
    windows: DatasetDict
    texts: DatasetDict

    def inputs(self, reading: str, split: str) -> Dataset:
        """Return the inputs of a model that reads texts in this way."""
        if reading not in ("first", "windows"):
            return self.texts[split]
        rows, before = self.windows[split], -1
        if reading == "windows":
            return rows
        firsts = []
        for place, row in enumerate(rows["row"]):
            firsts += [place] if row != before else []
            before = row
        return rows.select(firsts)


def main(args: Arguments) -> None:
    """Train every model with every seed, and report."""
    folder = open_run(args, args.resume)
    data = order_questions(args.num_entries, {"train": args.num_train, "validation": args.num_validation})
    tokenizer = new_tokenizer(data["train"]["context"][:1000], args.vocab_size)
    windows, texts = (encode(args, data, tokenizer, length) for length in (args.window_length, 1_000_000))
    run = Run(args, folder, tokenizer, data, windows, texts)
    for reading in args.readings:
        build_model(run, reading)  # refused now, not after the first model is trained
    report(run, {reading: [train_and_score(run, reading, seed) for seed in args.seeds] for reading in args.readings})


def encode(args: Arguments, data: DatasetDict, tokenizer: PreTrainedTokenizerBase, length: int) -> DatasetDict:
    """Return the questions with their texts, in windows of `length` tokens."""
    options = {"tokenizer": tokenizer, "max_seq_length": length, "doc_stride": args.doc_stride}
    options["marks_words_of_question"] = True
    way = {"batched": True, "batch_size": 1, "with_indices": True, "remove_columns": data["train"].column_names}
    return data.map(windows_of, fn_kwargs=options, **way)


def build_model(run: Run, reading: str) -> PreTrainedModel:
    """Return a new model; the models differ only in their attention pattern."""
    side, longest = run.args.attention_window // 2, max(map(len, run.texts["train"]["input_ids"]))
    sparse = {
        "band": {"attention_pattern": Band(side, side)},
        "longformer": {"attention_pattern": Band(side, side), "global_tokens": "question"},
        "bigbird": {"attention_pattern": hea.patterns.bigbird()},
    }
    special = {name: getattr(run.tokenizer, name) for name in ("pad_token_id", "sep_token_id")}
    config = hea.SparseTransformerConfig(
        **run.args.shape(),
        **special,
        **sparse.get(reading, {}),
        vocab_size=len(run.tokenizer),
        max_position_embeddings=longest + 1,
        norm_position="pre",
        position_embedding_type="rope",
        initializer_range=0.1,
        type_vocab_size=2,
    )
    return AutoModelForQuestionAnswering.from_config(config)


def train_and_score(run: Run, reading: str, seed: int) -> dict[str, Any]:
    """Train one model and return its scores; save the model if it has the first seed."""
    args, folder = run.args, run.folder / reading
    done = folder / f"seed_{seed}.json"
    if done.exists():
        return json.loads(done.read_text())
    set_seed(seed)
    model = build_model(run, reading)
    rows = run.inputs(reading, "train")
    tokens = mean(map(len, rows["input_ids"]))
    trainer = TimedTrainer(
        model,
        rows,
        DataCollatorWithPadding(run.tokenizer),
        folder,
        args.seconds_per_model,
        f"{reading}, seed {seed}",
        seed=seed,
        learning_rate=args.learning_rate,
        per_device_train_batch_size=max(1, round(args.tokens_per_step / tokens)),
        per_device_eval_batch_size=4,
    )
    result = {"reading": reading, "seed": seed, "parameters": model.num_parameters(), **trainer.run()}
    rows = run.inputs(reading, "validation")
    logits = trainer.predict(rows).predictions
    result |= scores(run, best_answers(run.data["validation"]["context"], rows, logits, 100, False))
    if seed == args.seeds[0]:
        text = f"Which of two entries comes first: {result['exact_match']:.0f} of 100 answers are right."
        save(model, run.tokenizer, folder, "question-answering", f"{reading}, {args.seconds_per_model:g} seconds", text)
        row = torch.tensor([rows[0]["input_ids"]])
        result["reload_difference"] = reload_difference(model, folder, row, AutoModelForQuestionAnswering)
    done.parent.mkdir(exist_ok=True)
    done.write_text(json.dumps(result, indent=2) + "\n")
    return result


def scores(run: Run, answers: Sequence[str]) -> dict[str, Any]:
    """Return exact match and F1, 0 to 100, and F1 by the distance of the two entries."""
    rows, groups = run.data["validation"], {name: [] for name in DISTANCES}
    true = [each["text"] for each in rows["answers"]]
    for row, answer, right in zip(rows, answers, true, strict=True):
        between = row["context"][row["answers"]["answer_start"][0] : row["other_start"]]
        distance = len(run.tokenizer(between, add_special_tokens=False, verbose=False)["input_ids"])
        name = next(name for name, limit in DISTANCES.items() if distance <= limit)
        groups[name].append(token_f1(answer, right[0]))
    return squad_scores(list(answers), true) | {name: 100 * mean(each) for name, each in groups.items() if each}


def report(run: Run, seeds: dict[str, list[dict[str, Any]]]) -> None:
    """Write the table and the picture, and print the table."""
    lengths = run.texts["validation"].map(lambda row: {"tokens": len(row["input_ids"])})["tokens"]
    models = {reading: over_seeds(results) for reading, results in seeds.items()}
    text = f"""{results_table(COLUMNS, list(models.values()))}

{len(lengths):,} questions, scores of 0 to 100, means over {len(run.args.seeds)} seed(s). The last columns are of
questions whose two entries are so far apart. Texts have {mean(lengths):,.0f} tokens on average. Naming one of the two
entries at random gives an F1 of 52. Each model trained for {run.args.seconds_per_model:g} seconds."""
    stops = [f"{one['reading']}: {one['stopped']}" for results in seeds.values() for one in results if one["stopped"]]
    content = {"tokens_of_a_text": mean(lengths), "models": models, "seeds": seeds}
    save_picture(draw(models), run.folder / "answers.png")
    title = "Which of two entries comes first"
    print(write_results(run.folder, title, content, "\n\n".join([text, *stops])))
    say_where(run.folder, models, "answers.png")


def over_seeds(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the means over seeds, and the lowest and the highest F1."""
    numbers = {name: [result[name] for result in results if name in result] for name in COLUMNS}
    means = {name: mean(values) for name, values in numbers.items() if values and name != "reading"}
    return {"reading": results[0]["reading"], **means, "lowest": min(numbers["f1"]), "highest": max(numbers["f1"])}


def draw(models: dict[str, dict[str, Any]]) -> Any:
    """Return a figure: F1 by the distance of the two entries."""
    figure = new_figure(7, 4.5)
    panel = figure.subplots()
    for reading, result in models.items():
        points = [(name, result[name]) for name in DISTANCES if name in result]
        panel.plot(*zip(*points, strict=True), marker="o", label=reading)
    panel.set_xlabel("tokens between the two entries")
    panel.set_ylabel("F1 of the answers")
    panel.set_ylim(0, 100)
    panel.legend(fontsize="small")
    panel.set_title("Which of two entries of a long text comes first")
    return figure


if __name__ == "__main__":
    run_experiment(main, Arguments, hidden_size=64, num_hidden_layers=3, num_attention_heads=4)
