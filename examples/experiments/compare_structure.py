r"""Compare what ETC's structure and its pre-training are worth on pages of sections.

    pip install ".[train]"
    python examples/experiments/compare_structure.py

takes manual pages of Linux (2 MB, by apt-get, kept), whose sections lose their titles and are put in random order: a
model is to say which of twelve titles each had. Four encoders of equal shape read the same pages, with the same
tokenizer, in equally many steps: first with words masked (pre-training), then with the question, which is asked at the
first token of a section. `etc` has a global token for each section; `etc_cpc` has, too, and in pre-training also tells
masked sections apart (contrastive predictive coding); `etc_chunks` has one for every 32 tokens instead, wherever these
lie; `longformer` marks as many tokens of the text as global. `outputs/compare_structure` then holds a folder for each,
which `AutoModelForTokenClassification` loads, results.json, results.md and named.png. After Ctrl-C the same command
with `--resume` goes on with the model it was at. Takes twenty minutes on a core that others use, too. Longer, and
without pre-training:

    python examples/experiments/compare_structure.py --pretraining_steps 2000 --max_steps 2000
    python examples/experiments/compare_structure.py --pretraining_steps 0 --kinds longformer etc_chunks etc
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comparison.named_sections import draw_named
from comparison.option_checks import known_once
from comparison.page_sections import NOT_ASKED, SectionCollator, score_titles, score_words, shuffled_pages
from comparison.run_folder import (
    open_run,
    results_table,
    run_experiment,
    save,
    save_picture,
    say_where,
    write_results,
)
from comparison.shape import Shape
from comparison.training import ClockedTrainer, share, training_arguments
from example_data import man_pages, new_tokenizer
from torch import Tensor
from transformers import AutoModelForMaskedLM, AutoModelForTokenClassification, PreTrainedTokenizerBase, set_seed
from transformers.hf_argparser import HfArg

import hf_efficient_attn as hea
from hf_efficient_attn.patterns import Band

KINDS = {
    "longformer": "Longformer, every 32nd token global",
    "etc_chunks": "ETC, a global token for 32 tokens",
    "etc": "ETC, one for each section",
    "etc_cpc": "ETC, the same, pre-trained with CPC, too",
}
CHUNK_TOKENS = 32
COLUMNS = {
    "model": ("model", "{}"),
    "parameters": ("parameters", "{:,}"),
    "named": ("named", "{:.1%}"),
    "named_of_a_title": ("mean over titles", "{:.1%}"),
    "pretraining_loss": ("loss of masked words", "{:.3f}"),
    "loss": ("training loss", "{:.3f}"),
    "pretraining_seconds": ("pre-training (s)", "{:.0f}"),
    "train_seconds": ("training (s)", "{:.0f}"),
}


@dataclass
class Arguments(Shape):
    """Which models, which texts, how long."""

    output_dir: str = HfArg(default="outputs/compare_structure", help="Folder of the run.")
    kinds: list[str] = HfArg(default_factory=lambda: list(KINDS), help=f"Models, of {', '.join(KINDS)}.")
    section_words: int = HfArg(default=60, help="Words at which sections are cut.")
    max_length: int = HfArg(default=640, help="Tokens at which pages are cut.")
    local_radius: int = HfArg(default=32, help="Tokens that a token reads on each side.")
    vocab_size: int = HfArg(default=2048, help="Tokens of the tokenizer, which is trained on the text.")
    batch_size: int = HfArg(default=8, help="Pages of a step.")
    pretraining_steps: int = HfArg(default=200, help="Steps with masked words; 0: none.")
    max_steps: int = HfArg(default=200, help="Steps with the question.")
    max_eval_samples: int = HfArg(default=90, help="Held-out pages at most.")
    max_train_samples: int | None = HfArg(default=None, help="Train on at most so many pages.")
    learning_rate: float = HfArg(default=1e-3, help="Highest rate.")
    seed: int = HfArg(default=42, help="Of weights, texts and masks.")
    resume: bool = HfArg(default=False, help="Go on with the run in --output_dir.")

    def __post_init__(self) -> None:
        self.kinds = known_once("kinds", self.kinds, KINDS)
        for name in ("batch_size", "max_steps", "max_eval_samples"):
            if getattr(self, name) < 1:
                raise SystemExit(f"--{name} {getattr(self, name)} must be at least 1.")


@dataclass(frozen=True)
class Data:
    """Pages that all models read, in one order."""

    tokenizer: PreTrainedTokenizerBase
    titles: list[str]
    pretraining: list[dict[str, Any]]
    train: list[dict[str, Any]]
    held_out: list[dict[str, Any]]


def main(args: Arguments) -> None:
    """Train every model that is not trained yet, and report."""
    data = load(args)
    folder = open_run(args, args.resume)
    for kind in args.kinds:
        config_of(args, kind, data)  # refused now, not after the first model is trained
    try:
        results = {kind: result_of(args, kind, data, folder / kind) for kind in args.kinds}
    except KeyboardInterrupt:
        raise SystemExit("\nInterrupted. The same command with --resume goes on with the model it was at.") from None
    report(args, folder, data, results)


def load(args: Arguments) -> Data:
    """Return the pages, which for pre-training have other orders than for training."""
    pages = man_pages()
    train, held_out = pages["train"], pages["validation"]
    train = train.select(range(min(len(train), args.max_train_samples or len(train))))
    titles = sorted({title for part in (train, held_out) for row in part["titles"] for title in row})
    counts = (args.pretraining_steps * args.batch_size, args.max_steps * args.batch_size)
    drawn = [
        shuffled_pages(train, titles, count, args.section_words, args.seed + number)
        for number, count in enumerate(counts)
    ]
    test = shuffled_pages(held_out, titles, min(len(held_out), args.max_eval_samples), args.section_words, args.seed)
    texts = [text for row in train["texts"] for text in row]
    return Data(new_tokenizer(texts, args.vocab_size), titles, *drawn, test)


def config_of(args: Arguments, kind: str, data: Data) -> Any:
    """Return the config of a model."""
    shared = {
        "vocab_size": len(data.tokenizer),
        "pad_token_id": data.tokenizer.pad_token_id,
        "id2label": dict(enumerate(data.titles)),
        "label2id": {title: number for number, title in enumerate(data.titles)},
        "max_position_embeddings": args.max_length,
        "norm_position": "pre",
        **args.shape(),
    }
    if kind == "longformer":
        return hea.SparseTransformerConfig(
            attention_pattern=Band(args.local_radius, args.local_radius),
            position_embedding_type="rope",
            global_projections=True,
            **shared,
        )
    return hea.EtcTransformerConfig(
        local_radius=args.local_radius,
        chunk_tokens=CHUNK_TOKENS,
        cpc_loss_weight=0.25 if kind == "etc_cpc" else 0.0,
        **shared,
    )


def read_by(kind: str, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return what a model reads of a batch: the structure of its sections, or none."""
    if kind in ("etc", "etc_cpc"):
        return dict(batch)
    plain = ("input_ids", "attention_mask", "labels")
    kept = {name: batch[name] for name in plain if name in batch}
    if kind == "longformer":
        place = kept["attention_mask"].cumsum(1) - 1
        kept["global_attention_mask"] = ((place % CHUNK_TOKENS == 0) & kept["attention_mask"].bool()).long()
    return kept


def result_of(args: Arguments, kind: str, data: Data, folder: Path) -> dict[str, Any]:
    """Return what a model reached; trained now, unless an earlier run has."""
    file = folder / "result.json"
    if file.exists():
        return json.loads(file.read_text())
    print(f"\n{KINDS[kind]}", flush=True)
    config, tokenizer = config_of(args, kind, data), data.tokenizer
    set_seed(args.seed)
    collate = SectionCollator(tokenizer, args.max_length)
    naming = AutoModelForTokenClassification.from_config(config)
    result: dict[str, Any] = {"parameters": naming.num_parameters()}
    if args.pretraining_steps:
        masking = hea.SentenceMaskingCollator(tokenizer, args.max_length, cpc_share=0.15 if kind == "etc_cpc" else 0.0)
        masked = AutoModelForMaskedLM.from_config(config)
        pretraining = train(args, masked, data.pretraining, masking, kind, folder)
        naming.model.load_state_dict(masked.model.state_dict())
        result |= {"pretraining_loss": pretraining.losses[-1][1], "pretraining_seconds": pretraining.clock.seconds}
    training = train(args, naming, data.train, collate, kind, folder)
    result |= {
        **score_titles(naming, data.held_out, lambda items: read_by(kind, collate(items))),
        "loss": training.losses[-1][1],
        "losses": training.losses,
        "train_seconds": training.clock.seconds,
    }
    text = f"Names {result['named']:.1%} of the sections of held-out manual pages, by the first token of each."
    save(naming, tokenizer, folder, "token-classification", KINDS[kind], text)
    file.write_text(json.dumps(result) + "\n")
    return result


def train(
    args: Arguments, model: Any, texts: list[dict[str, Any]], collate: Any, kind: str, folder: Path
) -> ClockedTrainer:
    """Return the trainer of a model that has read the texts once."""
    steps = len(texts) // args.batch_size
    training = training_arguments(
        folder,
        args.seed,
        max_steps=steps,
        learning_rate=args.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=share(steps, 0.1),
        weight_decay=0.01,
        per_device_train_batch_size=args.batch_size,
        logging_steps=share(steps, 0.1),
        remove_unused_columns=False,
    )
    is_contrastive = model.config.model_type == "etc_transformer" and getattr(collate, "cpc_share", 0)
    trainer = ClockedTrainer(
        model=model,
        args=training,
        train_dataset=texts,
        data_collator=lambda items: read_by(kind, collate(items)),
        callbacks=[hea.AuxiliaryLossCallback()] if is_contrastive else [],
    )
    trainer.run()
    return trainer


def report(args: Arguments, folder: Path, data: Data, results: dict[str, dict[str, Any]]) -> None:
    """Write the table and the picture, and print the table."""
    sections = sum(len(item["labels"]) for item in data.held_out)
    collate = SectionCollator(data.tokenizer, args.max_length)
    asked = int((collate(data.held_out)["labels"] != NOT_ASKED).sum())
    words = score_words(data.train, data.held_out)
    rows = [{"model": KINDS[kind], **result} for kind, result in results.items()]
    rows += [{"model": "words of a section alone (TF-IDF)", **words}]
    text = f"""{results_table(COLUMNS, rows)}

{sections:,} sections of {len(data.held_out):,} held-out manual pages, each under one of {len(data.titles)} titles; \
{asked:,} begin within {args.max_length:,} tokens, and are asked of the models. \
{args.pretraining_steps:,} steps of pre-training and
{args.max_steps:,} of training, {args.batch_size} pages each, the same for all; one seed. The loss of masked words of \
the model with CPC is of fewer words, and contains that of masked sections."""
    content = {
        "data": {
            "held_out_pages": len(data.held_out),
            "held_out_sections": sections,
            "asked_sections": asked,
            "titles": data.titles,
        },
        "pretraining_steps": args.pretraining_steps,
        "max_steps": args.max_steps,
        "batch_size": args.batch_size,
        "words": words,
        "kinds": {kind: {"name": KINDS[kind], **result} for kind, result in results.items()},
    }
    save_picture(draw_named(content), folder / "named.png")
    print(write_results(folder, "Structure and contrastive pre-training of ETC", content, text))
    say_where(folder, results, "named.png")


if __name__ == "__main__":
    run_experiment(main, Arguments, hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
