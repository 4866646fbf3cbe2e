"""Train an encoder to classify documents of thousands of tokens.

    pip install ".[train]"
    python examples/run_classification.py

trains a small sparse encoder from random weights to tell spam from other mails (20 MB, fetched once), up to 4,096
tokens of each, in three minutes on two cores. Expect an accuracy near 0.98; "never spam" has 0.76. The model is left in
`outputs/run_classification`. With a checkpoint made long, and rows of your own in JSON or CSV:

    hf-efficient-attn convert roberta-base long_roberta --max-position-embeddings 4096
    python examples/run_classification.py --model_name_or_path long_roberta --train_file my.jsonl --label_column topic
    torchrun --nproc_per_node 8 examples/run_classification.py --model_name_or_path long_roberta --dataset_name imdb
"""

from dataclasses import dataclass
from pathlib import Path

import evaluate
from datasets import ClassLabel, DatasetDict, Value, load_dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    EvalPrediction,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.hf_argparser import HfArg, HfArgumentParser

import hf_efficient_attn as hea
from hf_efficient_attn.patterns import Band


@dataclass
class Arguments:
    """What is trained on what."""

    model_name_or_path: str | None = HfArg(default=None, help="Checkpoint. Default: a small model, random weights.")
    dataset_name: str | None = HfArg(default=None, help="Dataset of the Hub. Default: mails, ham or spam.")
    dataset_config_name: str | None = HfArg(default=None, help="Configuration of that dataset.")
    train_file: str | None = HfArg(default=None, help="A .json, .jsonl or .csv file instead.")
    validation_file: str | None = HfArg(default=None, help="Its like, to evaluate on. Default: a tenth of the rows.")
    text_column: str = HfArg(default="text", help="Column of the document.")
    label_column: str = HfArg(default="label", help="Column of its class, a word or a number.")
    max_seq_length: int = HfArg(default=4096, help="Tokens that are read of a document.")
    max_train_samples: int | None = HfArg(default=None, help="Train on at most so many rows.")
    max_eval_samples: int | None = HfArg(default=None, help="Evaluate on at most so many rows.")
    resume: bool = HfArg(default=False, help="Go on from the last complete checkpoint.")


def main() -> None:
    parser = HfArgumentParser((Arguments, TrainingArguments))
    parser.set_defaults(output_dir="outputs/run_classification", num_train_epochs=3, learning_rate=2e-3)
    parser.set_defaults(per_device_train_batch_size=16, train_sampling_strategy="group_by_length", report_to="none")
    parser.set_defaults(warmup_steps=0.1, eval_strategy="epoch", save_strategy="epoch")
    args, training = parser.parse_args_into_dataclasses()
    set_seed(training.seed)

    data = load_data(args, training.seed)
    model, tokenizer = load_model(args, data)

    def tokenize(rows: dict[str, list]) -> dict[str, list]:
        inputs = tokenizer(rows[args.text_column], truncation=True, max_length=args.max_seq_length)
        return {**inputs, "labels": rows[args.label_column]}

    with training.main_process_first():
        data = data.map(tokenize, batched=True, remove_columns=data["train"].column_names)
    scores = evaluate.load(str(Path(__file__).parent / "metrics" / "classification_scores"))

    def compute_metrics(output: EvalPrediction) -> dict[str, float]:
        return scores.compute(predictions=output.predictions.argmax(-1), references=output.label_ids)

    trainer = Trainer(
        model,
        training,
        train_dataset=data["train"],
        eval_dataset=data["validation"],
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=compute_metrics,
    )
    last = hea.last_complete_checkpoint(training.output_dir) if args.resume else None
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint or last)
    trainer.save_model()
    trainer.log_metrics("eval", metrics := trainer.evaluate())
    trainer.save_metrics("eval", metrics)
    if training.push_to_hub:
        trainer.push_to_hub()


def load_data(args: Arguments, seed: int) -> DatasetDict:
    """Return `train` and `validation`, whose labels are numbers of named classes."""
    if args.dataset_name:
        data = load_dataset(args.dataset_name, args.dataset_config_name)
    elif args.train_file:
        files = {"train": args.train_file} | ({"validation": args.validation_file} if args.validation_file else {})
        data = load_dataset("csv" if args.train_file.endswith(".csv") else "json", data_files=files)
    else:
        from example_data import mails

        data = mails()
    label, columns = args.label_column, data["train"].features
    if without := [name for name in (args.text_column, label) if name not in columns]:
        raise SystemExit(f"No column is called {' or '.join(without)}; the data has {', '.join(columns)}.")
    if not isinstance(columns[label], ClassLabel):
        data = data.cast_column(label, Value("string"))
        data = data.cast_column(label, ClassLabel(names=sorted(set(data["train"][label]))))
    if "validation" not in data:
        parts = {} if "test" in data else data["train"].train_test_split(0.1, seed=seed, stratify_by_column=label)
        data = DatasetDict(train=parts.get("train", data["train"]), validation=(parts or data)["test"])
    limits = {"train": args.max_train_samples, "validation": args.max_eval_samples}
    data = DatasetDict({split: data[split].shuffle(seed).take(limits[split] or len(data[split])) for split in limits})
    for split, rows in data.items():
        if len(set(rows[label])) < 2:
            raise SystemExit(f"All {len(rows)} {split} rows are of one class: more rows or classes are needed.")
    return data


def load_model(args: Arguments, data: DatasetDict) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the checkpoint, or a new model and a tokenizer of the training documents."""
    names = data["train"].features[args.label_column].names
    classes = {"id2label": dict(enumerate(names)), "label2id": {name: number for number, name in enumerate(names)}}
    if args.model_name_or_path:
        tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
        return AutoModelForSequenceClassification.from_pretrained(args.model_name_or_path, **classes), tokenizer
    from example_data import new_tokenizer

    tokenizer = new_tokenizer(data["train"][args.text_column], vocab_size=4096)
    config = hea.SparseTransformerConfig(
        attention_pattern=Band(left=64, right=64),
        global_tokens="first",
        max_position_embeddings=args.max_seq_length,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        norm_position="pre",
        position_embedding_type="rope",
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        **classes,
    )
    return AutoModelForSequenceClassification.from_config(config), tokenizer


if __name__ == "__main__":
    main()
