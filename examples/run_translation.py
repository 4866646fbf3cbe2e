"""Train an encoder-decoder to translate.

    pip install ".[train]"
    python examples/run_translation.py

trains the Transformer of 2017 at a small size from random weights on LibreOffice's help, English to German: BLEU 8.2,
chrF 27.1; the English as it is has 5.0 and 21.0. With rows of your own, {"translation": {"en": ..., "fr": ...}},
and with a checkpoint, which needs a smaller learning rate:

    python examples/run_translation.py --train_file my.jsonl --target_lang fr
    torchrun --nproc_per_node 8 examples/run_translation.py --model_name_or_path Helsinki-NLP/opus-mt-en-de \\
        --learning_rate 5e-5 --dataset_name wmt16 --dataset_config_name de-en
"""

from dataclasses import dataclass
from pathlib import Path

import evaluate
import numpy as np
from datasets import DatasetDict, load_dataset
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
    dataset_name: str | None = HfArg(default=None, help="Dataset of the Hub. Default: the help of LibreOffice.")
    dataset_config_name: str | None = HfArg(default=None, help="Configuration of that dataset.")
    train_file: str | None = HfArg(default=None, help="A .json or .jsonl file instead.")
    validation_file: str | None = HfArg(default=None, help="Its like, to evaluate on. Default: a tenth of the rows.")
    source_lang: str = HfArg(default="en", help="Language to translate from, a key of the column `translation`.")
    target_lang: str = HfArg(default="de", help="Language to translate to.")
    source_prefix: str = HfArg(default="", help="What is put before every source, as T5 wants it.")
    max_source_length: int = HfArg(default=96, help="Tokens that are read of a source.")
    max_target_length: int = HfArg(default=96, help="Tokens of a translation, in training and generation.")
    num_beams: int = HfArg(default=4, help="Beams of what is written last; --generation_num_beams during training.")
    max_train_samples: int = HfArg(default=1_000_000, help="Train on at most so many rows.")
    max_eval_samples: int = HfArg(default=400, help="Evaluate on at most so many rows.")
    resume: bool = HfArg(default=False, help="Go on from the last complete checkpoint.")


def main() -> None:
    parser = HfArgumentParser((Arguments, Seq2SeqTrainingArguments))
    parser.set_defaults(output_dir="outputs/run_translation", num_train_epochs=2, predict_with_generate=True)
    parser.set_defaults(per_device_train_batch_size=16, per_device_eval_batch_size=32, generation_num_beams=1)
    parser.set_defaults(train_sampling_strategy="group_by_length", eval_strategy="epoch", save_strategy="epoch")
    # Adam and Noam's schedule of the paper; after so short a warm-up, its full rate would make post-norm layers diverge
    parser.set_defaults(learning_rate=2.2e-3, lr_scheduler_type="inverse_sqrt", warmup_steps=400, max_grad_norm=0)
    parser.set_defaults(adam_beta2=0.98, adam_epsilon=1e-9, save_total_limit=2, report_to="none")
    args, training = parser.parse_args_into_dataclasses()
    set_seed(training.seed)
    data = load_data(args, training.seed)
    model, tokenizer = load_model(args, data)
    model.generation_config.update(max_length=args.max_target_length, num_beams=args.num_beams)

    def tokenize(rows: dict[str, list]) -> dict[str, list]:
        sources = [args.source_prefix + text for text in rows["source"]]
        inputs = tokenizer(sources, truncation=True, max_length=args.max_source_length)
        labels = tokenizer(text_target=rows["target"], truncation=True, max_length=args.max_target_length)
        return {**inputs, "labels": labels["input_ids"]}

    encoded = data.map(tokenize, batched=True, remove_columns=data["train"].column_names)
    metric = evaluate.load(str(Path(__file__).parent / "metrics" / "sacrebleu_score"))

    def compute_metrics(output: EvalPrediction) -> dict[str, float]:
        both = (np.where(ids == -100, tokenizer.pad_token_id, ids) for ids in (output.predictions, output.label_ids))
        written, wanted = (tokenizer.batch_decode(ids, skip_special_tokens=True) for ids in both)
        scores = metric.compute(predictions=written, references=wanted)
        return {"bleu": scores["bleu"], "chrf": scores["chrf"]}

    options = {"train_dataset": encoded["train"], "eval_dataset": encoded["validation"], "processing_class": tokenizer}
    trainer = Seq2SeqTrainer(model, training, DataCollatorForSeq2Seq(tokenizer, model=model), **options)
    trainer.compute_metrics = compute_metrics if training.predict_with_generate else None
    samples = data["validation"].take(5).add_column("untrained", write(trainer))
    resume = training.resume_from_checkpoint or args.resume and hea.last_complete_checkpoint(training.output_dir)
    trainer.save_metrics("train", trainer.train(resume).metrics)
    metrics = trainer.evaluate(num_beams=args.num_beams)
    scores = metric.compute(predictions=data["validation"]["source"][:], references=data["validation"]["target"][:])
    metrics |= {f"{name}_of_sources": scores[name] for name in ("bleu", "chrf")}
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
    """Return `train` and `validation`, of `source` and `target`."""
    if args.dataset_name:
        data = load_dataset(args.dataset_name, args.dataset_config_name)
    elif args.train_file:
        files = {"train": args.train_file, "validation": args.validation_file}
        data = load_dataset("json", data_files={split: file for split, file in files.items() if file})
    else:
        from example_data import translations

        data = translations()
    if absent := {args.source_lang, args.target_lang} - set(languages := data["train"][0]["translation"]):
        raise SystemExit(f"There is no text in {', '.join(sorted(absent))}, but in {', '.join(languages)}.")
    languages = {"source": args.source_lang, "target": args.target_lang}
    data = data.map(lambda row: {column: row["translation"][name] for column, name in languages.items()})
    data = data.select_columns(["source", "target"])
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

    tokenizer = new_tokenizer((text for row in data["train"] for text in row.values()), vocab_size=3000, ends="$A </s>")
    fields = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    fields |= {"vocab_size": len(tokenizer), "decoder_start_token_id": tokenizer.bos_token_id}
    fields |= {"hidden_size": 128, "intermediate_size": 512, "encoder_layers": 2, "decoder_layers": 2}
    config = hea.SparseSeq2SeqConfig.vanilla(num_attention_heads=4, **fields)
    return AutoModelForSeq2SeqLM.from_config(config), tokenizer


if __name__ == "__main__":
    main()
