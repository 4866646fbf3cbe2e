"""Train an encoder-decoder to summarize or to translate.

    pip install ".[train]"  # if you copy this file, copy example_data, too: it has default data and makes new models
    python examples/run_seq2seq.py

The command trains a small model like LED, from random weights, to summarize descriptions of Debian's packages. It takes
16 minutes on one core and reaches ROUGE-L 0.36; the first 12 words of a description reach 0.28. The next command trains
the Transformer of 2017 to translate LibreOffice's help to German, and reaches BLEU 8.2. The last is for your own text:

    python examples/run_seq2seq.py --task translation --max_source_length 96 --max_target_length 96 \\
        --num_train_epochs 2 --learning_rate 2.2e-3 --lr_scheduler_type inverse_sqrt --warmup_steps 400 \\
        --max_grad_norm 0 --adam_epsilon 1e-9 --label_smoothing_factor 0
    python examples/run_seq2seq.py --model_name_or_path facebook/bart-base --train_file my.jsonl --learning_rate 5e-5
"""

from dataclasses import dataclass
from typing import Literal

import torch
from datasets import DatasetDict, load_dataset
from rouge_score.rouge_scorer import RougeScorer
from sacrebleu import corpus_bleu, corpus_chrf
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, Seq2SeqTrainer, Seq2SeqTrainingArguments, set_seed
from transformers.data.data_collator import DataCollatorForSeq2Seq
from transformers.hf_argparser import HfArg, HfArgumentParser

import hf_efficient_attn as hea


@dataclass
class Arguments:
    task: Literal["summarization", "translation"] = HfArg(default="summarization", help="Default data and model.")
    model_name_or_path: str | None = HfArg(default=None, help="Checkpoint. Default: a small model, random weights.")
    dataset_name: str | None = HfArg(default=None, help="Dataset on the Hub.")
    dataset_config_name: str | None = HfArg(default=None, help="Configuration of that dataset.")
    train_file: str | None = HfArg(default=None, help="Your data, .jsonl. For .csv, add --dataset_name csv.")
    validation_file: str | None = HfArg(default=None, help="Your validation data. Default: a tenth of the rows.")
    source_column: str = HfArg(default="source", help="Column of sources, for instance translation.en.")
    target_column: str = HfArg(default="target", help="Column of their summaries or translations.")
    max_source_length: int = HfArg(default=128, help="Sources are cut after this number of tokens.")
    max_target_length: int = HfArg(default=32, help="Targets and generated texts are cut after this number of tokens.")
    max_train_samples: int | None = HfArg(default=None, help="Train on at most this number of rows.")
    max_eval_samples: int = HfArg(default=400, help="Evaluate on at most this number of rows.")
    resume: bool = HfArg(default=False, help="Continue from the last complete checkpoint in --output_dir.")


def main() -> None:
    parser = HfArgumentParser((Arguments, Seq2SeqTrainingArguments))
    parser.set_defaults(output_dir="outputs/run_seq2seq", do_train=True, do_eval=True, predict_with_generate=True)
    parser.set_defaults(num_train_epochs=4, per_device_train_batch_size=16, train_sampling_strategy="group_by_length")
    parser.set_defaults(warmup_steps=0.1, adam_beta2=0.98, label_smoothing_factor=0.1, save_strategy="epoch")
    parser.set_defaults(per_device_eval_batch_size=32, learning_rate=4e-3, use_cpu=not torch.accelerator.is_available())
    args, training = parser.parse_args_into_dataclasses()
    set_seed(training.seed)
    data = load_data(args, training.seed)
    if name := args.model_name_or_path:
        model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    else:
        from example_data import new_seq2seq

        model, tokenizer = new_seq2seq(args.task, data["train"], args.source_column, args.target_column)
    model.generation_config.max_length = args.max_target_length

    def tokenize(rows: dict[str, list]) -> dict[str, list]:
        inputs = tokenizer(rows[args.source_column], truncation=True, max_length=args.max_source_length)
        labels = tokenizer(text_target=rows[args.target_column], truncation=True, max_length=args.max_target_length)
        return {**inputs, "labels": labels["input_ids"]}

    def compute_metrics(output: tuple) -> dict[str, float]:
        texts = [tokenizer.batch_decode([row[row >= 0] for row in ids], skip_special_tokens=True) for ids in output]
        return scores(*texts)

    with training.main_process_first():
        encoded = data.map(tokenize, batched=True, remove_columns=data["train"].column_names)
    trainer = Seq2SeqTrainer(model, training, DataCollatorForSeq2Seq(tokenizer, model), *encoded.values(), tokenizer)
    trainer.compute_metrics = compute_metrics if training.predict_with_generate else None
    if training.do_train:
        resume = training.resume_from_checkpoint or args.resume and hea.last_complete_checkpoint(training.output_dir)
        trainer.save_metrics("train", trainer.train(resume).metrics)
        trainer.save_model()
    if training.do_eval:
        words, name = (12, "first_words") if args.task == "summarization" else (None, "sources")
        baseline = [" ".join(text.split()[:words]) for text in data["validation"][args.source_column]]
        baseline = scores(baseline, data["validation"][args.target_column])
        metrics = trainer.evaluate() | {f"{score}_of_{name}": value for score, value in baseline.items()}
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
        inputs = tokenizer.pad({"input_ids": encoded["validation"].take(5)["input_ids"][:]}, return_tensors="pt")
        generated = model.eval().generate(**inputs.to(training.device), synced_gpus=training.world_size > 1)
        texts = tokenizer.batch_decode(generated, skip_special_tokens=True)
        for row, text in zip(data["validation"], texts, strict=False) if trainer.is_world_process_zero() else ():
            print(f"source: {row[args.source_column]}\ntarget: {row[args.target_column]}\ngenerated: {text}\n")


def scores(generated: list[str], targets: list[str]) -> dict[str, float]:
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)
    found = [scorer.score(*pair) for pair in zip(targets, generated, strict=True)]
    rouge = {kind: sum(each[kind].fmeasure for each in found) / len(found) for kind in found[0]}
    return rouge | {"bleu": corpus_bleu(generated, [targets]).score, "chrf": corpus_chrf(generated, [targets]).score}


def load_data(args: Arguments, seed: int) -> DatasetDict:
    """Return `train` and `validation`. The field "en" of a column "translation" becomes the column "translation.en"."""
    files = {"train": args.train_file, "validation": args.validation_file} if args.validation_file else args.train_file
    if files or args.dataset_name:
        data = load_dataset(args.dataset_name or "json", args.dataset_config_name, data_files=files)
    else:
        import example_data

        data = example_data.translations() if args.task == "translation" else example_data.package_summaries()
    if len(data) == 1:
        data = data["train"].train_test_split(0.1, seed=seed)
    data = DatasetDict(train=data["train"], validation=data["validation" if "validation" in data else "test"])
    for split, limit in {"train": args.max_train_samples, "validation": args.max_eval_samples}.items():
        data[split] = data[split].shuffle(seed).select(range(len(data[split]))[:limit])
    return data.flatten()


if __name__ == "__main__":
    main()
