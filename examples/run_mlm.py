"""Train a masked language model, and extend it to thousands of tokens.

    pip install ".[train]"  # if you copy this file, copy example_data, too: it has default data and makes new models
    python examples/run_mlm.py
    python examples/run_mlm.py --model_name_or_path outputs/run_mlm --output_dir outputs/long_mlm \\
        --max_seq_length 4096 --max_train_samples 40

The first command trains a pretrained BERT with a new head on Python's documentation. It takes minutes on one core and
reaches a loss of 5.6 on held-out pages; token frequencies alone give 6.7. The second command extends the trained model
to 4,096 tokens; each token attends to the 256 on each side of it. To train a new model on your own text:

    python examples/run_mlm.py --model_type sparse_transformer --config_overrides "hidden_size=96" --train_file my.jsonl
"""

from dataclasses import dataclass

import torch
from datasets import DatasetDict, load_dataset
from transformers import AutoModelForMaskedLM, AutoTokenizer, Trainer, TrainingArguments, set_seed
from transformers.data.data_collator import DataCollatorForLanguageModeling, default_data_collator
from transformers.hf_argparser import HfArg, HfArgumentParser

import hf_efficient_attn as hea


@dataclass
class Arguments:
    model_name_or_path: str | None = HfArg(default=None, help="Checkpoint. Default: a small pretrained BERT.")
    model_type: str | None = HfArg(default=None, help="Train a new model of this type: sparse_transformer, bert, ...")
    config_overrides: str | None = HfArg(default=None, help='For a new model: "hidden_size=384,num_hidden_layers=6".')
    tokenizer_name: str | None = HfArg(default=None, help="Tokenizer of a new model. Default: one trained on the text.")
    attention_window: int | None = HfArg(default=None, help="Attend to half this number of tokens on each side.")
    dataset_name: str | None = HfArg(default=None, help="Dataset on the Hub.")
    dataset_config_name: str | None = HfArg(default=None, help="Configuration of that dataset.")
    train_file: str | None = HfArg(default=None, help="Your training data: a .json or .jsonl file.")
    validation_file: str | None = HfArg(default=None, help="Your validation data. Default: a tenth of the rows.")
    text_column: str = HfArg(default="text", help="Column of the text.")
    max_seq_length: int = HfArg(default=512, help="Length of sequences in tokens. Shorter models are extended to it.")
    max_train_samples: int | None = HfArg(default=None, help="Limit of training sequences. Default data: 320.")
    max_eval_samples: int = HfArg(default=16, help="Evaluate on at most this number of sequences.")
    resume: bool = HfArg(default=False, help="Continue from the last complete checkpoint in --output_dir.")


def main() -> None:
    parser = HfArgumentParser((Arguments, TrainingArguments))
    parser.set_defaults(output_dir="outputs/run_mlm", do_train=True, do_eval=True, eval_on_start=True, warmup_steps=0.1)
    parser.set_defaults(num_train_epochs=1, per_device_train_batch_size=1, per_device_eval_batch_size=1)
    parser.set_defaults(learning_rate=3e-4, logging_steps=10, use_cpu=not torch.accelerator.is_available())
    args, training = parser.parse_args_into_dataclasses()
    set_seed(training.seed)
    data = load_data(args, training.seed)
    model, tokenizer = load_model(args, data["train"][args.text_column])

    def group(rows: dict[str, list]) -> dict[str, list]:
        first, last = [tokenizer.cls_token_id], [tokenizer.sep_token_id]
        texts = tokenizer(rows[args.text_column], add_special_tokens=False, verbose=False).input_ids
        ids, size = [token for text in texts for token in text + last], args.max_seq_length - 2
        return {"input_ids": [first + ids[end - size : end] + last for end in range(size, len(ids) + 1, size)]}

    with training.main_process_first():
        blocks = data.map(group, batched=True, remove_columns=data["train"].column_names)
    counts = torch.tensor(blocks["train"][:1000]["input_ids"]).flatten().bincount(minlength=len(tokenizer)) + 1
    for split, limit in {"train": args.max_train_samples, "validation": args.max_eval_samples}.items():
        blocks[split] = blocks[split].shuffle(training.seed).select(range(len(blocks[split]))[:limit])
    mask = DataCollatorForLanguageModeling(tokenizer, seed=training.seed)
    blocks["validation"] = blocks["validation"].map(lambda rows: mask(rows["input_ids"]), batched=True)  # masked once
    blocks["train"] = blocks["train"].with_transform(lambda rows: mask(rows["input_ids"]))  # masked again at each use
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
        labels = torch.tensor(blocks["validation"][:]["labels"])
        losses = -(counts / counts.sum()).log()[labels[labels != -100]]
        metrics = trainer.evaluate() | {"loss_of_frequencies": losses.mean().item()}
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)


def load_data(args: Arguments, seed: int) -> DatasetDict:
    """Return `train` and `validation`, one document per row."""
    files = {"train": args.train_file, "validation": args.validation_file} if args.validation_file else args.train_file
    if files or args.dataset_name:
        data = load_dataset(args.dataset_name or "json", args.dataset_config_name, data_files=files)
    else:
        from example_data import python_documentation

        data, args.max_train_samples = python_documentation(), args.max_train_samples or 320
    if len(data) == 1:
        data = data["train"].train_test_split(0.1, seed=seed)
    return DatasetDict(train=data["train"], validation=data["validation" if "validation" in data else "test"])


def load_model(args: Arguments, texts: list[str]) -> tuple:
    """Return the checkpoint, extended to `max_seq_length`, or a new model, and its tokenizer."""
    window, length = args.attention_window, args.max_seq_length
    if args.model_type:
        from example_data import new_mlm

        model, tokenizer = new_mlm(args.model_type, args.config_overrides, args.tokenizer_name, texts, length)
    else:
        if args.model_name_or_path is None:
            from example_data import pretrained_bert
        name = args.model_name_or_path or pretrained_bert()
        model, tokenizer = AutoModelForMaskedLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    if 0 < model.config.max_position_embeddings < length:
        tokenizer.model_max_length = length
        model = hea.convert(model, max_position_embeddings=length, attention_window=window)
    elif window:
        hea.sparsify(model, hea.patterns.Band(window // 2, window // 2))
    return model, tokenizer


if __name__ == "__main__":
    main()
