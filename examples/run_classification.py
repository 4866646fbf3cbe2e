"""Train an encoder to classify documents of thousands of tokens.

    pip install ".[train]"
    python examples/run_classification.py

trains a small sparse encoder from random weights to tell spam from other mails (20 MB, fetched once), up to 4,096
tokens of each, in 5 minutes of one core. Expect an accuracy near 0.99; "never spam" has 0.76. With a checkpoint
made long, and rows of your own in JSON or CSV:

    hf-efficient-attn convert roberta-base long_roberta --max-position-embeddings 4096
    python examples/run_classification.py --model_name_or_path long_roberta --train_file my.jsonl --label_column topic
    torchrun --nproc_per_node 8 examples/run_classification.py --model_name_or_path long_roberta --dataset_name imdb
"""

from collections import Counter
from dataclasses import dataclass

import torch
from datasets import ClassLabel, DatasetDict, Value, load_dataset
from sklearn.metrics import accuracy_score, f1_score
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding, set_seed
from transformers.hf_argparser import HfArg, HfArgumentParser
from transformers.trainer import Trainer
from transformers.training_args import TrainingArguments

import hf_efficient_attn as hea
from hf_efficient_attn.patterns import Band
from hf_efficient_attn.training import last_complete_checkpoint, script_inputs


@dataclass
class Arguments:
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


@script_inputs.refusals_as_sentences()
def main() -> None:
    parser = HfArgumentParser((Arguments, TrainingArguments))
    parser.set_defaults(output_dir="outputs/run_classification", do_train=True, do_eval=True, save_strategy="epoch")
    parser.set_defaults(per_device_train_batch_size=16, train_sampling_strategy="group_by_length", report_to="none")
    parser.set_defaults(num_train_epochs=3, learning_rate=2e-3, warmup_steps=0.1)
    parser.set_defaults(use_cpu=not torch.accelerator.is_available())
    args, training = parser.parse_args_into_dataclasses()
    script_inputs.check_arguments(args)
    if training.do_predict:
        raise SystemExit("--do_predict: nothing is predicted here; --do_eval evaluates on the rows for validation.")
    set_seed(training.seed)
    data = load_data(args, training.seed)
    model, tokenizer = load_model(args, data)

    def tokenize(rows: dict[str, list]) -> dict[str, list]:
        inputs = tokenizer(rows[args.text_column], truncation=True, max_length=args.max_seq_length)
        return {**inputs, "labels": rows[args.label_column]}

    with training.main_process_first():
        data = data.map(tokenize, batched=True, remove_columns=data["train"].column_names)
    script_inputs.check_lengths(data, model, tokenizer)

    def compute_metrics(output: tuple) -> dict[str, float]:
        predicted, true = output[0].argmax(-1), output[1]
        return {"accuracy": accuracy_score(true, predicted), "f1_macro": f1_score(true, predicted, average="macro")}

    trainer = Trainer(model, training, DataCollatorWithPadding(tokenizer), *data.values(), tokenizer)
    trainer.compute_metrics = compute_metrics
    if training.do_train:
        resume = training.resume_from_checkpoint or args.resume and last_complete_checkpoint(training.output_dir)
        trainer.save_metrics("train", trainer.train(resume).metrics)
        trainer.save_model()
    if training.do_eval:
        most, labels = Counter(data["train"]["labels"]).most_common(1)[0][0], data["validation"]["labels"][:]
        metrics = trainer.evaluate() | {"accuracy_of_most_frequent": labels.count(most) / len(labels)}
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)


def load_data(args: Arguments, seed: int) -> DatasetDict:
    """Return `train` and `validation`, whose labels are numbers of named classes."""
    if args.dataset_name:
        data = load_dataset(args.dataset_name, args.dataset_config_name)
    elif args.train_file:
        data = script_inputs.load_files(args, ".json", ".jsonl", ".csv")
    else:
        from example_data import mails

        data = mails()
    text, label, columns = args.text_column, args.label_column, data["train"].features
    script_inputs.check_columns(args, columns, "text_column", "label_column")
    parts = {"train": "train", "validation": "validation" if "validation" in data else "test"}
    data = DatasetDict({part: data[split] for part, split in parts.items() if split in data})
    script_inputs.check_texts(data, text, label)
    if "string" not in getattr(columns[text], "dtype", "") or not isinstance(columns[label], Value | ClassLabel):
        raise SystemExit(f"{text} must hold strings, not {columns[text]}, and {label} a class, not {columns[label]}.")
    if not isinstance(columns[label], ClassLabel):
        data = data.cast_column(label, Value("string"))
        names = sorted(set(data["train"][label]))
        if strange := {name for rows in data.values() for name in rows[label]}.difference(names):
            raise SystemExit(f"No train row, but a validation row is of class {', '.join(sorted(strange))}.")
        data = data.cast_column(label, ClassLabel(names=names))
    return split_data(args, data, seed)


def split_data(args: Arguments, data: DatasetDict, seed: int) -> DatasetDict:
    """Return as many rows as are asked for; those for validation are a tenth of each class, if there are no others."""
    if "validation" not in data:
        names, sizes = data["train"].features[args.label_column].names, Counter(data["train"][args.label_column])
        if rare := [names[number] for number, size in sizes.items() if size == 1]:
            raise SystemExit(f"Class {', '.join(rare)} has a single row: more rows or a --validation_file are needed.")
        options = {"test_size": max(len(data["train"]) // 10, len(sizes)), "stratify_by_column": args.label_column}
        data["train"], data["validation"] = data["train"].train_test_split(seed=seed, **options).values()
    for split, limit in {"train": args.max_train_samples, "validation": args.max_eval_samples}.items():
        data[split] = data[split].shuffle(seed).select(range(len(data[split]))[:limit])
        if len(set(data[split][args.label_column])) < 2:
            raise SystemExit(f"All {len(data[split])} {split} rows are of one class: give more rows or samples.")
    return data


def load_model(args: Arguments, data: DatasetDict) -> tuple:
    """Return the checkpoint, or a new model and a tokenizer of the training documents."""
    names = data["train"].features[args.label_column].names
    classes = {"id2label": dict(enumerate(names)), "label2id": {name: number for number, name in enumerate(names)}}
    if args.model_name_or_path:
        tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
        return AutoModelForSequenceClassification.from_pretrained(args.model_name_or_path, **classes), tokenizer
    from example_data import new_tokenizer

    tokenizer = new_tokenizer(data["train"][args.text_column], vocab_size=4096)
    size = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    size |= {"max_position_embeddings": args.max_seq_length, "vocab_size": len(tokenizer)}
    style = {"attention_pattern": Band(left=64, right=64), "global_tokens": "first", "norm_position": "pre"}
    style |= {"position_embedding_type": "rope", "pad_token_id": tokenizer.pad_token_id, **classes}
    return AutoModelForSequenceClassification.from_config(hea.SparseTransformerConfig(**size, **style)), tokenizer


if __name__ == "__main__":
    main()
