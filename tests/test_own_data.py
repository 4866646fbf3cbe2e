"""Data of one's own and options, as the examples refuse them before any training."""

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from run_example import EXAMPLES, write_rows

NUM_ROWS = 20


@pytest.fixture(autouse=True)
def examples(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.chdir(tmp_path)


def questions() -> list[dict]:
    """Rows in SQuAD's form; the fourth has no answer."""
    rows = [
        {
            "question": "Which fox?",
            "context": f"{'a ' * number}red fox",
            "answers": {"text": ["red", "fox"], "answer_start": [2 * number, 2 * number + 4]},
        }
        for number in range(NUM_ROWS)
    ]
    rows[3]["answers"] = {"text": [], "answer_start": []}
    return rows


def load_questions() -> dict:
    from answer_questions import COLUMNS
    from question_answering.answer_arguments import DataArguments
    from question_answering.questions import answer_fault

    return DataArguments(train_file="train.jsonl").load(None, COLUMNS, answer_fault)


def load_documents(**options: str) -> dict:
    from classification.classify_arguments import DataArguments

    data = DataArguments(train_file="train.jsonl", **options)
    return data.load(None, data.columns())


def load_translations(**options: str) -> dict:
    from translate_help import TranslationDataArguments, load_pairs

    return load_pairs(TranslationDataArguments(train_file="train.jsonl", **options))


def load_texts(**options: str) -> dict:
    from causal_lm.clm_arguments import DataTrainingArguments
    from causal_lm.token_blocks import _load_texts

    return _load_texts(DataTrainingArguments(train_file="train.jsonl", **options))


def refusal(work: Callable[[], object]) -> str:
    """Return the words by which `work` is refused."""
    from shared.arguments import UsageError

    with pytest.raises(UsageError) as refused:
        work()
    return str(refused.value)


def test_questions_with_right_answers_are_all_taken() -> None:
    write_rows(Path("train.jsonl"), questions())
    splits = load_questions()
    assert [row["answers"] for row in splits["test"]] == [row["answers"] for row in questions()[::10]]
    assert len(splits["train"]) == NUM_ROWS - 2


def test_shifted_answers_are_refused_by_the_first_of_them() -> None:
    rows = questions()
    for row in rows[5:]:
        row["answers"]["answer_start"] = [start + 1 for start in row["answers"]["answer_start"]]
    write_rows(Path("train.jsonl"), rows)
    assert refusal(load_questions) == (
        "train.jsonl, row 6: answer 'red' is not at answer_start 11 of the context, which has 'ed ' there. Mend or "
        "leave out such rows: 15 of 20."
    )


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        (None, "column answers is null. Allowed: of the form"),
        ({"text": ["red"], "answer_start": []}, "Allowed: a list text and a list answer_start, as long."),
        ({"text": ["red"], "answer_start": [None]}, "an answer is 'red', at null. Allowed: text, at 0"),
        ({"text": [""], "answer_start": [0]}, "an answer is '', at 0. Allowed: text, at 0"),
        ({"text": ["fox"], "answer_start": [-3]}, "an answer is 'fox', at -3. Allowed: text, at 0"),
    ],
)
def test_answers_of_another_form_are_refused(answers: dict | None, message: str) -> None:
    rows = questions()
    rows[8]["answers"] = answers
    write_rows(Path("train.jsonl"), rows)
    found = refusal(load_questions)
    assert found.startswith("train.jsonl, row 9: ")
    assert message in found
    assert found.endswith(": 1 of 20.")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"text": None}, "test.jsonl, row 3: column text is null. Allowed: text. Mend or leave out such rows: 2 of 6."),
        ({"text": 5}, "test.jsonl, row 3: column text is 5. Allowed: text."),
        ({"label": None}, "test.jsonl, row 3: column label is null. Allowed: a word or a number."),
        ({"label": ["x"]}, "test.jsonl, row 3: column label is ['x']. Allowed: a word or a number."),
    ],
)
def test_values_that_are_missing_or_of_another_kind_are_refused(changed: dict, message: str) -> None:
    rows = [{"text": "a document", "label": "x"}] * 6
    write_rows(Path("train.jsonl"), rows)
    assert len(load_documents()["train"]) == 5
    write_rows(Path("test.jsonl"), [rows[0] if number not in (2, 4) else {**rows[0], **changed} for number in range(6)])
    assert message in refusal(functools.partial(load_documents, test_file="test.jsonl"))


def test_a_missing_column_is_named_by_options_that_exist() -> None:
    write_rows(Path("train.jsonl"), [{"text": "a document", "class": "x"}] * 6)
    assert refusal(load_documents) == (
        "train.jsonl has no column label. Columns: text, class. Needed: text, label. Name them by --label_column_name."
    )
    assert len(load_documents(label_column_name="class")["train"]) == 5
    names_are_fixed = "These names are fixed: rename those of the data."
    assert refusal(load_questions).endswith(f"Needed: question, context, answers. {names_are_fixed}")
    assert refusal(load_translations).endswith(f"Needed: translation. {names_are_fixed}")


def test_translations_without_a_language_are_refused() -> None:
    rows = [{"translation": {"en": "one", "fr": "un"}} for _ in range(NUM_ROWS)]
    write_rows(Path("train.jsonl"), rows)
    assert load_translations(target_lang="fr")["test"][0] == ("one", "un")
    assert "row 1: column translation lacks --target_lang de. It has: en, fr." in refusal(load_translations)
    rows[3]["translation"]["fr"] = None
    write_rows(Path("train.jsonl"), rows)
    found = refusal(functools.partial(load_translations, target_lang="fr"))
    assert found.startswith("train.jsonl, row 4: column translation lacks --target_lang fr. It has: en.")
    assert found.endswith(": 1 of 20.")


def test_text_of_a_language_model_is_checked_by_row() -> None:
    texts = [{"text": f"text {number}"} for number in range(NUM_ROWS)]
    write_rows(Path("train.jsonl"), texts)
    train, held_out, column = load_texts()
    assert [row[column] for row in [*held_out, *train]] == [row["text"] for row in texts]
    assert len(held_out) == 1
    assert "no column body. Columns: text. Needed: body. Name them by --text_column_name." in refusal(
        functools.partial(load_texts, text_column_name="body")
    )
    write_rows(Path("null.jsonl"), [*texts[:2], {"text": None}])
    found = refusal(functools.partial(load_texts, validation_file="null.jsonl"))
    assert found == "null.jsonl, row 3: column text is null. Allowed: text. Mend or leave out such rows: 1 of 3."


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "--train_file train.jsonl has no rows."),
        ('{"text": \n', "--train_file train.jsonl could not be loaded: JSON parse error"),
    ],
)
def test_files_that_cannot_be_read_are_refused(content: str, message: str) -> None:
    Path("train.jsonl").write_text(content)
    assert message in refusal(load_documents)
    assert message in refusal(load_texts)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--text_columns", "x"], "Unknown option --text_columns. Did you mean '--text_column_name'?"),
        (["--xyz=3"], "Unknown option --xyz. --help lists every option."),
        (["stray"], "Unknown option stray."),
        (["--max_eval_samples", "many"], "invalid int value: 'many'. --help lists every option."),
        (["--max_eval_samples"], "expected one argument"),
        (["--max_eval_samples", "0"], "--max_eval_samples 0 leaves nothing"),
        (["--lr_scheduler_type", "steep"], "invalid choice: 'steep'"),
        (["--warmup_steps", "-1"], "warmup_steps >= 0"),
        (["--accelerator_config", "nowhere.json"], "No such file"),
    ],
)
def test_options_that_cannot_be_used_are_refused(words: list[str], message: str) -> None:
    from classification.classify_arguments import ClassifyTrainingArguments, DataArguments
    from shared.arguments import parse_arguments

    classes = (DataArguments, ClassifyTrainingArguments)
    assert message in refusal(functools.partial(parse_arguments, classes, ["--use_cpu", "True", *words]))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (json.dumps({"steps": 5}), "options.json: Some keys are not used"),
        ("[]", "options.json: "),
        ("{", "options.json: "),
        (None, "options.json"),
    ],
)
def test_files_of_options_that_cannot_be_used_are_refused(content: str | None, message: str) -> None:
    from causal_lm.clm_arguments import parse_clm_arguments

    if content is not None:
        Path("options.json").write_text(content)
    assert message in refusal(functools.partial(parse_clm_arguments, ["options.json"]))
