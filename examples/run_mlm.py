"""Train a masked language model, and make it read thousands of tokens.

    pip install ".[train]"
    python examples/run_mlm.py
    python examples/run_mlm.py --model_name_or_path outputs/run_mlm --max_seq_length 4096 --output_dir outputs/long_mlm

The first trains a real BERT and a new head on Python's documentation, 5 minutes of one core: 5.6 nats a masked token
of held-out pages, where token frequencies give 6.7. The second makes it read 4,096 tokens, in windows of 512. Others:

    python examples/run_mlm.py --model_type sparse_transformer --attention_window 256 --learning_rate 1e-3
    torchrun --nproc_per_node 8 examples/run_mlm.py --model_name_or_path roberta-base --train_file my.jsonl
"""

from dataclasses import dataclass

import torch
from datasets import DatasetDict, load_dataset
from transformers import AutoConfig, AutoModelForMaskedLM, AutoTokenizer, DataCollatorForLanguageModeling
from transformers.data.data_collator import default_data_collator as collator
from transformers.hf_argparser import HfArg, HfArgumentParser
from transformers.trainer import Trainer
from transformers.training_args import TrainingArguments

import hf_efficient_attn as hea
from hf_efficient_attn.training import last_complete_checkpoint, script_inputs

SHAPE = {"hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 6}
SHAPE |= {"is_causal": False}
# the others have positions of their own
ROPE = ("sparse_transformer", "simplified_transformer", "adaptive_span", "efficient_reformer", "routing_transformer")


@dataclass
class Arguments:
    model_name_or_path: str | None = HfArg(default=None, help="Checkpoint. Default: a small BERT without a head.")
    model_type: str | None = HfArg(default=None, help="Of a new model: sparse_transformer, adaptive_span …")
    tokenizer_name: str | None = HfArg(default=None, help="Default: the checkpoint's, or a new one of the text.")
    attention_window: int | None = HfArg(default=None, help="Tokens read around each. Made long: 512; default: all.")
    dataset_name: str | None = HfArg(default=None, help="Dataset of the Hub. Default: documentation of Python.")
    dataset_config_name: str | None = HfArg(default=None, help="Configuration of that dataset.")
    train_file: str | None = HfArg(default=None, help="A .json or .jsonl file instead, a document a row.")
    validation_file: str | None = HfArg(default=None, help="Its like, to evaluate on. Default: a tenth of the rows.")
    text_column: str = HfArg(default="text", help="Column of the text.")
    max_seq_length: int = HfArg(default=512, help="Tokens read at once; a checkpoint of fewer positions is made long.")
    max_train_samples: int | None = HfArg(default=None, help="Train on so many blocks. Default data: 163,840 tokens.")
    max_eval_samples: int = HfArg(default=16, help="Evaluate on at most so many blocks.")
    resume: bool = HfArg(default=False, help="Go on from the last complete checkpoint.")


# projects only masked tokens to the vocabulary, which halves the time and the memory of a step
class MaskedTrainer(Trainer):
    def compute_loss(self, model, inputs, *args, **kwargs):
        masked = inputs["labels"] != -100
        head = self.accelerator.unwrap_model(model).get_output_embeddings()
        with head.register_forward_pre_hook(lambda _, states: (states[0][masked],)):
            return super().compute_loss(model, {**inputs, "labels": inputs["labels"][masked]}, *args, **kwargs)


@script_inputs.refusals_as_sentences()
def main() -> None:
    parser = HfArgumentParser((Arguments, TrainingArguments))
    parser.set_defaults(output_dir="outputs/run_mlm", do_train=True, do_eval=True, eval_on_start=True, warmup_steps=0.1)
    parser.set_defaults(num_train_epochs=1, per_device_train_batch_size=1, per_device_eval_batch_size=1)
    parser.set_defaults(learning_rate=3e-4, logging_steps=10, use_cpu=not torch.accelerator.is_available())
    args, training = parser.parse_args_into_dataclasses()
    script_inputs.check_arguments(args)
    if training.do_predict:
        raise SystemExit("--do_predict: nothing is predicted here; --do_eval evaluates on the rows for validation.")
    torch.manual_seed(training.seed)
    data = load_data(args, training.seed)
    model, tokenizer = load_model(args, data)

    def group(rows: dict[str, list]) -> dict[str, list]:
        texts = tokenizer([text or "" for text in rows[args.text_column]], add_special_tokens=False, verbose=False)
        # some tokenizers have no such tokens
        first, last = ([token] * (token is not None) for token in (tokenizer.cls_token_id, tokenizer.sep_token_id))
        size = args.max_seq_length - len(first + last)
        ids = [token for text in texts.input_ids for token in text + last]
        return {"input_ids": [first + ids[end - size : end] + last for end in range(size, len(ids) + 1, size)]}

    if tokenizer.mask_token is None or args.max_seq_length < 3:
        raise SystemExit("A tokenizer with a mask token, and a --max_seq_length of at least 3 are needed.")
    with training.main_process_first():
        blocks = data.map(group, batched=True, remove_columns=data["train"].column_names)
    text = blocks["train"]
    for split, limit in {"train": args.max_train_samples, "validation": args.max_eval_samples}.items():
        blocks[split] = blocks[split].shuffle(training.seed).select(range(len(blocks[split]))[:limit])
        if not len(blocks[split]):
            raise SystemExit(f"There are no {split} blocks: give more text, samples, or a smaller --max_seq_length.")
    mask = DataCollatorForLanguageModeling(tokenizer, seed=training.seed)
    # the same tokens at every evaluation, others whenever a block is trained on
    blocks["validation"] = blocks["validation"].map(lambda rows: mask(rows["input_ids"]), batched=True)
    blocks["train"] = blocks["train"].with_transform(lambda rows: mask(rows["input_ids"]))
    chosen = Trainer.get_optimizer_cls_and_kwargs(training, model)
    # Trainer itself would decay the gains of simplified blocks
    chosen[1]["params"] = hea.optimizer_groups(model, training.weight_decay)
    trainer = MaskedTrainer(model, training, collator, *blocks.values(), tokenizer, optimizer_cls_and_kwargs=chosen)
    if training.do_train:
        resume = training.resume_from_checkpoint or args.resume and last_complete_checkpoint(training.output_dir)
        trainer.save_metrics("train", trainer.train(resume).metrics)
        trainer.save_model()
    if training.do_eval:
        labels = torch.tensor(blocks["validation"][:]["labels"])
        counts = torch.tensor(text[:1000]["input_ids"]).flatten().bincount(minlength=len(tokenizer)) + 1
        losses = -(counts / counts.sum()).log()[labels[labels != -100]]
        metrics = trainer.evaluate() | {"loss_of_frequencies": losses.mean().item()}
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)


def load_data(args: Arguments, seed: int) -> DatasetDict:
    """Return `train` and `validation`, a document a row."""
    if args.dataset_name:
        data = load_dataset(args.dataset_name, args.dataset_config_name)
    elif args.train_file:
        data = script_inputs.load_files(args, ".json", ".jsonl")
    else:
        from example_data import python_documentation

        data = python_documentation()
        blocks = 163_840 // args.max_seq_length
        args.max_train_samples = blocks if args.max_train_samples is None else args.max_train_samples
    script_inputs.check_columns(args, data["train"].column_names, "text_column")
    return script_inputs.split_rows(data, seed)


def load_model(args: Arguments, data: DatasetDict) -> tuple:
    """Return the checkpoint, made long if it is shorter than the blocks, or a new model, and its tokenizer."""
    if args.model_name_or_path and args.model_type:
        raise SystemExit("--model_type is for a new model, --model_name_or_path is a checkpoint: give one of them.")
    if not (args.model_name_or_path or (args.model_type and args.tokenizer_name)):
        from example_data import new_tokenizer, pretrained_bert
    name, length = args.model_name_or_path or (None if args.model_type else pretrained_bert()), args.max_seq_length
    own = args.tokenizer_name or name
    tokenizer = AutoTokenizer.from_pretrained(own) if own else new_tokenizer(data["train"][args.text_column], 8192)
    fields, auto = {"vocab_size": len(tokenizer), "max_position_embeddings": length, **SHAPE}, AutoModelForMaskedLM
    fields |= {"position_embedding_type": "rope"} if args.model_type in ROPE else {}
    model = auto.from_pretrained(name) if name else auto.from_config(AutoConfig.for_model(args.model_type, **fields))
    if length > (script_inputs.num_positions(model.config) or length):
        tokenizer.model_max_length = length
        model = hea.convert(model, max_position_embeddings=length, attention_window=args.attention_window)
    elif window := args.attention_window:
        hea.sparsify(model, hea.patterns.Band(window // 2, window // 2))
    return model, tokenizer


if __name__ == "__main__":
    main()
