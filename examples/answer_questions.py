"""Answer questions by a span of a long text, with an encoder whose question tokens are global.

    pip install "hf-efficient-attn[train]"
    python examples/answer_questions.py

trains one sparse encoder twice for equal time, two minutes each: on question and text up to 4,096 tokens, and on what
fits in 512. A text is several entries of the Free On-line Dictionary of Computing (2.4 MB, from a package, downloaded
once), the question asks for one of them ("What is ...?"), the answer is its first sentence. The text is real, the
questions are four templates, and a search for the headword would answer them all: what is learnt is to find an entry
anywhere in a long text and where its first sentence ends. Tokens read a window; those of the question read, and are
read by, everything. Words of the text that stand in the question are marked
for the model (see question_answering/questions.py).

`outputs/answer_questions` then holds `whole` and `truncated` (folders that `AutoModelForQuestionAnswering` loads),
results.json, results.md and scores.png. Takes about six minutes on two cores. More:

    python examples/answer_questions.py --num_entries 40 --seconds_per_model 1200     # 4,000 tokens
    python examples/answer_questions.py --dataset_name squad
    python examples/answer_questions.py --train_file my.jsonl --test_file held_out.jsonl   # rows in SQuAD's form
"""

import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corpora import foldoc
from corpora.splits import Row, Splits
from question_answering.answer_arguments import AnswerTrainingArguments, DataArguments, ModelArguments
from question_answering.answer_evaluation import answer, score, score_by_position
from question_answering.answer_report import draw_scores, model_card, results_text
from question_answering.questions import Question, answer_fault, tokenize
from shared.arguments import UsageError, parse_arguments
from shared.own_data import Column
from shared.saved_model import check_saved_model, save_model
from shared.task_run import closing_words, open_run_folder, run_example, save_picture, with_overrides, write_results
from shared.task_tokenizer import train_task_tokenizer
from shared.timed_training import TimedTrainer
from shared.token_batches import TokenBatches
from transformers import PreTrainedTokenizerBase, set_seed

import hf_efficient_attn as hea

KINDS = ("whole", "truncated")
ANSWERS_FORM = 'of the form {"text": [...], "answer_start": [...]}'
COLUMNS = (Column("question"), Column("context"), Column("answers", values=(dict,), allowed=ANSWERS_FORM))
FOLDOC_NOTE = (
    "The questions are four templates over real dictionary entries, and the words of the question are marked in the "
    "text: the scores say whether an entry is found in a long text, not whether free questions are understood."
)


@dataclass(frozen=True)
class Run:
    """Everything both models share. `test` is untruncated: it knows where each answer is."""

    model: ModelArguments
    data: DataArguments
    training: AnswerTrainingArguments
    tokenizer: PreTrainedTokenizerBase
    train_rows: list[Row]
    test_rows: list[Row]
    test: list[Question]
    folder: Path

    @property
    def source(self) -> str:
        return self.data.source or "the Free On-line Dictionary of Computing"

    @property
    def note(self) -> str | None:
        return None if self.data.source else FOLDOC_NOTE

    def length(self, kind: str) -> int:
        """Return how many tokens the model of a kind reads."""
        return self.model.max_length if kind == "whole" else self.model.truncated_length

    def config(self, kind: str) -> hea.SparseTransformerConfig:
        """Return the config of a kind, `--config_overrides` included."""
        return with_overrides(self.model.config(self.tokenizer, self.length(kind)), self.model.config_overrides)


def main() -> None:
    """Parse, train both models, report."""
    run = prepare_run(*parse_arguments((ModelArguments, DataArguments, AnswerTrainingArguments)))
    report(run, {kind: train_and_score(run, kind) for kind in KINDS})


def prepare_run(model: ModelArguments, data: DataArguments, training: AnswerTrainingArguments) -> Run:
    """Check every argument, load the questions and train the tokenizer."""
    folder = open_run_folder(training)
    splits = data.load(functools.partial(load_foldoc, data), COLUMNS, answer_fault)
    test_rows = [row for row in splits["test"] if row["answers"]["text"]]
    if not test_rows:
        raise UsageError(f"{data.source}: no test question has an answer.")
    # an entry of FOLDOC stands in as many texts as a text has entries: every so manieth text shows each about once
    step = 1 if data.source else data.train_entries
    tokenizer = train_task_tokenizer(
        (f"{row['question']} {row['context']}" for row in splits["train"][::step]), model.vocab_size, model.max_length
    )
    test = tokenize(test_rows, tokenizer, sys.maxsize)
    run = Run(model, data, training, tokenizer, splits["train"], test_rows, test, folder)
    for kind in KINDS:
        run.config(kind)  # refused now, not after the first model is trained
    return run


def load_foldoc(data: DataArguments, **options: Any) -> Splits:
    """Return FOLDOC's questions, the training texts with entries of their own number.

    Raises:
        UsageError: more entries than there are.
        PackageError: the package cannot be had.
    """
    try:
        splits = foldoc.load(num_entries=data.num_entries, **options)
        if data.train_entries != data.num_entries:
            splits["train"] = foldoc.load(num_entries=data.train_entries, **options)["train"]
    except ValueError as error:
        raise UsageError(f"--num_entries, --train_entries: {error}") from error
    return splits


def train_and_score(run: Run, kind: str) -> dict[str, Any]:
    """Train one model, save it, check it in a fresh process, and return what it reached."""
    length = run.length(kind)
    examples = answerable(run, length)
    set_seed(run.training.seed)
    model = hea.SparseTransformerForQuestionAnswering(run.config(kind))
    lengths = [len(example["input_ids"]) for example in examples]
    batches = TokenBatches(
        examples, lengths, run.training.tokens_per_step, run.tokenizer.pad_token_id, run.training.seed
    )
    trainer = TimedTrainer(model, run.training, batches, kind)
    result = {"reads": f"{length:,} tokens", "parameters": model.num_parameters(), **trainer.run()}
    asked = tokenize(run.test_rows, run.tokenizer, length)
    answers, seconds = answer(model, asked, run.training.tokens_per_eval_batch, run.model.max_answer_tokens)
    result |= {
        **score(answers, run.test),
        "within": sum(question.span is not None for question in asked) / len(asked),
        "by_position": score_by_position(answers, run.test),
        "questions_per_second": len(asked) / seconds,
        "train_questions": len(examples),
    }
    run.tokenizer.model_max_length = length
    save_model(model, run.tokenizer, run.folder / kind, **model_card(run.source, result, run.note))
    outputs = ["start_logits", "end_logits"]
    batch = batches.longest_batch()
    result |= check_saved_model(model, run.folder / kind, batch, outputs, "AutoModelForQuestionAnswering")
    return {**result, "losses": trainer.budget.losses, "answers": shown(run.test, answers)}


def answerable(run: Run, length: int) -> list[dict[str, Any]]:
    """Return the training examples whose answer lies within `length` tokens.

    Raises:
        UsageError: there is none.
    """
    questions = tokenize(run.train_rows, run.tokenizer, length)
    examples = [question.example() for question in questions if question.span is not None]
    if not examples:
        raise UsageError(f"No answer of the {len(questions):,} training questions lies within {length:,} tokens.")
    return examples


def shown(questions: Sequence[Question], answers: Sequence[str]) -> list[dict[str, str]]:
    """Return the first ten answers beside the true ones."""
    pairs = zip(questions[:10], answers, strict=False)
    return [{"question": one.question, "true": one.answers[0], "said": said} for one, said in pairs]


def report(run: Run, models: dict[str, dict[str, Any]]) -> None:
    """Write the tables and the picture, and print the closing summary."""
    losses = {kind: models[kind].pop("losses") for kind in KINDS}
    lengths = sorted(len(question.input_ids) for question in run.test)
    content = {
        "data": {
            "source": run.source,
            "note": run.note,
            "train_questions": len(run.train_rows),
            "test_questions": len(run.test),
            "test_tokens_median": lengths[len(lengths) // 2],
            "test_tokens_longest": lengths[-1],
        },
        "models": models,
        "losses": losses,
    }
    text = results_text(content, run.training)
    text = write_results(run.folder, f"Questions about {run.source}", content, text, run.training.device)
    save_picture(draw_scores(models, losses), run.folder / "scores.png")
    print(closing_words(run.folder, text, KINDS, ["scores.png"]))


if __name__ == "__main__":
    sys.exit(run_example(main))
