"""Train an encoder to label every word of texts of thousands of tokens.

    pip install ".[train]"
    python examples/run_token_classification.py

learns in 2 minutes of one core what names in Python's library are (class, parameter, imported name ...): expect an
accuracy of 0.886 and a macro F1 of 0.847 over names; each name's most frequent kind has an accuracy of 0.598. So short
a training gains nothing from long texts: `--max_seq_length 512 --per_device_train_batch_size 4` has 0.891 and 0.857.

    torchrun --nproc_per_node 8 examples/run_token_classification.py --model_name_or_path long_roberta --dataset_name X
"""

from dataclasses import dataclass
from statistics import mode

import torch
from datasets import ClassLabel, DatasetDict, Sequence, Value, load_dataset
from sklearn.metrics import accuracy_score, f1_score
from transformers import AutoModelForTokenClassification, AutoTokenizer, DataCollatorForTokenClassification, set_seed
from transformers.hf_argparser import HfArg, HfArgumentParser
from transformers.trainer import Trainer
from transformers.training_args import TrainingArguments

import hf_efficient_attn as hea
from hf_efficient_attn.training import last_complete_checkpoint, script_inputs


@dataclass
class Arguments:
    model_name_or_path: str | None = HfArg(default=None, help="Checkpoint. Default: a small model, random weights.")
    dataset_name: str | None = HfArg(default=None, help="Dataset of the Hub. Default: Python files, kinds of names.")
    dataset_config_name: str | None = HfArg(default=None, help="Configuration of that dataset.")
    train_file: str | None = HfArg(default=None, help="A .json or .jsonl file instead.")
    validation_file: str | None = HfArg(default=None, help="Its like, to evaluate on. Default: a tenth of the rows.")
    text_column_name: str = HfArg(default="tokens", help="Column of the words, a list.")
    label_column_name: str = HfArg(default="ner_tags", help="Column of their labels; null, or class -1: not learned.")
    max_seq_length: int = HfArg(default=4096, help="Tokens that are read at once; longer rows are read in pieces.")
    max_train_samples: int | None = HfArg(default=None, help="Train on at most so many rows.")
    max_eval_samples: int | None = HfArg(default=None, help="Evaluate on at most so many rows.")
    resume: bool = HfArg(default=False, help="Go on from the last complete checkpoint.")


@script_inputs.refusals_as_sentences()
def main() -> None:
    parser = HfArgumentParser((Arguments, TrainingArguments))
    parser.set_defaults(output_dir="outputs/run_token_classification", do_train=True, do_eval=True, report_to="none")
    parser.set_defaults(per_device_train_batch_size=1, train_sampling_strategy="group_by_length")
    parser.set_defaults(num_train_epochs=2, learning_rate=2e-3, warmup_steps=0.1, save_strategy="epoch")
    parser.set_defaults(use_cpu=not torch.accelerator.is_available())
    args, training = parser.parse_args_into_dataclasses()
    script_inputs.check_arguments(args)
    if training.do_predict:
        raise SystemExit("--do_predict: nothing is predicted here; --do_eval evaluates on the rows for validation.")
    set_seed(training.seed)
    model, tokenizer = load_model(args, data := load_data(args, training.seed))

    def tokenize(rows: dict[str, list]) -> dict[str, list]:
        words, tags = rows[args.text_column_name], rows[args.label_column_name]
        if unequal := [row for row, own in zip(words, tags, strict=True) if len(row) != len(own)]:
            raise SystemExit(f"A row of {len(unequal[0])} words has more or fewer labels: {' '.join(unequal[0])[:60]}")
        options = {"truncation": True, "max_length": args.max_seq_length, "return_overflowing_tokens": True}
        inputs = tokenizer(words, is_split_into_words=True, **options)
        labels, last = [], None
        for piece, row in enumerate(inputs.pop("overflow_to_sample_mapping")):
            labels.append([-100] * len(inputs["input_ids"][piece]))
            for place, word in enumerate(inputs.word_ids(piece)):
                # the first token of a word stands for it, also where a piece ends within the word
                if word is not None and (row, word) != last:
                    labels[-1][place] = -100 if tags[row][word] in (None, -1) else tags[row][word]
                    last = row, word
        return {**inputs, "labels": labels}

    with training.main_process_first():
        pieces = data.map(tokenize, batched=True, batch_size=100, remove_columns=data["train"].column_names)
    script_inputs.check_lengths(pieces, model, tokenizer)

    def compute_metrics(output: tuple) -> dict[str, float]:
        predicted, true = output[0].argmax(-1)[output[1] >= 0], output[1][output[1] >= 0]
        return {"accuracy": accuracy_score(true, predicted), "f1_macro": f1_score(true, predicted, average="macro")}

    options = {"processing_class": tokenizer, "compute_metrics": compute_metrics}
    trainer = Trainer(model, training, DataCollatorForTokenClassification(tokenizer), *pieces.values(), **options)
    if training.do_train:
        resume = training.resume_from_checkpoint or args.resume and last_complete_checkpoint(training.output_dir)
        trainer.save_metrics("train", trainer.train(resume).metrics)
        trainer.save_model()
    if training.do_eval:
        tables = (rows.to_pandas().explode(rows.column_names).dropna() for rows in data.values())
        train, validation = (table.set_axis(["word", "label"], axis=1).query("label >= 0") for table in tables)
        predicted = validation.word.map(train.groupby("word").label.agg(mode)).fillna(mode(train.label))
        simple = {"accuracy_of_most_frequent": (predicted == validation.label).mean()}
        trainer.log_metrics("eval", metrics := trainer.evaluate() | simple)
        trainer.save_metrics("eval", metrics)


def load_data(args: Arguments, seed: int) -> DatasetDict:
    """Return `train` and `validation`, whose labels are numbers of named classes."""
    if args.dataset_name:
        data = load_dataset(args.dataset_name, args.dataset_config_name)
    elif args.train_file:
        data = script_inputs.load_files(args, ".json", ".jsonl")
    else:
        from example_data import name_kinds

        data = name_kinds()
    words, label, columns = args.text_column_name, args.label_column_name, data["train"].features
    if without := [name for name in (words, label) if not hasattr(columns.get(name), "feature")]:
        raise SystemExit(f"No column of lists is called {' or '.join(without)}; the data has {', '.join(columns)}.")
    data = script_inputs.split_rows(data, seed).select_columns([words, label])
    script_inputs.check_texts(data, words, label)
    if not isinstance(columns[label].feature, ClassLabel):
        data = data.cast_column(label, Sequence(Value("string")))
        names = {tag for rows in data.values() for tags in rows[label] for tag in tags} - {None}
        data = data.cast_column(label, Sequence(ClassLabel(names=sorted(names))))
    limits = {"train": args.max_train_samples, "validation": args.max_eval_samples}
    some = {split: data[split].shuffle(seed).select(range(len(data[split]))[:most]) for split, most in limits.items()}
    if not all(map(len, some.values())):
        raise SystemExit("There are no train rows, or no validation rows.")
    return DatasetDict(some)


def load_model(args: Arguments, data: DatasetDict) -> tuple:
    """Return the checkpoint, or a new model and a tokenizer of the training words."""
    names = data["train"].features[args.label_column_name].feature.names
    classes = {"id2label": dict(enumerate(names)), "label2id": {name: number for number, name in enumerate(names)}}
    if args.model_name_or_path:
        # tokens of a word begin with a space in RoBERTa, but words come without
        tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path, add_prefix_space=True)
        return AutoModelForTokenClassification.from_pretrained(args.model_name_or_path, **classes), tokenizer
    from example_data import new_tokenizer

    tokenizer = new_tokenizer((word for words in data["train"][args.text_column_name] for word in words), 4096)
    size = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
    size |= {"max_position_embeddings": args.max_seq_length, "vocab_size": len(tokenizer)}
    style = {"norm_position": "pre", "position_embedding_type": "rope", "initializer_range": 0.1}
    style |= {"attention_pattern": hea.patterns.Band(left=32, right=32), "pad_token_id": tokenizer.pad_token_id}
    config = hea.SparseTransformerConfig(**size, **style, **classes)
    return AutoModelForTokenClassification.from_config(config), tokenizer


if __name__ == "__main__":
    main()
