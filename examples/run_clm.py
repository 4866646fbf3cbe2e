"""Train a causal language model, from random weights or from a checkpoint.

    pip install ".[train]"  # if you copy this file, copy example_data, too: it has default data and makes new models
    python examples/run_clm.py

The command trains a simplified Transformer (block `sas_p`) on the source code of Python's standard library. It takes 5
minutes on one core and reaches 1.55 bits per byte on held-out files. With another model, a checkpoint, your own text:

    python examples/run_clm.py --model_type llama --config_overrides "hidden_size=96,num_hidden_layers=4"
    python examples/run_clm.py --model_name_or_path gpt2 --attention_window 256 --train_file my.jsonl
    torchrun --nproc_per_node 8 examples/run_clm.py --dataset_name wikitext --dataset_config_name wikitext-103-raw-v1
"""

import math
from dataclasses import dataclass

import torch
from datasets import DatasetDict, load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments, set_seed
from transformers.data.data_collator import default_data_collator
from transformers.hf_argparser import HfArg, HfArgumentParser

import hf_efficient_attn as hea
from hf_efficient_attn.patterns import Band, GlobalTokens


@dataclass
class Arguments:
    model_name_or_path: str | None = HfArg(default=None, help="Checkpoint. Default: a new model, random weights.")
    model_type: str = HfArg(default="simplified_transformer", help="Model type of a new model.")
    config_overrides: str | None = HfArg(default=None, help='For a new model: "hidden_size=96,num_hidden_layers=4".')
    tokenizer_name: str | None = HfArg(default=None, help="Tokenizer of a new model. Default: one trained on the text.")
    attention_window: int | None = HfArg(default=None, help="Attend to this number of tokens before, and the first 4.")
    dataset_name: str | None = HfArg(default=None, help="Dataset on the Hub.")
    dataset_config_name: str | None = HfArg(default=None, help="Configuration of that dataset.")
    train_file: str | None = HfArg(default=None, help="Your training data: a .txt, .json or .jsonl file.")
    validation_file: str | None = HfArg(default=None, help="Your validation data. Default: a tenth of the rows.")
    text_column: str = HfArg(default="text", help="Column of the text.")
    block_size: int = HfArg(default=256, help="Length of the training sequences in tokens.")
    max_train_samples: int | None = HfArg(default=None, help="Train on at most this number of sequences.")
    max_eval_samples: int = HfArg(default=256, help="Evaluate on at most this number of sequences.")
    resume: bool = HfArg(default=False, help="Continue from the last complete checkpoint in --output_dir.")


def main() -> None:
    parser = HfArgumentParser((Arguments, TrainingArguments))
    parser.set_defaults(output_dir="outputs/run_clm", do_train=True, do_eval=True, num_train_epochs=0.3)
    parser.set_defaults(per_device_train_batch_size=4, learning_rate=2e-3, weight_decay=0.1, warmup_steps=0.05)
    parser.set_defaults(logging_steps=0.05, use_cpu=not torch.accelerator.is_available())
    args, training = parser.parse_args_into_dataclasses()
    set_seed(training.seed)
    data = load_data(args, training.seed)
    model, tokenizer = load_model(args, data["train"][args.text_column])
    # transformers accepts texts that are longer than a model with RoPE was trained for, but results are poor
    if args.block_size > (limit := getattr(model.config, "max_position_embeddings", args.block_size)):
        raise ValueError(f"--block_size {args.block_size}: the model takes at most {limit} tokens.")
    end = "\n" if (args.train_file or "").endswith(".txt") else tokenizer.eos_token or ""  # rows of .txt are lines

    def group(rows: dict[str, list]) -> dict[str, list]:
        texts = [text + end for text in rows[args.text_column]]
        ids = [token for text in tokenizer(texts, add_special_tokens=False, verbose=False).input_ids for token in text]
        blocks = [ids[stop - args.block_size : stop] for stop in range(args.block_size, len(ids) + 1, args.block_size)]
        return {"input_ids": blocks, "labels": blocks}

    with training.main_process_first():
        blocks = data.map(group, batched=True, remove_columns=data["train"].column_names)
    for split, limit in {"train": args.max_train_samples, "validation": args.max_eval_samples}.items():
        blocks[split] = blocks[split].shuffle(training.seed).select(range(len(blocks[split]))[:limit])
    # weight decay for matrices only: Trainer itself would also decay the gains of simplified blocks
    optimizer = Trainer.get_optimizer_cls_and_kwargs(training, model)
    optimizer[1]["params"] = hea.optimizer_groups(model, training.weight_decay)
    options = {"processing_class": tokenizer, "optimizer_cls_and_kwargs": optimizer}
    trainer = Trainer(model, training, default_data_collator, *blocks.values(), **options)
    if training.do_train:
        resume = training.resume_from_checkpoint or args.resume and hea.last_complete_checkpoint(training.output_dir)
        trainer.save_metrics("train", trainer.train(resume).metrics)
        trainer.save_model()
    if training.do_eval:
        texts = tokenizer.batch_decode(blocks["validation"][:]["input_ids"], skip_special_tokens=True)
        metrics = trainer.evaluate()
        bits = metrics["eval_loss"] / math.log(2) * args.block_size * len(texts)
        metrics |= {"perplexity": math.exp(metrics["eval_loss"]), "bits_per_byte": bits / len("".join(texts).encode())}
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
        prompt = tokenizer(texts[0][: args.block_size // 4], return_tensors="pt").to(model.device)
        ids = model.generate(**prompt, max_length=args.block_size, do_sample=True, synced_gpus=training.world_size > 1)
        if trainer.is_world_process_zero():
            print(tokenizer.decode(ids[0]))


def load_data(args: Arguments, seed: int) -> DatasetDict:
    """Return `train` and `validation`."""
    files = {"train": args.train_file, "validation": args.validation_file} if args.validation_file else args.train_file
    kind = "text" if (args.train_file or "").endswith(".txt") else "json"
    if files or args.dataset_name:
        data = load_dataset(args.dataset_name or kind, args.dataset_config_name, data_files=files)
    else:
        from example_data import python_sources

        data = python_sources()
    if len(data) == 1:
        data = data["train"].train_test_split(0.1, seed=seed, shuffle=kind != "text")
    return DatasetDict(train=data["train"], validation=data["validation" if "validation" in data else "test"])


def load_model(args: Arguments, texts: list[str]) -> tuple:
    """Return the checkpoint, or a new model, and its tokenizer."""
    if name := args.model_name_or_path:
        model, tokenizer = AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    else:
        from example_data import new_clm

        model, tokenizer = new_clm(args.model_type, args.config_overrides, args.tokenizer_name, texts, args.block_size)
    if args.attention_window:
        hea.sparsify(model, Band(left=args.attention_window, right=0) | GlobalTokens([0, 1, 2, 3]))
    return model, tokenizer


if __name__ == "__main__":
    main()
