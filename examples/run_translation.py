"""Train an encoder-decoder to translate.

    pip install ".[train]"
    python examples/run_translation.py

trains the Transformer of 2017 at a small size from random weights on LibreOffice's help, English to German, in 5
minutes of one core: BLEU 8.2, chrF 27.1; the English as it is has 5.0 and 21.0, and long sentences are still wrong.
With rows of your own, {"translation": {"en": ..., "fr": ...}}, and with a checkpoint, which needs a smaller rate:

    python examples/run_translation.py --train_file my.jsonl --target_lang fr
    torchrun --nproc_per_node 8 examples/run_translation.py --model_name_or_path Helsinki-NLP/opus-mt-en-de \\
        --learning_rate 5e-5 --dataset_name wmt16 --dataset_config_name de-en
"""

from dataclasses import dataclass

import numpy as np
import torch
from datasets import DatasetDict, load_dataset
from sacrebleu import corpus_bleu, corpus_chrf
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, DataCollatorForSeq2Seq, set_seed
from transformers.hf_argparser import HfArg, HfArgumentParser
from transformers.trainer_seq2seq import Seq2SeqTrainer
from transformers.training_args_seq2seq import Seq2SeqTrainingArguments

import hf_efficient_attn as hea
from hf_efficient_attn.training import last_complete_checkpoint, script_inputs


@dataclass
class Arguments:
    model_name_or_path: str | None = HfArg(default=None, help="Checkpoint. Default: a small model, random weights.")
    dataset_name: str | None = HfArg(default=None, help="Dataset of the Hub. Default: the help of LibreOffice.")
    dataset_config_name: str | None = HfArg(default=None, help="Configuration of that dataset.")
    train_file: str | None = HfArg(default=None, help="A .json or .jsonl file instead.")
    validation_file: str | None = HfArg(default=None, help="Its like, to evaluate on. Default: a tenth of the rows.")
    source_lang: str = HfArg(default="en", help="Language to translate from, a key of the column `translation`.")
    target_lang: str = HfArg(default="de", help="Language to translate to.")
    max_source_length: int = HfArg(default=96, help="Tokens that are read of a source.")
    max_target_length: int = HfArg(default=96, help="Tokens of a translation, in training and generation.")
    max_train_samples: int | None = HfArg(default=None, help="Train on at most so many rows.")
    max_eval_samples: int = HfArg(default=400, help="Evaluate on at most so many rows.")
    resume: bool = HfArg(default=False, help="Go on from the last complete checkpoint.")


@script_inputs.refusals_as_sentences()
def main() -> None:
    parser = HfArgumentParser((Arguments, Seq2SeqTrainingArguments))
    parser.set_defaults(output_dir="outputs/run_translation", do_train=True, do_eval=True, do_predict=True)
    parser.set_defaults(num_train_epochs=2, per_device_train_batch_size=16, per_device_eval_batch_size=32)
    parser.set_defaults(train_sampling_strategy="group_by_length", save_strategy="epoch", save_total_limit=2)
    # Adam and Noam's schedule of the paper; after so short a warm-up, its full rate would make post-norm layers diverge
    parser.set_defaults(learning_rate=2.2e-3, lr_scheduler_type="inverse_sqrt", warmup_steps=400, max_grad_norm=0)
    parser.set_defaults(adam_beta2=0.98, adam_epsilon=1e-9, generation_num_beams=4, report_to="none")
    parser.set_defaults(predict_with_generate=True, use_cpu=not torch.accelerator.is_available())
    args, training = parser.parse_args_into_dataclasses()
    script_inputs.check_arguments(args)
    set_seed(training.seed)
    data = load_data(args, training.seed)
    model, tokenizer = load_model(args, data)
    model.generation_config.update(max_length=args.max_target_length, num_beams=training.generation_num_beams)

    def tokenize(rows: dict[str, list]) -> dict[str, list]:
        labels = tokenizer(text_target=rows["target"], truncation=True, max_length=args.max_target_length).input_ids
        return {**tokenizer(rows["source"], truncation=True, max_length=args.max_source_length), "labels": labels}

    with training.main_process_first():
        encoded = data.map(tokenize, batched=True, remove_columns=data["train"].column_names)
    script_inputs.check_lengths(encoded, model, tokenizer, "max_source_length", args.max_target_length)

    def compute_metrics(output: tuple) -> dict[str, float]:
        ids = (np.where(ids == -100, tokenizer.pad_token_id, ids) for ids in (output[0], output[1]))
        return scores(*(tokenizer.batch_decode(each, skip_special_tokens=True) for each in ids))

    options = {"train_dataset": encoded["train"], "eval_dataset": encoded["validation"], "processing_class": tokenizer}
    trainer = Seq2SeqTrainer(model, training, DataCollatorForSeq2Seq(tokenizer, model=model), **options)
    trainer.compute_metrics = compute_metrics if training.predict_with_generate else None
    if training.do_train:
        resume = training.resume_from_checkpoint or args.resume and last_complete_checkpoint(training.output_dir)
        trainer.save_metrics("train", trainer.train(resume).metrics)
        trainer.save_model()
    if training.do_eval:
        metrics = trainer.evaluate()
        simple = scores(data["validation"]["source"][:], data["validation"]["target"][:])
        metrics |= {f"{name}_of_sources": value for name, value in simple.items()}
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
    if training.do_predict:
        inputs = tokenizer.pad({"input_ids": encoded["validation"].take(5)["input_ids"][:]}, return_tensors="pt")
        written = tokenizer.batch_decode(model.eval().generate(**inputs.to(training.device)), skip_special_tokens=True)
        samples = data["validation"].take(5).add_column("written", written)
    if training.do_predict and trainer.is_world_process_zero():
        samples.to_json(f"{training.output_dir}/samples.jsonl", force_ascii=False)
        print(*("\n".join(f"{name}: {text}" for name, text in row.items()) for row in samples), sep="\n\n")


def scores(written: list[str], wanted: list[str]) -> dict[str, float]:
    return {"bleu": corpus_bleu(written, [wanted]).score, "chrf": corpus_chrf(written, [wanted]).score}


def load_data(args: Arguments, seed: int) -> DatasetDict:
    """Return `train` and `validation`, of `source` and `target`."""
    if args.dataset_name:
        data = load_dataset(args.dataset_name, args.dataset_config_name)
    elif args.train_file:
        data = script_inputs.load_files(args, ".json", ".jsonl")
    else:
        from example_data import translations

        data = translations()
    languages = {"source": args.source_lang, "target": args.target_lang}
    if absent := set(languages.values()).difference(texts := data["train"][0].get("translation") or {}):
        raise SystemExit(
            f"No `translation` is in {' or '.join(sorted(absent))}; there is {', '.join(texts) or 'none'}."
        )
    data = data.map(lambda row: {column: (row["translation"] or {}).get(name) for column, name in languages.items()})
    data = data.select_columns([*languages])
    data = script_inputs.split_rows(data, seed)
    for split, limit in {"train": args.max_train_samples, "validation": args.max_eval_samples}.items():
        data[split] = data[split].shuffle(seed).select(range(len(data[split]))[:limit])
        if not len(data[split]):
            raise SystemExit(f"There are no {split} rows.")
        if any(None in data[split][name] for name in languages):
            raise SystemExit("A row is not in both languages: leave it out.")
    script_inputs.check_texts(data, *languages)
    return data


def load_model(args: Arguments, data: DatasetDict) -> tuple:
    """Return the checkpoint, or a new model and a tokenizer of the training texts."""
    if name := args.model_name_or_path:
        return AutoModelForSeq2SeqLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    from example_data import new_tokenizer

    tokenizer = new_tokenizer((text for row in data["train"] for text in row.values()), vocab_size=3000, ends="$A </s>")
    fields = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    fields |= {"vocab_size": len(tokenizer), "decoder_start_token_id": tokenizer.bos_token_id}
    fields |= {"hidden_size": 128, "intermediate_size": 512, "encoder_layers": 2, "decoder_layers": 2}
    config = hea.SparseSeq2SeqConfig.vanilla(num_attention_heads=4, **fields)
    return AutoModelForSeq2SeqLM.from_config(config), tokenizer


if __name__ == "__main__":
    main()
