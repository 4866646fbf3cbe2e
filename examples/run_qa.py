"""Train an encoder to answer questions by a span of a text of thousands of tokens.

    pip install ".[train]"
    python examples/run_qa.py

trains a small sparse encoder from random weights on 1,000 questions about a dictionary (2.4 MB, fetched once), in 2
minutes of one core: each has a text of 16 entries, 2,000 tokens, and is answered by the first sentence of one of them.
Expect an F1 near 96; the text's first sentence has 10. Tokens of the question are global, and words of the text that
stand in it are marked, as so short a training teaches no model to compare words: a search would find the entry, too.
A longer text is cut into windows that overlap by `--doc_stride`, and the best span of all of them is the answer: here
`--max_seq_length 512`, in windows, has 96. With rows of your own:

    python examples/run_qa.py --model_name_or_path long_roberta --train_file my.jsonl
    torchrun --nproc_per_node 8 examples/run_qa.py --model_name_or_path long_roberta --dataset_name squad_v2
"""

from dataclasses import dataclass

import torch
from datasets import Dataset, DatasetDict, load_dataset
from torch.utils.data import SequentialSampler
from transformers import AutoModelForQuestionAnswering, AutoTokenizer, DataCollatorWithPadding, set_seed
from transformers.hf_argparser import HfArg, HfArgumentParser
from transformers.trainer import Trainer
from transformers.training_args import TrainingArguments

import hf_efficient_attn as hea
from hf_efficient_attn.patterns import Band
from hf_efficient_attn.training import last_complete_checkpoint, script_inputs
from hf_efficient_attn.training.question_answering import best_answers, squad_scores, windows_of


@dataclass
class Arguments:
    model_name_or_path: str | None = HfArg(default=None, help="Checkpoint. Default: a small model, random weights.")
    dataset_name: str | None = HfArg(default=None, help="Dataset of the Hub. Default: questions about a dictionary.")
    dataset_config_name: str | None = HfArg(default=None, help="Configuration of that dataset.")
    train_file: str | None = HfArg(default=None, help="A .json or .jsonl file of rows like SQuAD's instead.")
    validation_file: str | None = HfArg(default=None, help="Its like, to evaluate on. Default: a tenth of the rows.")
    max_seq_length: int = HfArg(default=4096, help="Tokens of question and text that are read at once.")
    doc_stride: int = HfArg(default=128, help="Tokens that neighbouring windows of a longer text have in common.")
    max_answer_length: int = HfArg(default=100, help="Tokens of the longest answer.")
    max_train_samples: int | None = HfArg(default=None, help="Train on at most so many rows.")
    max_eval_samples: int | None = HfArg(default=None, help="Evaluate on at most so many rows.")
    resume: bool = HfArg(default=False, help="Go on from the last complete checkpoint.")


class InOrder(Trainer):
    """Evaluates windows in their order, by which those of one text are found, whatever the order of training."""

    def _get_eval_sampler(self, eval_dataset: Dataset) -> SequentialSampler:
        return SequentialSampler(eval_dataset)


@script_inputs.refusals_as_sentences()
def main() -> None:
    parser = HfArgumentParser((Arguments, TrainingArguments))
    parser.set_defaults(output_dir="outputs/run_qa", do_train=True, do_eval=True, save_strategy="epoch")
    parser.set_defaults(per_device_train_batch_size=8, train_sampling_strategy="group_by_length", report_to="none")
    parser.set_defaults(num_train_epochs=1, learning_rate=2e-3, warmup_steps=0.1, logging_steps=50)
    parser.set_defaults(use_cpu=not torch.accelerator.is_available())
    args, training = parser.parse_args_into_dataclasses()
    script_inputs.check_arguments(args)
    if training.do_predict:
        raise SystemExit("--do_predict: nothing is predicted here; --do_eval evaluates on the rows for validation.")
    set_seed(training.seed)
    data = load_data(args, training.seed)
    model, tokenizer = load_model(args, data)
    options = {"tokenizer": tokenizer, "max_seq_length": args.max_seq_length, "doc_stride": args.doc_stride}
    # kept in the config, so that a saved model is given what it was trained with
    of_task = getattr(model.config, "task_specific_params", None) or {}
    options["marks_words_of_question"] = of_task.get("marks_words_of_question", False)
    options = {"fn_kwargs": options, "remove_columns": data["train"].column_names}
    with training.main_process_first():
        windows = data.map(windows_of, with_indices=True, batched=True, batch_size=1, **options)
    script_inputs.check_lengths(windows, model, tokenizer)
    rows, can_be_empty = data["validation"], not all(answers["text"] for answers in data["train"]["answers"])
    true = [answers["text"] or [""] for answers in rows["answers"]]

    def compute_metrics(output: tuple) -> dict[str, float]:
        predicted = best_answers(
            rows["context"], windows["validation"], output[0], args.max_answer_length, can_be_empty
        )
        return squad_scores(predicted, true)

    options = {"train_dataset": windows["train"], "eval_dataset": windows["validation"], "processing_class": tokenizer}
    trainer = InOrder(model, training, DataCollatorWithPadding(tokenizer), compute_metrics=compute_metrics, **options)
    if training.do_train:
        resume = training.resume_from_checkpoint or args.resume and last_complete_checkpoint(training.output_dir)
        trainer.save_metrics("train", trainer.train(resume).metrics)
        trainer.save_model()
    if training.do_eval:
        simple = squad_scores([text.partition(". ")[0] for text in rows["context"]], true)
        metrics = trainer.evaluate() | {f"{name}_of_first_sentence": value for name, value in simple.items()}
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)


def load_data(args: Arguments, seed: int) -> DatasetDict:
    """Return `train` and `validation` with columns `question`, `context` and `answers`."""
    if args.dataset_name:
        data = load_dataset(args.dataset_name, args.dataset_config_name)
    elif args.train_file:
        data = script_inputs.load_files(args, ".json", ".jsonl")
    else:
        from example_data import dictionary_questions

        data = dictionary_questions(num_entries=16)
        limits = {"train": args.max_train_samples or 1000, "validation": args.max_eval_samples or 300}
        data = DatasetDict({split: data[split].take(limit) for split, limit in limits.items()})
    if without := {"question", "context", "answers"}.difference(columns := data["train"].column_names):
        raise SystemExit(f"No column is called {' or '.join(sorted(without))}; the data has {', '.join(columns)}.")
    data = script_inputs.split_rows(data, seed)
    for split, limit in {"train": args.max_train_samples, "validation": args.max_eval_samples}.items():
        data[split] = data[split].shuffle(seed).select(range(len(data[split]))[:limit])
        if not len(data[split]):
            raise SystemExit(f"There are no {split} rows.")
    script_inputs.check_texts(data, "question", "context")
    return data


def load_model(args: Arguments, data: DatasetDict) -> tuple:
    """Return the checkpoint, or a new model and a tokenizer of the training texts."""
    if name := args.model_name_or_path:
        return AutoModelForQuestionAnswering.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    from example_data import new_tokenizer

    tokenizer = new_tokenizer(data["train"]["context"], vocab_size=4096)
    fields = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
    fields |= {"norm_position": "pre", "position_embedding_type": "rope", "initializer_range": 0.1}
    fields |= {"attention_pattern": Band(left=32, right=32), "global_tokens": "question", "vocab_size": len(tokenizer)}
    fields |= {name: getattr(tokenizer, name) for name in ("pad_token_id", "sep_token_id")}
    # so short a training teaches no model to compare words: token type 1 marks those that stand in the question
    fields |= {"type_vocab_size": 2, "task_specific_params": {"marks_words_of_question": True}}
    fields |= {"max_position_embeddings": args.max_seq_length}
    return AutoModelForQuestionAnswering.from_config(hea.SparseTransformerConfig(**fields)), tokenizer


if __name__ == "__main__":
    main()
