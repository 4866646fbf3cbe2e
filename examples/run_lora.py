"""Give a pretrained decoder a sparse attention pattern, and recover quality with LoRA.

    pip install ".[train]"
    python examples/run_lora.py

The command lets every token of SmolLM2 (135 million parameters, 93 MB, downloaded once) attend to only the 28 tokens
before it and the first four, and trains LoRA adapters on the source code of Python's standard library. On held-out
source code the perplexity is 8.7 with full attention, 17.6 with this narrow pattern, and 14.8 after training on 64
sequences of 512 tokens. That takes 4 minutes on a core that computes in bfloat16, with `--bf16 --use_cpu`. To use your
own model and text:

    python examples/run_lora.py --model_name_or_path HuggingFaceTB/SmolLM2-360M --train_file my.jsonl --left 508 --merge
    torchrun --nproc_per_node 8 examples/run_lora.py --dataset_name imdb --block_size 8192 --left 1020

`outputs/run_lora` holds the adapter, and `outputs/run_lora/base` the model with its pattern. After `import
hf_efficient_attn`, `AutoModelForCausalLM` and PEFT's `AutoPeftModelForCausalLM` load both from the adapter's folder.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from datasets import DatasetDict, load_dataset
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, default_data_collator, set_seed
from transformers.hf_argparser import HfArg, HfArgumentParser
from transformers.trainer import Trainer
from transformers.training_args import TrainingArguments

import hf_efficient_attn as hea
from hf_efficient_attn.patterns import Band, GlobalTokens
from hf_efficient_attn.training import last_complete_checkpoint


@dataclass
class Arguments:
    model_name_or_path: str | None = HfArg(default=None, help="Decoder. Default: SmolLM2-135M.")
    dataset_name: str | None = HfArg(default=None, help="Dataset on the Hub. Default: source code of Python's library.")
    dataset_config_name: str | None = HfArg(default=None, help="Configuration of that dataset.")
    train_file: str | None = HfArg(default=None, help="Your training data: a .txt, .json, .jsonl or .csv file.")
    validation_file: str | None = HfArg(default=None, help="Your validation data. Default: a tenth of the rows.")
    text_column: str = HfArg(default="text", help="Column of the text.")
    block_size: int = HfArg(default=512, help="Length of the training sequences in tokens.")
    left: int = HfArg(default=28, help="Attend to this number of tokens before each token.")
    num_first: int = HfArg(default=4, help="Attend to this number of first tokens, too.")
    lora_rank: int = HfArg(default=16, help="Rank of the adapters.")
    merge: bool = HfArg(default=False, help="Also save the model with the adapters merged into its weights.")
    max_train_samples: int | None = HfArg(default=None, help="Limit of training sequences. Default data: 64.")
    max_eval_samples: int | None = HfArg(default=None, help="Limit of validation sequences. Default data: 16.")
    resume: bool = HfArg(default=False, help="Continue from the last complete checkpoint in --output_dir.")


def main() -> None:
    parser = HfArgumentParser((Arguments, TrainingArguments))
    parser.set_defaults(output_dir="outputs/run_lora", do_train=True, do_eval=True, report_to="none")
    parser.set_defaults(per_device_train_batch_size=1, per_device_eval_batch_size=1, gradient_accumulation_steps=2)
    parser.set_defaults(num_train_epochs=1, learning_rate=1e-3, warmup_steps=0.1, logging_steps=2)
    parser.set_defaults(save_strategy="epoch", use_cpu=not torch.accelerator.is_available())
    args, training = parser.parse_args_into_dataclasses()
    set_seed(training.seed)
    name, pattern = args.model_name_or_path, Band(args.left, 0) | GlobalTokens(list(range(args.num_first)))
    if not training.do_train:
        name = PeftConfig.from_pretrained(training.output_dir).base_model_name_or_path
    elif name is None:
        from example_data import pretrained_llama

        name = pretrained_llama()
    tokenizer, model = AutoTokenizer.from_pretrained(name), AutoModelForCausalLM.from_pretrained(name)
    # transformers computes longer texts than a model with RoPE was trained for, with poor results
    if args.block_size > (limit := getattr(model.config, "max_position_embeddings", args.block_size)):
        raise ValueError(f"--block_size {args.block_size}: the model takes at most {limit} tokens.")

    def group(rows: dict[str, list]) -> dict[str, list]:
        texts = [text + (tokenizer.eos_token or "") for text in rows[args.text_column]]
        ids = [token for text in tokenizer(texts, verbose=False).input_ids for token in text]
        blocks = [ids[end - args.block_size : end] for end in range(args.block_size, len(ids) + 1, args.block_size)]
        return {"input_ids": blocks, "labels": blocks}

    with training.main_process_first():
        data = load_data(args, training.seed)
        data = data.map(group, batched=True, remove_columns=data["train"].column_names)
    for split, limit in {"train": args.max_train_samples, "validation": args.max_eval_samples}.items():
        data[split] = data[split].shuffle(training.seed).select(range(len(data[split]))[:limit])
    if training.do_train:
        # an adapter names the folder of its base model, so the base must have the pattern there
        base = Path(training.output_dir, "base").resolve()
        with training.main_process_first(local=False):
            for part in (hea.sparsify(model, pattern), tokenizer) if training.should_save else ():
                part.save_pretrained(base)
            model = AutoModelForCausalLM.from_pretrained(base)
        lora = LoraConfig(r=args.lora_rank, lora_alpha=2 * args.lora_rank, task_type="CAUSAL_LM")
        model = get_peft_model(model, lora)
    else:
        pattern = model.config.attention_pattern
        model = PeftModel.from_pretrained(model, training.output_dir)
    trainer = Trainer(model, training, default_data_collator, *data.values(), processing_class=tokenizer)
    if training.do_train:
        resume = training.resume_from_checkpoint or args.resume and last_complete_checkpoint(training.output_dir)
        trainer.save_metrics("train", trainer.train(resume).metrics)
        trainer.save_model()
    if training.do_eval:
        losses = {"sparse_lora": trainer.evaluate()["eval_loss"]}
        with model.disable_adapter():
            losses["sparse"] = trainer.evaluate()["eval_loss"]
            hea.sparsify(model.get_base_model(), None)
            losses["dense"] = trainer.evaluate()["eval_loss"]
            hea.sparsify(model.get_base_model(), pattern)
        metrics = {f"{way}_perplexity": math.exp(loss) for way, loss in losses.items()}
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
    if args.merge and trainer.is_world_process_zero():
        for part in (model.merge_and_unload(), tokenizer):
            part.save_pretrained(Path(training.output_dir, "merged"))


def load_data(args: Arguments, seed: int) -> DatasetDict:
    """Return `train` and `validation`."""
    files = {"train": args.train_file, "validation": args.validation_file}
    files = {split: file for split, file in files.items() if file}
    if files or args.dataset_name:
        kind = {"txt": "text", "csv": "csv"}.get((args.train_file or "").split(".")[-1], "json")
        data = load_dataset(args.dataset_name or kind, args.dataset_config_name, data_files=files or None)
    else:
        from example_data import python_sources

        data = python_sources()
        args.max_train_samples, args.max_eval_samples = args.max_train_samples or 64, args.max_eval_samples or 16
    if len(data) == 1:
        data = data["train"].train_test_split(0.1, seed=seed)
    return DatasetDict(train=data["train"], validation=data["validation" if "validation" in data else "test"])


if __name__ == "__main__":
    main()
