"""Train an encoder-decoder to summarize documents, short or of thousands of tokens.

    pip install ".[train]"
    python examples/run_summarization.py

trains a small model of LED's kind from random weights to sum up the descriptions of Debian's packages, in 16 minutes
of one core. Expect ROUGE-L 0.36; the first 12 words have 0.28. With long documents and a checkpoint made long:

    hf-efficient-attn convert facebook/bart-base long_bart --max-position-embeddings 4096
    python examples/run_summarization.py --model_name_or_path long_bart --train_file my.jsonl --max_source_length 4096
"""

from dataclasses import dataclass

import numpy as np
import torch
from datasets import DatasetDict, load_dataset
from rouge_score.rouge_scorer import RougeScorer
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, DataCollatorForSeq2Seq, set_seed
from transformers.hf_argparser import HfArg, HfArgumentParser
from transformers.trainer_seq2seq import Seq2SeqTrainer
from transformers.training_args_seq2seq import Seq2SeqTrainingArguments

import hf_efficient_attn as hea
from hf_efficient_attn.training import last_complete_checkpoint, script_inputs


@dataclass
class Arguments:
    model_name_or_path: str | None = HfArg(default=None, help="Checkpoint. Default: a small model, random weights.")
    dataset_name: str | None = HfArg(default=None, help="Dataset of the Hub. Default: Debian's package descriptions.")
    dataset_config_name: str | None = HfArg(default=None, help="Configuration of that dataset.")
    train_file: str | None = HfArg(default=None, help="A .json or .jsonl file instead.")
    validation_file: str | None = HfArg(default=None, help="Its like, to evaluate on. Default: a tenth of the rows.")
    text_column: str = HfArg(default="text", help="Column of the document.")
    summary_column: str = HfArg(default="summary", help="Column of its summary.")
    max_source_length: int = HfArg(default=128, help="Tokens that are read of a document.")
    max_target_length: int = HfArg(default=32, help="Tokens of a summary, in training and generation.")
    max_train_samples: int | None = HfArg(default=None, help="Train on at most so many rows.")
    max_eval_samples: int = HfArg(default=400, help="Evaluate on at most so many rows.")
    resume: bool = HfArg(default=False, help="Go on from the last complete checkpoint.")


@script_inputs.refusals_as_sentences()
def main() -> None:
    parser = HfArgumentParser((Arguments, Seq2SeqTrainingArguments))
    parser.set_defaults(output_dir="outputs/run_summarization", do_train=True, do_eval=True, do_predict=True)
    parser.set_defaults(num_train_epochs=4, per_device_train_batch_size=16, per_device_eval_batch_size=32)
    parser.set_defaults(train_sampling_strategy="group_by_length", save_strategy="epoch", save_total_limit=2)
    parser.set_defaults(learning_rate=4e-3, warmup_steps=0.1, adam_beta2=0.98, generation_num_beams=4, report_to="none")
    parser.set_defaults(predict_with_generate=True, use_cpu=not torch.accelerator.is_available())
    parser.set_defaults(label_smoothing_factor=0.1)
    args, training = parser.parse_args_into_dataclasses()
    script_inputs.check_arguments(args)
    set_seed(training.seed)
    data = load_data(args, training.seed)
    model, tokenizer = load_model(args, data)
    limit = {"max_length": args.max_target_length}
    model.generation_config.update(**limit, num_beams=training.generation_num_beams, no_repeat_ngram_size=3)

    def tokenize(rows: dict[str, list]) -> dict[str, list]:
        ids = tokenizer(text_target=rows[args.summary_column], truncation=True, **limit).input_ids
        return {**tokenizer(rows[args.text_column], truncation=True, max_length=args.max_source_length), "labels": ids}

    encoded = data.map(tokenize, batched=True, remove_columns=data["train"].column_names)
    script_inputs.check_lengths(encoded, model, tokenizer, "max_source_length", args.max_target_length)

    def compute_metrics(output: tuple) -> dict[str, float]:
        ids = (np.where(ids == -100, tokenizer.pad_token_id, ids) for ids in (output[0], output[1]))
        return scores(*(tokenizer.batch_decode(each, skip_special_tokens=True) for each in ids))

    def write() -> list[str]:
        inputs = tokenizer.pad({"input_ids": encoded["validation"].take(5)["input_ids"][:]}, return_tensors="pt")
        return tokenizer.batch_decode(model.eval().generate(**inputs.to(training.device)), skip_special_tokens=True)

    trainer = Seq2SeqTrainer(model, training, DataCollatorForSeq2Seq(tokenizer, model), *encoded.values(), tokenizer)
    trainer.compute_metrics = compute_metrics if training.predict_with_generate else None
    untrained = write()
    if training.do_train:
        resume = training.resume_from_checkpoint or args.resume and last_complete_checkpoint(training.output_dir)
        trainer.save_metrics("train", trainer.train(resume).metrics)
        trainer.save_model()
    if training.do_eval:
        starts = [" ".join(text.split()[:12]) for text in data["validation"][args.text_column]]
        simple = scores(starts, data["validation"][args.summary_column])
        metrics = trainer.evaluate() | {f"{name}_of_first_words": value for name, value in simple.items()}
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
    samples = data["validation"].take(5).add_column("untrained", untrained).add_column("trained", write())
    if training.do_predict and trainer.is_world_process_zero():
        samples.to_json(f"{training.output_dir}/samples.jsonl", force_ascii=False)
        print(*("\n".join(f"{name}: {text}" for name, text in row.items()) for row in samples), sep="\n\n")


def scores(written: list[str], wanted: list[str]) -> dict[str, float]:
    scorer = RougeScorer(kinds := ["rouge1", "rouge2", "rougeL"], use_stemmer=True)
    found = [scorer.score(*pair) for pair in zip(wanted, written, strict=True)]
    return {kind: sum(each[kind].fmeasure for each in found) / len(found) for kind in kinds}


def load_data(args: Arguments, seed: int) -> DatasetDict:
    """Return `train` and `validation`."""
    if args.dataset_name:
        data = load_dataset(args.dataset_name, args.dataset_config_name)
    elif args.train_file:
        data = script_inputs.load_files(args, ".json", ".jsonl")
    else:
        from example_data import package_summaries

        data = package_summaries()
    wanted = [args.text_column, args.summary_column]
    script_inputs.check_columns(args, data["train"].column_names, "text_column", "summary_column")
    data = script_inputs.split_rows(data, seed)
    for split, limit in {"train": args.max_train_samples, "validation": args.max_eval_samples}.items():
        data[split] = data[split].shuffle(seed).select(range(len(data[split]))[:limit])
        if not len(data[split]):
            raise SystemExit(f"There are no {split} rows.")
    script_inputs.check_texts(data, *wanted)
    return data


def load_model(args: Arguments, data: DatasetDict) -> tuple:
    """Return the checkpoint, or a new model and a tokenizer of the training texts."""
    if name := args.model_name_or_path:
        return AutoModelForSeq2SeqLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    from example_data import new_tokenizer

    tokenizer = new_tokenizer(data["train"][args.text_column], vocab_size=6000, ends="$A </s>")
    fields = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    fields |= {"vocab_size": len(tokenizer), "decoder_start_token_id": tokenizer.bos_token_id, "encoder_layers": 1}
    fields |= {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4, "decoder_layers": 2}
    fields |= {"matrix_init": "glorot", "scale_embedding": True, "embedding_init_std": 128**-0.5, "hidden_dropout": 0.1}
    fields |= {"position_embedding_type": "sinusoidal", "norm_position": "pre", "embedding_dropout": 0.0}
    model = AutoModelForSeq2SeqLM.from_config(hea.SparseSeq2SeqConfig.led(attention_window=4, **fields))
    for layer in model.get_decoder().layers:
        # at first, a token that is read is a token that is written: looking at the right word pays from the first step
        torch.nn.init.orthogonal_(layer.cross_attn.v_proj.weight)
        layer.cross_attn.o_proj.weight.data.copy_(layer.cross_attn.v_proj.weight.T)
    return model, tokenizer


if __name__ == "__main__":
    main()
