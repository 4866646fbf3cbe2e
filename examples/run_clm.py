"""Train a causal language model, from random weights or from a checkpoint.

    pip install ".[train]"
    python examples/run_clm.py

trains a simplified Transformer (block `sas_p`) on the source of Python's standard library, six minutes on one core, to
1.55 bits per byte of held-out files, which `xz -9` packs into 1.74. Another family; a checkpoint; text of your own:

    python examples/run_clm.py --model_type llama --config_overrides "hidden_size=96,num_hidden_layers=4"
    python examples/run_clm.py --model_name_or_path gpt2 --attention_window 256 --train_file my.jsonl
    torchrun --nproc_per_node 8 examples/run_clm.py --dataset_name wikitext --dataset_config_name wikitext-103-raw-v1
"""

import math
from dataclasses import dataclass

from datasets import DatasetDict, load_dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.hf_argparser import HfArg, HfArgumentParser

import hf_efficient_attn as hea
from hf_efficient_attn.patterns import Band, GlobalTokens

SHAPE = {"hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 6}
FAMILIES = {
    "simplified_transformer": {"position_embedding_type": "rope"},
    "sparse_transformer": {"position_embedding_type": "rope", "norm_position": "pre", "is_causal": True},
    "adaptive_span": {"position_embedding_type": "rope", "norm_position": "pre", "span_limit": 1024},
}


@dataclass
class Arguments:
    """What is trained on what."""

    model_name_or_path: str | None = HfArg(default=None, help="Checkpoint. Default: a new model, random weights.")
    model_type: str = HfArg(default="simplified_transformer", help="Family of a new model: sparse_transformer, …")
    config_overrides: str | None = HfArg(default=None, help='Its fields: "hidden_size=96,num_hidden_layers=4".')
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


def main() -> None:
    parser = HfArgumentParser((Arguments, TrainingArguments))
    parser.set_defaults(output_dir="outputs/run_clm", num_train_epochs=0.3, learning_rate=2e-3, weight_decay=0.1)
    parser.set_defaults(per_device_train_batch_size=4, warmup_steps=0.05, logging_steps=0.05, report_to="none")
    args, training = parser.parse_args_into_dataclasses()
    set_seed(training.seed)
    lines = (args.train_file or "").endswith(".txt")
    data = load_data(args, lines, training.seed)
    model, tokenizer = load_model(args, data)

    def group(rows: dict[str, list]) -> dict[str, list]:
        texts = [text + ("\n" if lines else tokenizer.eos_token) for text in rows[args.text_column]]
        texts = tokenizer(texts, add_special_tokens=False, verbose=False).input_ids
        ids, size = [token for text in texts for token in text], args.block_size
        blocks = [ids[end - size : end] for end in range(size, len(ids) + 1, size)]
        return {"input_ids": blocks, "labels": blocks}

    with training.main_process_first():
        blocks = data.map(group, batched=True, remove_columns=data["train"].column_names)
    for split, limit in {"train": args.max_train_samples, "validation": args.max_eval_samples}.items():
        if not len(blocks[split]):
            raise SystemExit(f"The {split} text is shorter than a block of {args.block_size} tokens (--block_size).")
        blocks[split] = blocks[split].shuffle(training.seed).take(min(limit or math.inf, len(blocks[split])))
    optimizer, options = Trainer.get_optimizer_cls_and_kwargs(training, model)
    trainer = Trainer(
        model,
        training,
        train_dataset=blocks["train"],
        eval_dataset=blocks["validation"],
        processing_class=tokenizer,
        data_collator=default_data_collator,
        # Trainer itself would decay the gains of simplified blocks
        optimizers=(optimizer(hea.optimizer_groups(model, training.weight_decay), **options), None),
    )
    last = hea.last_complete_checkpoint(training.output_dir) if args.resume else None
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint or last)
    trainer.save_model()
    metrics = trainer.evaluate()
    texts = tokenizer.batch_decode(blocks["validation"][:]["input_ids"], skip_special_tokens=True)
    bits = metrics["eval_loss"] / math.log(2) * args.block_size * len(texts)
    metrics |= {"perplexity": math.exp(metrics["eval_loss"]), "bits_per_byte": bits / len("".join(texts).encode())}
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    if trainer.is_world_process_zero():
        prompt = tokenizer(texts[0][: args.block_size // 4], return_tensors="pt").to(model.device)
        print(tokenizer.decode(model.generate(**prompt, max_length=args.block_size, do_sample=True)[0]))
    if training.push_to_hub:
        trainer.push_to_hub()


def load_data(args: Arguments, lines: bool, seed: int) -> DatasetDict:
    """Return `train` and `validation`; a row is a document, or a line of a file."""
    if args.dataset_name:
        data = load_dataset(args.dataset_name, args.dataset_config_name)
    elif args.train_file:
        files = {"train": args.train_file} | ({"validation": args.validation_file} if args.validation_file else {})
        data = load_dataset("text" if lines else "json", data_files=files)
    else:
        from example_data import python_sources

        data = python_sources()
    if "validation" not in data:
        data = data["train"].train_test_split(0.1, seed=seed, shuffle=not lines)
    return DatasetDict(train=data["train"], validation=data.get("validation") or data["test"])


def load_model(args: Arguments, data: DatasetDict) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the checkpoint, or a new model, and its tokenizer."""
    if name := args.tokenizer_name or args.model_name_or_path:
        tokenizer = AutoTokenizer.from_pretrained(name)
    else:
        from example_data import new_tokenizer

        tokenizer = new_tokenizer(data["train"][args.text_column], vocab_size=4096, ends="$A")
    if args.model_name_or_path:
        model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path)
    else:
        fields = SHAPE | FAMILIES.get(args.model_type, {})
        config = AutoConfig.for_model(args.model_type, vocab_size=len(tokenizer), **fields)
        if args.config_overrides:
            config.update_from_string(args.config_overrides)
        model = AutoModelForCausalLM.from_config(config)
    if args.attention_window:
        hea.sparsify(model, Band(left=args.attention_window, right=0) | GlobalTokens([0, 1, 2, 3]))
    return model, tokenizer


if __name__ == "__main__":
    main()
