"""Train a masked language model that reads thousands of tokens, from a short checkpoint or from random weights.

    pip install ".[train]"
    python examples/run_mlm.py

makes a real BERT of 512 positions read 4,096 tokens, in windows of 512, and trains it and its new head on masked tokens
of Python's documentation. So few steps teach little more than how frequent tokens are: from 10.7 to 6.7 nats a token,
where frequencies alone give 6.5. A checkpoint that has its head; a new model; text of your own, a document a row:

    python examples/run_mlm.py --model_name_or_path roberta-base --train_file my.jsonl --learning_rate 3e-5
    python examples/run_mlm.py --model_type sparse_transformer --attention_window 256 --learning_rate 1e-3
    torchrun --nproc_per_node 8 examples/run_mlm.py --dataset_name wikitext --dataset_config_name wikitext-103-raw-v1
"""

from dataclasses import dataclass

from datasets import DatasetDict, load_dataset
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.hf_argparser import HfArg, HfArgumentParser

import hf_efficient_attn as hea
from hf_efficient_attn.patterns import Band

SHAPE = {"hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 6}
SHAPE |= {"is_causal": False, "position_embedding_type": "rope"}


@dataclass
class Arguments:
    """What is trained on what."""

    model_name_or_path: str | None = HfArg(default=None, help="Checkpoint, made long. Default: a small BERT.")
    model_type: str | None = HfArg(default=None, help="Of a new model: sparse_transformer, adaptive_span …")
    attention_window: int | None = HfArg(default=None, help="Tokens read so many around them. Made long: 512.")
    dataset_name: str | None = HfArg(default=None, help="Dataset of the Hub. Default: documentation of Python.")
    dataset_config_name: str | None = HfArg(default=None, help="Configuration of that dataset.")
    train_file: str | None = HfArg(default=None, help="A .json or .jsonl file instead, a document a row.")
    validation_file: str | None = HfArg(default=None, help="Its like, to evaluate on. Default: a tenth of the rows.")
    text_column: str = HfArg(default="text", help="Column of the text.")
    max_seq_length: int = HfArg(default=4096, help="Tokens that are read at once; documents are packed into them.")
    mlm_probability: float = HfArg(default=0.15, help="Share of the tokens that are masked.")
    max_train_samples: int | None = HfArg(default=None, help="Train on at most so many blocks.")
    max_eval_samples: int = HfArg(default=4, help="Evaluate on at most so many blocks.")
    resume: bool = HfArg(default=False, help="Go on from the last complete checkpoint.")


class MaskedTokensTrainer(Trainer):
    """Projects only masked tokens to the vocabulary, which halves the time and the memory of a step."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        masked = inputs["labels"] != -100
        head = self.accelerator.unwrap_model(model).get_output_embeddings()
        with head.register_forward_pre_hook(lambda _, states: (states[0][masked],)):
            return super().compute_loss(model, {**inputs, "labels": inputs["labels"][masked]}, *args, **kwargs)


def main() -> None:
    parser = HfArgumentParser((Arguments, TrainingArguments))
    parser.set_defaults(output_dir="outputs/run_mlm", num_train_epochs=0.14, learning_rate=5e-4, eval_on_start=True)
    parser.set_defaults(per_device_train_batch_size=1, per_device_eval_batch_size=1, warmup_steps=0.1, logging_steps=5)
    args, training = parser.parse_args_into_dataclasses()
    set_seed(training.seed)
    data = load_data(args, training.seed)
    model, tokenizer = load_model(args, data)

    def group(rows: dict[str, list]) -> dict[str, list]:
        texts = tokenizer(rows[args.text_column], add_special_tokens=False, verbose=False).input_ids
        first, last, size = [tokenizer.cls_token_id], [tokenizer.sep_token_id], args.max_seq_length - 2
        ids = [token for text in texts for token in text + last]
        return {"input_ids": [first + ids[end - size : end] + last for end in range(size, len(ids) + 1, size)]}

    with training.main_process_first():
        blocks = data.map(group, batched=True, remove_columns=data["train"].column_names)
    for split, limit in {"train": args.max_train_samples, "validation": args.max_eval_samples}.items():
        rows = blocks[split].shuffle(training.seed)
        if not len(rows):
            raise SystemExit(f"The {split} text is shorter than {args.max_seq_length} tokens (--max_seq_length).")
        blocks[split] = rows.take(min(limit or len(rows), len(rows)))
    mask = DataCollatorForLanguageModeling(tokenizer, mlm_probability=args.mlm_probability, seed=training.seed)
    # the same tokens before and after training
    blocks["validation"] = blocks["validation"].map(lambda rows: mask(rows["input_ids"]), batched=True)
    optimizer, options = Trainer.get_optimizer_cls_and_kwargs(training, model)
    trainer = MaskedTokensTrainer(
        model,
        training,
        train_dataset=blocks["train"],
        eval_dataset=blocks["validation"],
        processing_class=tokenizer,
        data_collator=lambda rows: default_data_collator(rows) if "labels" in rows[0] else mask(rows),
        # Trainer itself would decay the gains of simplified blocks
        optimizers=(optimizer(hea.optimizer_groups(model, training.weight_decay), **options), None),
    )
    last = hea.last_complete_checkpoint(training.output_dir) if args.resume else None
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint or last)
    trainer.save_model()
    metrics = trainer.evaluate()
    metrics["first_eval_loss"] = next(entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry)
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    if training.push_to_hub:
        trainer.push_to_hub()


def load_data(args: Arguments, seed: int) -> DatasetDict:
    """Return `train` and `validation`, a document a row."""
    if args.dataset_name:
        data = load_dataset(args.dataset_name, args.dataset_config_name)
    elif args.train_file:
        files = {"train": args.train_file} | ({"validation": args.validation_file} if args.validation_file else {})
        data = load_dataset("json", data_files=files)
    else:
        from example_data import python_documentation

        data = python_documentation()
    parts = data if "validation" in data else data["train"].train_test_split(0.1, seed=seed)
    return DatasetDict(train=parts["train"], validation=parts.get("validation") or parts["test"])


def load_model(args: Arguments, data: DatasetDict) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the checkpoint, made long, or a new model, and its tokenizer."""
    if args.model_type or not args.model_name_or_path:
        from example_data import new_tokenizer, pretrained_bert
    if args.model_type:
        tokenizer = new_tokenizer(data["train"][args.text_column], vocab_size=8192)
        config = AutoConfig.for_model(args.model_type, vocab_size=len(tokenizer), **SHAPE)
        model = AutoModelForMaskedLM.from_config(config)
        if args.attention_window:
            hea.sparsify(model, Band(args.attention_window // 2, args.attention_window // 2))
        return model, tokenizer
    name = args.model_name_or_path or pretrained_bert()
    model, tokenizer = AutoModelForMaskedLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    if args.max_seq_length > model.config.max_position_embeddings:
        tokenizer.model_max_length = args.max_seq_length
        model = hea.convert(model, max_position_embeddings=args.max_seq_length, attention_window=args.attention_window)
    return model, tokenizer


if __name__ == "__main__":
    main()
