"""examples/run_qa.py, run as its users run it, and the windows in which it reads a long text."""

import json
from pathlib import Path
from random import Random

import pytest
import torch
from example_data.question_answering import best_answers, squad_scores, windows_of
from run_example import finish_example, start_forked, write_rows
from transformers import AutoModelForQuestionAnswering, AutoTokenizer

SHORT = ["--max_seq_length", "48", "--doc_stride", "16", "--max_steps", "2", "--disable_tqdm", "True"]
TRAIN = ["--train_file", "train.jsonl", *SHORT]
WORDS = ("mole", "river", "stone", "lamp", "cloud", "wheel", "paper", "glass")


def questions(num: int, unanswerable: bool = False) -> list[dict]:
    """Rows in SQuAD's form: texts longer than a window, with the answer anywhere or, in every third, nowhere."""
    random = Random(0)
    rows = []
    for number in range(num):
        sentences = [f"The {word} is {' '.join(random.choices(WORDS, k=3))}." for word in random.sample(WORDS, 8)]
        context, chosen = " ".join(sentences), random.choice(sentences)
        answer = chosen.partition(" is ")[2]
        answers = {"text": [answer], "answer_start": [context.index(chosen) + len(chosen) - len(answer)]}
        if unanswerable and number % 3 == 0:
            answers = {"text": [], "answer_start": []}
        rows.append({"question": f" What is the {chosen.split()[1]}?", "context": context, "answers": answers})
    return rows


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    write_rows(folder / "train.jsonl", questions(30, unanswerable=True))
    finish_example(start_forked(folder, "run_qa.py", *TRAIN))
    return folder


@pytest.fixture
def tokenizer(trained: Path) -> AutoTokenizer:
    return AutoTokenizer.from_pretrained(trained / "run")


def test_what_it_leaves_can_be_loaded_and_trained_on(trained: Path) -> None:
    scores = json.loads((trained / "run" / "eval_results.json").read_text())
    assert 0 <= scores["eval_exact_match"] <= scores["eval_f1"] <= 100
    model = AutoModelForQuestionAnswering.from_pretrained(trained / "run")
    assert model.config.global_tokens == "question"
    assert model.config.task_specific_params["marks_words_of_question"]
    more = ["--model_name_or_path", "run", "--output_dir", "again", "--max_train_samples", "9"]
    finish_example(start_forked(trained, "run_qa.py", *TRAIN, *more))
    assert AutoModelForQuestionAnswering.from_pretrained(trained / "again").config.task_specific_params[
        "marks_words_of_question"
    ]


def windows(rows: list[dict], tokenizer: AutoTokenizer, marked: bool = True) -> list[dict]:
    found = []
    for number, row in enumerate(rows):
        columns = windows_of({name: [value] for name, value in row.items()}, [number], tokenizer, 48, 16, marked)
        found += [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return found


def test_windows_cover_the_text_and_know_the_answer(tokenizer: AutoTokenizer) -> None:
    rows = questions(12, unanswerable=True)
    found = windows(rows, tokenizer)
    for number, row in enumerate(rows):
        own = [window for window in found if window["row"] == number]
        assert len(own) > 2
        covered = {place for window in own for start, end in window["offsets"] for place in range(start, end)}
        assert covered == set(range(len(row["context"])))
        answered = [window for window in own if window["end_positions"]]
        assert bool(answered) == bool(row["answers"]["text"])
        for window in answered:
            ids = window["input_ids"][window["start_positions"] : window["end_positions"] + 1]
            assert tokenizer.decode(ids).strip() == row["answers"]["text"][0]


def test_words_of_the_question_are_marked(tokenizer: AutoTokenizer) -> None:
    row = {"question": "Which LAMP?", "context": "The lamp, lamps", "answers": {"text": [], "answer_start": []}}
    (window,) = windows([row], tokenizer)
    marked = [token for token, kind in zip(window["input_ids"], window["token_type_ids"], strict=True) if kind]
    assert tokenizer.decode(marked).strip() == "lamp"
    assert "token_type_ids" not in windows([row], tokenizer, marked=False)[0]


def test_the_best_span_over_all_windows_wins(tokenizer: AutoTokenizer) -> None:
    rows = questions(6)
    found = windows(rows, tokenizer)
    logits = torch.zeros(2, len(found), 48)
    logits[:, :, 0] = 5
    for number, window in enumerate(found):
        if window["end_positions"]:
            logits[0, number, window["start_positions"]] = logits[1, number, window["end_positions"]] = 9
            # an end before the start, which counts for nothing
            logits[1, number, window["first"]] += 8 * (window["start_positions"] > window["first"])
    contexts = [row["context"] for row in rows]
    predicted = best_answers(contexts, found, logits.numpy(), longest=30, can_be_empty=False)
    assert predicted == [row["answers"]["text"][0] for row in rows]
    assert all(len(answer.split()) <= 1 for answer in best_answers(contexts, found, logits.numpy(), 1, False))
    nowhere = torch.zeros(2, len(found), 48)
    nowhere[:, :, 0] = 5
    assert best_answers(contexts, found, nowhere.numpy(), 30, can_be_empty=True) == [""] * len(rows)
    assert all(best_answers(contexts, found, nowhere.numpy(), 30, can_be_empty=False))


def test_squad_scores() -> None:
    assert squad_scores(["the Fox!"], [["fox", "a red fox"]]) == {"exact_match": 100, "f1": 100}
    # "red fox" in "quick red fox": precision 1, recall 2/3; then an empty answer
    partial = squad_scores(["a red fox", ""], [["the quick red fox"], ["fox"]])
    assert partial == {"exact_match": 0, "f1": pytest.approx(100 * (2 * 1 * (2 / 3) / (1 + 2 / 3)) / 2)}
    assert squad_scores(["fox fox"], [["fox cub"]])["f1"] == pytest.approx(50)


@pytest.mark.parametrize(
    ("said", "true", "score"),
    [("The", "a", 0), ("?!", "the", 0), ("the", "fox", 0), ("", "An", 0), ("the", "the ", 100), ("", "", 100)],
)
def test_answers_without_words_match_only_themselves(said: str, true: str, score: float) -> None:
    assert squad_scores([said], [[true]]) == {"exact_match": score, "f1": score}
