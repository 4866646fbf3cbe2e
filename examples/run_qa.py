"""Train an encoder to answer questions by a span of a text of thousands of tokens.

    pip install ".[train]"
    python examples/run_qa.py

trains a small sparse encoder from random weights on 1,000 questions about a dictionary (2.4 MB, fetched once): each has
a text of 16 entries, 2,000 tokens, and is answered by the first sentence of one of them. It takes about two minutes.
Expect an F1 near 96; the text's first sentence has 11. Tokens of the question are global, and words of the text that
stand in it are marked, as so short a training teaches no model to compare words: a search would find the entry, too.
A longer text is cut into windows that overlap by `--doc_stride`, and the best span of all of them is the answer.

    python examples/run_qa.py --model_name_or_path long_roberta --train_file my.jsonl
    torchrun --nproc_per_node 8 examples/run_qa.py --model_name_or_path long_roberta --dataset_name squad_v2
"""

from dataclasses import dataclass
from pathlib import Path

import evaluate
from datasets import DatasetDict, load_dataset
from question_windows import InOrder, best_answers, windows_of
from transformers import (
    AutoModelForQuestionAnswering,
    AutoTokenizer,
    DataCollatorWithPadding,
    EvalPrediction,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainingArguments,
    set_seed,
)
from transformers.hf_argparser import HfArg, HfArgumentParser

import hf_efficient_attn as hea
from hf_efficient_attn.patterns import Band


@dataclass
class Arguments:
    """What is trained on what."""

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


def main() -> None:
    parser = HfArgumentParser((Arguments, TrainingArguments))
    parser.set_defaults(output_dir="outputs/run_qa", num_train_epochs=1, learning_rate=2e-3, logging_steps=50)
    parser.set_defaults(per_device_train_batch_size=8, train_sampling_strategy="group_by_length", report_to="none")
    parser.set_defaults(warmup_steps=0.1, save_strategy="epoch")
    args, training = parser.parse_args_into_dataclasses()
    set_seed(training.seed)

    data = load_data(args, training.seed)
    model, tokenizer = load_model(args, data)
    limits = {"max_seq_length": args.max_seq_length, "doc_stride": args.doc_stride}
    limits["marks_words_of_question"] = getattr(model.config, "marks_words_of_question", False)
    options = {"fn_kwargs": {"tokenizer": tokenizer, **limits}, "remove_columns": data["train"].column_names}
    with training.main_process_first():
        windows = data.map(windows_of, with_indices=True, batched=True, batch_size=1, **options)
    rows, can_be_empty = data["validation"], not all(answers["text"] for answers in data["train"]["answers"])
    scores = evaluate.load(str(Path(__file__).parent / "metrics" / "squad_scores"))

    def compute_metrics(output: EvalPrediction) -> dict[str, float]:
        logits = output.predictions
        said = best_answers(rows["context"], windows["validation"], logits, args.max_answer_length, can_be_empty)
        return scores.compute(predictions=said, references=[answers["text"] or [""] for answers in rows["answers"]])

    trainer = InOrder(
        model,
        training,
        train_dataset=windows["train"],
        eval_dataset=windows["validation"],
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=compute_metrics,
    )
    last = hea.last_complete_checkpoint(training.output_dir) if args.resume else None
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint or last)
    trainer.save_model()
    trainer.log_metrics("eval", metrics := trainer.evaluate())
    trainer.save_metrics("eval", metrics)
    if training.push_to_hub:
        trainer.push_to_hub()


def load_data(args: Arguments, seed: int) -> DatasetDict:
    """Return `train` and `validation` with columns `question`, `context` and `answers`."""
    if args.dataset_name:
        data = load_dataset(args.dataset_name, args.dataset_config_name)
    elif args.train_file:
        files = {"train": args.train_file, "validation": args.validation_file}
        data = load_dataset("json", data_files={split: file for split, file in files.items() if file})
    else:
        from example_data import dictionary_questions

        data = dictionary_questions(num_entries=16)
        data = DatasetDict(train=data["train"].take(1000), validation=data["validation"].take(300))
    if missing := {"question", "context", "answers"} - set(columns := data["train"].column_names):
        raise SystemExit(f"Without column {', '.join(sorted(missing))}: the data has {', '.join(columns)}.")
    if "validation" not in data:
        parts = {} if "test" in data else data["train"].train_test_split(0.1, seed=seed)
        data = DatasetDict(train=parts.get("train", data["train"]), validation=(parts or data)["test"])
    limits = {"train": args.max_train_samples, "validation": args.max_eval_samples}
    return DatasetDict({split: data[split].shuffle(seed).take(limits[split] or len(data[split])) for split in limits})


def load_model(args: Arguments, data: DatasetDict) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the checkpoint, or a new model and a tokenizer of the training texts."""
    if args.model_name_or_path:
        tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
        return AutoModelForQuestionAnswering.from_pretrained(args.model_name_or_path), tokenizer
    from example_data import new_tokenizer

    tokenizer = new_tokenizer(data["train"]["context"], vocab_size=4096)
    config = hea.SparseTransformerConfig(
        attention_pattern=Band(left=32, right=32),
        global_tokens="question",
        max_position_embeddings=args.max_seq_length,
        # so short a training teaches no model to compare words: token type 1 marks those that stand in the question
        type_vocab_size=2,
        marks_words_of_question=True,
        hidden_size=64,
        intermediate_size=256,
        initializer_range=0.1,
        num_hidden_layers=3,
        num_attention_heads=4,
        norm_position="pre",
        position_embedding_type="rope",
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        sep_token_id=tokenizer.sep_token_id,
    )
    return AutoModelForQuestionAnswering.from_config(config), tokenizer


if __name__ == "__main__":
    main()
