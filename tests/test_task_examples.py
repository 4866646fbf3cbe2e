"""examples/classify_documents.py and answer_questions.py, run as their users run them, at a tiny size."""

import json
from pathlib import Path
from random import Random

import pytest
import torch
from run_example import EXAMPLES, check_refusals, finish_example, start_forked, write_rows
from sklearn.metrics import accuracy_score
from transformers import AutoModelForQuestionAnswering, AutoTokenizer, pipeline

import hf_efficient_attn  # noqa: F401  registers the family

SHAPE = ["--config_overrides", "hidden_size=16,intermediate_size=32,num_hidden_layers=1,num_attention_heads=2"]
TINY = [
    *SHAPE,
    "--vocab_size",
    "300",
    "--seconds_per_model",
    "60",
    "--tokens_per_step",
    "512",
    "--disable_tqdm",
    "True",
]
FILES = ["--train_file", "train.jsonl", "--test_file", "test.jsonl"]
CLASSIFY = ["--max_length", "256", "--train_length", "128", "--dense_length", "32", "--attention_window", "16"]
ANSWER = ["--max_length", "256", "--truncated_length", "32", "--attention_window", "16"]
WORDS = ("mole", "river", "stone", "lamp", "cloud", "wheel", "paper", "glass")


def documents(num: int, seed: int) -> list[dict]:
    """Long documents of two classes; the word that tells them stands behind the first 60 words."""
    random = Random(seed)
    rows = []
    for number in range(num):
        topic = ("weather", "ships")[number % 2]
        words = random.choices(WORDS, k=60) + random.choices([*WORDS, *[f"{topic}word"] * 8], k=30)
        rows.append({"body": " ".join(words), "topic": topic})
    return rows


def questions(num: int, seed: int) -> list[dict]:
    """Questions in SQuAD's form, the answer near the start or the end of a long text."""
    random = Random(seed)
    rows = []
    for number in range(num):
        sentences = [f"{word} is {' '.join(random.choices(WORDS, k=3))}." for word in random.sample(WORDS, 8)]
        chosen = sentences[(0, -1)[number % 2]]
        context = " ".join(sentences)
        answer = chosen.partition(" is ")[2]
        answers = {"text": [answer], "answer_start": [context.index(chosen) + len(chosen) - len(answer)]}
        rows.append({"question": f"What is {chosen.split()[0]}?", "context": context, "answers": answers})
    return rows


@pytest.fixture(scope="module")
def classified(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder and the output of a classification run from start to end."""
    folder = tmp_path_factory.mktemp("classified")
    write_rows(folder / "train.jsonl", documents(40, seed=0))
    write_rows(folder / "test.jsonl", documents(11, seed=1))
    columns = ["--text_column_name", "body", "--label_column_name", "topic", "--seeds", "3,4", "--max_steps", "6"]
    return folder, finish_example(start_forked(folder, "classify_documents.py", *TINY, *FILES, *CLASSIFY, *columns))


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder and the output of a question answering run from start to end."""
    folder = tmp_path_factory.mktemp("answered")
    write_rows(folder / "train.jsonl", questions(40, seed=0))
    write_rows(folder / "test.jsonl", questions(12, seed=1))
    return folder, finish_example(
        start_forked(folder, "answer_questions.py", *TINY, *FILES, *ANSWER, "--max_steps", "6")
    )


def test_classification_leaves_what_it_promises(classified: tuple[Path, str]) -> None:
    folder, output = classified
    results = json.loads((folder / "run" / "results.json").read_text())
    assert {"results.md", "scores.png", "sparse", "dense"} <= {file.name for file in (folder / "run").iterdir()}
    assert results["data"]["classes"] == ["ships", "weather"]
    for kind, several in results["seeds"].items():
        assert [result["seed"] for result in several] == [3, 4]
        assert {result["num_steps"] for result in several} == {6}
        assert results["models"][kind]["reload_difference"] <= 1e-6
        assert results["models"][kind]["training_step_peak_bytes"] > 0
    assert list(results["models"]["sparse"]["scores"]) == ["first 32", "first 128", "first 256"]
    assert list(results["models"]["dense"]["scores"]) == ["first 32", "all, in chunks of 32"]
    assert results["models"]["sparse"]["parameters"] == results["models"]["dense"]["parameters"]
    assert results["data"]["long_test_documents"] == 11
    for scores in (*results["models"]["sparse"]["scores"].values(), results["most_frequent_class"]):
        assert scores["accuracy_long"] == scores["accuracy"]
    assert "macro F1" in output


def test_long_documents_are_scored_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from classification.classify_evaluation import scores_of
    from classification.documents import Documents

    documents = Documents([[5] * 30, [5] * 31, [5] * 40], labels=[0, 1, 1], long_from=32)
    scores = scores_of([1, 1, 0], documents)
    assert (scores["accuracy"], scores["accuracy_long"]) == (pytest.approx(1 / 3), 0.5)
    assert "accuracy_long" not in scores_of([1], Documents([[5] * 30], labels=[0], long_from=32))


def test_a_bag_of_words_needs_the_end_of_these_documents(classified: tuple[Path, str]) -> None:
    bags = json.loads((classified[0] / "run" / "results.json").read_text())["bag_of_words"]
    assert bags["first 256"]["accuracy"] == 1.0 > bags["first 32"]["accuracy"]


def test_saved_classifier_gives_the_reported_accuracy(classified: tuple[Path, str]) -> None:
    folder, _ = classified
    result = json.loads((folder / "run" / "results.json").read_text())["seeds"]["sparse"][0]
    classify = pipeline("text-classification", model=str(folder / "run" / "sparse"), device="cpu")
    rows = documents(11, seed=1)
    said = [classify(row["body"], truncation=True)[0]["label"] for row in rows]
    accuracy = accuracy_score([row["topic"] for row in rows], said)
    assert result["scores"]["first 256"]["accuracy"] == pytest.approx(accuracy)


def test_answers_leave_what_they_promise(answered: tuple[Path, str]) -> None:
    folder, output = answered
    results = json.loads((folder / "run" / "results.json").read_text())
    assert {"results.md", "scores.png", "whole", "truncated"} <= {file.name for file in (folder / "run").iterdir()}
    whole, truncated = (results["models"][kind] for kind in ("whole", "truncated"))
    assert whole["within"] == 1.0
    assert truncated["within"] == 0.5  # every other answer stands at the end
    assert truncated["train_questions"] == whole["train_questions"] / 2 == 20
    for result in (whole, truncated):
        assert result["reload_difference"] <= 1e-6
        assert 0 <= result["exact_match"] <= result["f1"] <= 100
        assert sum(place["questions"] for place in result["by_position"]) == 12
    assert "answers within reach" in output


def test_saved_question_answerer_gives_the_reported_answers(answered: tuple[Path, str]) -> None:
    folder, _ = answered
    results = json.loads((folder / "run" / "results.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(folder / "run" / "whole")
    model = AutoModelForQuestionAnswering.from_pretrained(folder / "run" / "whole").eval()
    row, said = questions(12, seed=1)[0], results["models"]["whole"]["answers"][0]["said"]
    inputs = tokenizer(row["question"], row["context"], return_tensors="pt", return_offsets_mapping=True)
    first = inputs["input_ids"][0].tolist().index(tokenizer.sep_token_id) + 1
    offsets = inputs.pop("offset_mapping")[0, first:-1]
    asked = inputs["input_ids"][0, 1 : first - 1]
    inputs["token_type_ids"] = torch.isin(inputs["input_ids"], asked).long().index_fill(1, torch.arange(first), 0)
    with torch.no_grad():
        outputs = model(**inputs)
    scores = outputs.start_logits[0, first:-1, None] + outputs.end_logits[0, None, first:-1]
    best = scores.masked_fill(torch.ones_like(scores).triu().logical_not(), -torch.inf).argmax()
    begin, end = divmod(int(best), len(offsets))
    assert row["context"][int(offsets[begin][0]) : int(offsets[end][1])].strip() == said


SHORT = ["--truncated_length", "32"]
BAD_INPUTS = {
    "unknown corpus": ("classify_documents.py", ["--corpus", "sotu"], "spam_assassin, state_of_the_union"),
    "odd window": ("classify_documents.py", ["--attention_window", "7"], "must be even"),
    "one class": ("classify_documents.py", ["--train_file", "one.jsonl"], "one class only"),
    "no package": ("classify_documents.py", ["--packages_from", "nowhere"], "packages_from"),
    "no network": ("classify_documents.py", ["--dataset_name", "imdb"], "--train_file"),
    "missing column": ("answer_questions.py", [*SHORT, "--train_file", "one.jsonl"], "no column question, context"),
    "unknown option": (
        "answer_questions.py",
        [*SHORT, "--context_column_name", "text"],
        "Unknown option --context_column",
    ),
    "misspelt option": ("classify_documents.py", ["--text_columns", "x"], "Did you mean '--text_column_name'?"),
    "null text": ("classify_documents.py", ["--train_file", "null.jsonl"], "null.jsonl, row 2: column text is null"),
    "wrong field": ("answer_questions.py", [*SHORT, "--train_file", "q.jsonl", "--config_overrides", "hidn=2"], "hidn"),
    "answers cut off": (
        "answer_questions.py",
        [*SHORT, "--train_file", "far.jsonl", "--max_length", "32"],
        "lies within 32",
    ),
}


def write_bad_rows(folder: Path) -> None:
    write_rows(folder / "one.jsonl", [{"text": "a document", "label": 1}] * 20)
    write_rows(folder / "q.jsonl", questions(20, seed=0))
    write_rows(folder / "far.jsonl", questions(20, seed=0)[1::2])
    write_rows(folder / "null.jsonl", [{"text": "a document", "label": 1}, {"text": None, "label": 0}])


def test_bad_inputs_are_refused_in_one_line(tmp_path: Path) -> None:
    check_refusals(tmp_path, BAD_INPUTS, write_bad_rows)


def test_a_folder_with_a_run_is_not_overwritten(answered: tuple[Path, str]) -> None:
    folder, _ = answered
    assert "already holds a run" in finish_example(
        start_forked(folder, "answer_questions.py", *TINY, *FILES, *ANSWER), exit_code=2
    )
