"""Train an encoder to answer questions about texts of thousands of tokens. An answer is a span of the text.

    pip install ".[train]"  # if you copy this file, copy example_data, too: it has default data and makes new models
    python examples/run_qa.py

The command trains a small sparse encoder, from random weights, on 1,000 questions about a dictionary (2.4 MB,
downloaded once). It takes 2 minutes on one core and reaches an F1 of 96. Each text consists of 16 entries of the
dictionary, 2,000 tokens in all, and the answer is the first sentence of one of them. A model that always answers with
the first sentence of the text would reach 10. The task is easy: tokens of the question are global, and token type 1
marks words of the text that are also in the question.

Longer texts are split into windows that overlap by `--doc_stride` tokens, and the best span of all windows is the
answer: `--max_seq_length 512` also reaches 96. With your own rows, in the format of SQuAD:

    python examples/run_qa.py --model_name_or_path long_roberta --train_file my.jsonl
    torchrun --nproc_per_node 8 examples/run_qa.py --model_name_or_path long_roberta --dataset_name squad_v2
"""

from dataclasses import dataclass

import torch
from datasets import Dataset, DatasetDict, load_dataset
from example_data.question_answering import best_answers, squad_scores, windows_of
from torch.utils.data import SequentialSampler
from transformers import AutoModelForQuestionAnswering, AutoTokenizer, Trainer, TrainingArguments, set_seed
from transformers.data.data_collator import DataCollatorWithPadding
from transformers.hf_argparser import HfArg, HfArgumentParser

import hf_efficient_attn as hea


@dataclass
class Arguments:
    model_name_or_path: str | None = HfArg(default=None, help="Checkpoint. Default: a small model, random weights.")
    dataset_name: str | None = HfArg(default=None, help="Dataset on the Hub. Default: questions about a dictionary.")
    dataset_config_name: str | None = HfArg(default=None, help="Configuration of that dataset.")
    train_file: str | None = HfArg(default=None, help="Your training data: .json or .jsonl, rows like SQuAD's.")
    validation_file: str | None = HfArg(default=None, help="Your validation data. Default: a tenth of the rows.")
    max_seq_length: int = HfArg(default=4096, help="Tokens of a window: the question and a part of the text.")
    doc_stride: int = HfArg(default=128, help="Tokens that neighbouring windows of a longer text have in common.")
    max_answer_length: int = HfArg(default=100, help="Longest answer in tokens.")
    max_train_samples: int | None = HfArg(default=None, help="Train on at most this number of rows.")
    max_eval_samples: int | None = HfArg(default=None, help="Evaluate on at most this number of rows.")
    resume: bool = HfArg(default=False, help="Continue from the last complete checkpoint in --output_dir.")


class InOrder(Trainer):
    """Evaluates windows in their order, because `best_answers` needs the logits in that order."""

    def _get_eval_sampler(self, eval_dataset: Dataset) -> SequentialSampler:
        return SequentialSampler(eval_dataset)


def main() -> None:
    parser = HfArgumentParser((Arguments, TrainingArguments))
    parser.set_defaults(output_dir="outputs/run_qa", do_train=True, do_eval=True, save_strategy="epoch")
    parser.set_defaults(per_device_train_batch_size=8, train_sampling_strategy="group_by_length")
    parser.set_defaults(num_train_epochs=1, learning_rate=2e-3, warmup_steps=0.1, logging_steps=50)
    parser.set_defaults(use_cpu=not torch.accelerator.is_available())
    args, training = parser.parse_args_into_dataclasses()
    set_seed(training.seed)
    data = load_data(args, training.seed)
    model, tokenizer = load_model(args, data["train"])
    options = {"tokenizer": tokenizer, "max_seq_length": args.max_seq_length, "doc_stride": args.doc_stride}
    # kept in the config: a saved model needs the marks that it was trained with
    of_task = getattr(model.config, "task_specific_params", None) or {}
    options["marks_words_of_question"] = of_task.get("marks_words_of_question", False)
    with training.main_process_first():
        options = {"fn_kwargs": options, "remove_columns": data["train"].column_names}
        windows = data.map(windows_of, with_indices=True, batched=True, batch_size=1, **options)
    rows, can_be_empty = data["validation"], not all(answers["text"] for answers in data["train"]["answers"])
    true = [answers["text"] or [""] for answers in rows["answers"]]

    def compute_metrics(output: tuple) -> dict[str, float]:
        found = windows["validation"], output[0]
        return squad_scores(best_answers(rows["context"], *found, args.max_answer_length, can_be_empty), true)

    trainer = InOrder(model, training, DataCollatorWithPadding(tokenizer), *windows.values(), tokenizer)
    trainer.compute_metrics = compute_metrics
    if training.do_train:
        resume = training.resume_from_checkpoint or args.resume and hea.last_complete_checkpoint(training.output_dir)
        trainer.save_metrics("train", trainer.train(resume).metrics)
        trainer.save_model()
    if training.do_eval:
        simple = squad_scores([text.partition(". ")[0] for text in rows["context"]], true)
        metrics = trainer.evaluate() | {f"{name}_of_first_sentence": value for name, value in simple.items()}
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)


def load_data(args: Arguments, seed: int) -> DatasetDict:
    """Return `train` and `validation` with columns `question`, `context` and `answers`."""
    files = {"train": args.train_file, "validation": args.validation_file} if args.validation_file else args.train_file
    if files or args.dataset_name:
        data = load_dataset(args.dataset_name or "json", args.dataset_config_name, data_files=files)
    else:
        from example_data import dictionary_questions

        data = dictionary_questions(num_entries=16)
        limits = {"train": args.max_train_samples or 1000, "validation": args.max_eval_samples or 300}
        data = DatasetDict({split: data[split].take(limit) for split, limit in limits.items()})
    if len(data) == 1:
        data = data["train"].train_test_split(0.1, seed=seed)
    data = DatasetDict(train=data["train"], validation=data["validation" if "validation" in data else "test"])
    for split, limit in {"train": args.max_train_samples, "validation": args.max_eval_samples}.items():
        data[split] = data[split].shuffle(seed).select(range(len(data[split]))[:limit])
    return data


def load_model(args: Arguments, rows: Dataset) -> tuple:
    """Return the checkpoint, or a new model, and its tokenizer."""
    if name := args.model_name_or_path:
        return AutoModelForQuestionAnswering.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    from example_data import new_question_answering

    return new_question_answering(rows["context"], args.max_seq_length)


if __name__ == "__main__":
    main()
