"""Train a causal language model, from random weights or from a checkpoint.

    pip install ".[train]"
    python examples/run_clm.py

trains a simplified Transformer (block `sas_p`) on the source of Python's standard library, 5 minutes of one core, to
1.55 bits per byte of held-out files, which `xz -9` packs into 1.74. Another family; a checkpoint; text of your own:

    python examples/run_clm.py --model_type llama --config_overrides "hidden_size=96,num_hidden_layers=4"
    python examples/run_clm.py --model_name_or_path gpt2 --attention_window 256 --train_file my.jsonl
    torchrun --nproc_per_node 8 examples/run_clm.py --dataset_name wikitext --dataset_config_name wikitext-103-raw-v1
"""

import lzma
import math
from dataclasses import dataclass

import torch
from datasets import DatasetDict, load_dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, default_data_collator, set_seed
from transformers.hf_argparser import HfArg, HfArgumentParser
from transformers.trainer import Trainer
from transformers.training_args import TrainingArguments

import hf_efficient_attn as hea
from hf_efficient_attn.patterns import Band, GlobalTokens
from hf_efficient_attn.training import last_complete_checkpoint, script_inputs

SHAPE = {"hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 6}
FAMILIES = {
    "simplified_transformer": {"position_embedding_type": "rope"},
    "sparse_transformer": {"position_embedding_type": "rope", "norm_position": "pre", "is_causal": True},
    "adaptive_span": {"position_embedding_type": "rope", "norm_position": "pre", "span_limit": 1024},
}


@dataclass
class Arguments:
    model_name_or_path: str | None = HfArg(default=None, help="Checkpoint. Default: a new model, random weights.")
    model_type: str | None = HfArg(default=None, help="Family of a new model. Default: simplified_transformer.")
    config_overrides: str | None = HfArg(default=None, help='Fields of either: "hidden_size=96,num_hidden_layers=4".')
    tokenizer_name: str | None = HfArg(default=None, help="Default: the checkpoint's, or a new one of the text.")
    attention_window: int | None = HfArg(default=None, help="Tokens read the first four, and so many before them.")
    dataset_name: str | None = HfArg(default=None, help="Dataset of the Hub. Default: Python's standard library.")
    dataset_config_name: str | None = HfArg(default=None, help="Configuration of that dataset.")
    train_file: str | None = HfArg(default=None, help="A .txt, .json or .jsonl file instead.")
    validation_file: str | None = HfArg(default=None, help="Its like, to evaluate on. Default: a tenth of the rows.")
    text_column: str = HfArg(default="text", help="Column of the text.")
    block_size: int = HfArg(default=256, help="Tokens that are read at once.")
    max_train_samples: int | None = HfArg(default=None, help="Train on at most so many blocks.")
    max_eval_samples: int = HfArg(default=256, help="Evaluate on at most so many blocks.")
    resume: bool = HfArg(default=False, help="Go on from the last complete checkpoint.")


@script_inputs.refusals_as_sentences()
def main() -> None:
    parser = HfArgumentParser((Arguments, TrainingArguments))
    parser.set_defaults(output_dir="outputs/run_clm", do_train=True, do_eval=True, do_predict=True, report_to="none")
    parser.set_defaults(num_train_epochs=0.3, per_device_train_batch_size=4, learning_rate=2e-3, weight_decay=0.1)
    parser.set_defaults(warmup_steps=0.05, logging_steps=0.05, use_cpu=not torch.accelerator.is_available())
    args, training = parser.parse_args_into_dataclasses()
    script_inputs.check_arguments(args)
    set_seed(training.seed)
    lines = (args.train_file or "").endswith(".txt")
    data = load_data(args, lines, training.seed)
    model, tokenizer = load_model(args, data["train"][args.text_column])

    def group(rows: dict[str, list]) -> dict[str, list]:
        texts = [(text or "") + ("\n" if lines else tokenizer.eos_token or "") for text in rows[args.text_column]]
        ids = [token for text in tokenizer(texts, add_special_tokens=False, verbose=False).input_ids for token in text]
        blocks = [ids[end - args.block_size : end] for end in range(args.block_size, len(ids) + 1, args.block_size)]
        return {"input_ids": blocks, "labels": blocks}

    with training.main_process_first():
        blocks = data.map(group, batched=True, remove_columns=data["train"].column_names)
    for split, limit in {"train": args.max_train_samples, "validation": args.max_eval_samples}.items():
        blocks[split] = blocks[split].shuffle(training.seed).select(range(len(blocks[split]))[:limit])
        if not len(blocks[split]):
            raise SystemExit(f"There are no {split} blocks: more text, samples, or a smaller --block_size are needed.")
    script_inputs.check_lengths(blocks, model, tokenizer, "block_size")
    chosen = Trainer.get_optimizer_cls_and_kwargs(training, model)
    # Trainer itself would decay the gains of simplified blocks
    chosen[1]["params"] = hea.optimizer_groups(model, training.weight_decay)
    options = {"processing_class": tokenizer, "optimizer_cls_and_kwargs": chosen}
    trainer = Trainer(model, training, default_data_collator, *blocks.values(), **options)
    if training.do_train:
        resume = training.resume_from_checkpoint or args.resume and last_complete_checkpoint(training.output_dir)
        trainer.save_metrics("train", trainer.train(resume).metrics)
        trainer.save_model()
    texts = tokenizer.batch_decode(blocks["validation"][:]["input_ids"], skip_special_tokens=True)
    if training.do_eval:
        metrics = trainer.evaluate()
        bits = metrics["eval_loss"] / math.log(2) * args.block_size * len(texts)
        metrics |= {"perplexity": math.exp(metrics["eval_loss"]), "bits_per_byte": bits / len("".join(texts).encode())}
        whole = "".join(filter(None, data["validation"][args.text_column])).encode()
        metrics["bits_per_byte_of_xz"] = 8 * len(lzma.compress(whole, preset=9)) / len(whole)
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
    if training.do_predict:
        prompt = tokenizer(texts[0][: args.block_size // 4], return_tensors="pt").to(model.device)
        ids = model.generate(**prompt, max_length=args.block_size, do_sample=True, synced_gpus=training.world_size > 1)
        if trainer.is_world_process_zero():
            print(tokenizer.decode(ids[0]))


def load_data(args: Arguments, lines: bool, seed: int) -> DatasetDict:
    """Return `train` and `validation`; a row is a document, or a line of a file."""
    if args.dataset_name:
        data = load_dataset(args.dataset_name, args.dataset_config_name)
    elif args.train_file:
        data = script_inputs.load_files(args, ".txt", ".json", ".jsonl")
    else:
        from example_data import python_sources

        data = python_sources()
    script_inputs.check_columns(args, data["train"].column_names, "text_column")
    return script_inputs.split_rows(data, seed, shuffle=not lines)


def load_model(args: Arguments, texts: list[str]) -> tuple:
    """Return the checkpoint, or a new model, and its tokenizer."""
    source, family, auto = args.model_name_or_path, args.model_type or "simplified_transformer", AutoModelForCausalLM
    if source and args.model_type:
        raise SystemExit("--model_type is for a new model, --model_name_or_path is a checkpoint: give one of them.")
    if not (name := args.tokenizer_name or source):
        from example_data import new_tokenizer
    tokenizer = AutoTokenizer.from_pretrained(name) if name else new_tokenizer(texts, vocab_size=4096, ends="$A")
    fields = {"vocab_size": len(tokenizer), **SHAPE, **FAMILIES.get(family, {})}
    try:
        config = AutoConfig.from_pretrained(source) if source else AutoConfig.for_model(family, **fields)
        if args.config_overrides:
            config.update_from_string(args.config_overrides)
    except (TypeError, ValueError) as error:
        raise SystemExit(f"--model_type or --config_overrides: {str(error)[:100]}") from error
    model = auto.from_pretrained(source, config=config) if source else auto.from_config(config)
    if args.attention_window:
        hea.sparsify(model, Band(left=args.attention_window, right=0) | GlobalTokens([0, 1, 2, 3]))
    return model, tokenizer


if __name__ == "__main__":
    main()
