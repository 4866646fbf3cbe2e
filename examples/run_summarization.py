"""Train an encoder-decoder to summarize documents, short or of thousands of tokens.

    pip install ".[train]"
    python examples/run_summarization.py

trains a small model of LED's kind from random weights to sum up the descriptions of Debian's packages, in nine minutes
on one core. Expect ROUGE-L 0.33; the first 12 words have 0.30. With long documents and a checkpoint made long:

    hf-efficient-attn convert facebook/bart-base long_bart --max-position-embeddings 4096
    torchrun --nproc_per_node 8 examples/run_summarization.py --model_name_or_path long_bart --learning_rate 5e-5 \\
        --train_file my.jsonl --text_column article --summary_column abstract --max_source_length 4096
"""

from dataclasses import dataclass
from pathlib import Path

import evaluate
import numpy as np
from datasets import DatasetDict, load_dataset
from torch import nn
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    EvalPrediction,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    set_seed,
)
from transformers.hf_argparser import HfArg, HfArgumentParser

import hf_efficient_attn as hea


@dataclass
class Arguments:
    """What is trained on what."""

    model_name_or_path: str | None = HfArg(default=None, help="Checkpoint. Default: a small model, random weights.")
    dataset_name: str | None = HfArg(default=None, help="Dataset of the Hub. Default: Debian's package descriptions.")
    dataset_config_name: str | None = HfArg(default=None, help="Configuration of that dataset.")
    train_file: str | None = HfArg(default=None, help="A .json or .jsonl file instead.")
    validation_file: str | None = HfArg(default=None, help="Its like, to evaluate on. Default: a tenth of the rows.")
    text_column: str = HfArg(default="text", help="Column of the document.")
    summary_column: str = HfArg(default="summary", help="Column of its summary.")
    source_prefix: str = HfArg(default="", help="What is put before every document, as T5 wants it.")
    max_source_length: int = HfArg(default=64, help="Tokens that are read of a document.")
    max_target_length: int = HfArg(default=32, help="Tokens of a summary, in training and generation.")
    num_beams: int = HfArg(default=4, help="Beams of what is written last; --generation_num_beams during training.")
    max_train_samples: int = HfArg(default=1_000_000, help="Train on at most so many rows.")
    max_eval_samples: int = HfArg(default=400, help="Evaluate on at most so many rows.")
    resume: bool = HfArg(default=False, help="Go on from the last complete checkpoint.")


def main() -> None:
    parser = HfArgumentParser((Arguments, Seq2SeqTrainingArguments))
    parser.set_defaults(output_dir="outputs/run_summarization", num_train_epochs=4, predict_with_generate=True)
    parser.set_defaults(per_device_train_batch_size=16, per_device_eval_batch_size=32, generation_num_beams=1)
    parser.set_defaults(train_sampling_strategy="group_by_length", eval_strategy="epoch", save_strategy="epoch")
    parser.set_defaults(learning_rate=4e-3, warmup_steps=0.1, adam_beta2=0.98, save_total_limit=2, report_to="none")
    args, training = parser.parse_args_into_dataclasses()
    set_seed(training.seed)
    data = load_data(args, training.seed)
    model, tokenizer = load_model(args, data)
    model.generation_config.update(max_length=args.max_target_length, num_beams=args.num_beams, no_repeat_ngram_size=3)

    def tokenize(rows: dict[str, list]) -> dict[str, list]:
        sources = [args.source_prefix + text for text in rows[args.text_column]]
        inputs = tokenizer(sources, truncation=True, max_length=args.max_source_length)
        labels = tokenizer(text_target=rows[args.summary_column], truncation=True, max_length=args.max_target_length)
        return {**inputs, "labels": labels["input_ids"]}

    encoded = data.map(tokenize, batched=True, remove_columns=data["train"].column_names)
    metric = evaluate.load(str(Path(__file__).parent / "metrics" / "rouge_scores"))

    def compute_metrics(output: EvalPrediction) -> dict[str, float]:
        both = (np.where(ids == -100, tokenizer.pad_token_id, ids) for ids in (output.predictions, output.label_ids))
        written, wanted = (tokenizer.batch_decode(ids, skip_special_tokens=True) for ids in both)
        return metric.compute(predictions=written, references=wanted)

    options = {"train_dataset": encoded["train"], "eval_dataset": encoded["validation"], "processing_class": tokenizer}
    trainer = Seq2SeqTrainer(model, training, DataCollatorForSeq2Seq(tokenizer, model=model), **options)
    trainer.compute_metrics = compute_metrics if training.predict_with_generate else None
    samples = data["validation"].take(5).add_column("untrained", write(trainer))
    resume = training.resume_from_checkpoint or args.resume and hea.last_complete_checkpoint(training.output_dir)
    trainer.save_metrics("train", trainer.train(resume).metrics)
    metrics = trainer.evaluate(num_beams=args.num_beams)
    starts = [" ".join(text.split()[:12]) for text in data["validation"][args.text_column]]
    scores = metric.compute(predictions=starts, references=data["validation"][args.summary_column])
    metrics |= {f"{name}_of_first_words": value for name, value in scores.items()}
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    # and pushes it to the Hub, if --push_to_hub True
    trainer.save_model()
    samples = samples.add_column("trained", write(trainer))
    if trainer.is_world_process_zero():
        samples.to_json(Path(training.output_dir, "samples.jsonl"), force_ascii=False)
        print(*("\n".join(f"{name}: {text}" for name, text in row.items()) for row in samples), sep="\n\n")


def write(trainer: Seq2SeqTrainer) -> list[str]:
    """Return what the model writes of the first five rows of validation."""
    tokenizer, rows = trainer.processing_class, trainer.eval_dataset.take(5)
    inputs = tokenizer.pad({"input_ids": rows["input_ids"][:]}, return_tensors="pt").to(trainer.args.device)
    return tokenizer.batch_decode(trainer.model.eval().generate(**inputs), skip_special_tokens=True)


def load_data(args: Arguments, seed: int) -> DatasetDict:
    """Return `train` and `validation`."""
    if args.dataset_name:
        data = load_dataset(args.dataset_name, args.dataset_config_name)
    elif args.train_file:
        files = {"train": args.train_file, "validation": args.validation_file}
        data = load_dataset("json", data_files={split: file for split, file in files.items() if file})
    else:
        from example_data import package_summaries

        data = package_summaries()
    if absent := {args.text_column, args.summary_column} - set(columns := data["train"].column_names):
        raise SystemExit(f"There is no column {', '.join(sorted(absent))}. There are: {', '.join(columns)}.")
    if not {"validation", "test"} & set(data):
        data = data["train"].train_test_split(0.1, seed=seed)
    splits = {"train": args.max_train_samples, "validation" if "validation" in data else "test": args.max_eval_samples}
    train, validation = (data[split].shuffle(seed).take(most) for split, most in splits.items())
    return DatasetDict(train=train, validation=validation)


def load_model(args: Arguments, data: DatasetDict) -> tuple:
    """Return the checkpoint, or a new model and a tokenizer of the training texts."""
    if args.model_name_or_path:
        tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
        return AutoModelForSeq2SeqLM.from_pretrained(args.model_name_or_path), tokenizer
    from example_data import new_tokenizer

    tokenizer = new_tokenizer(data["train"][args.text_column], vocab_size=6000, ends="$A </s>")
    fields = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    fields |= {"vocab_size": len(tokenizer), "decoder_start_token_id": tokenizer.bos_token_id, "encoder_layers": 1}
    fields |= {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4, "decoder_layers": 2}
    fields |= {"matrix_init": "glorot", "scale_embedding": True, "embedding_init_std": 128**-0.5, "hidden_dropout": 0.0}
    fields |= {"position_embedding_type": "sinusoidal", "norm_position": "pre", "embedding_dropout": 0.0}
    model = AutoModelForSeq2SeqLM.from_config(hea.SparseSeq2SeqConfig.led(attention_window=4, **fields))
    for layer in model.get_decoder().layers:
        # at first, a token that is read is a token that is written: looking at the right word pays from the first step
        nn.init.orthogonal_(layer.cross_attn.v_proj.weight)
        layer.cross_attn.o_proj.weight.data.copy_(layer.cross_attn.v_proj.weight.T)
    return model, tokenizer


if __name__ == "__main__":
    main()
