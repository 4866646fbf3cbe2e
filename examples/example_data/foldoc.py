"""Questions about entries of a dictionary."""

import gzip
import re
from random import Random
from typing import Any

from datasets import Dataset, DatasetDict

from example_data import packages
from example_data.texts import held_out, letters


def dictionary_questions(num_entries: int = 8) -> DatasetDict:
    """Return questions with a passage that answers them, in the columns of SQuAD.

    A context is `num_entries` entries of the Free On-line Dictionary of Computing (foldoc.org); 8 of them have about
    500 words. A question asks for one of them, and its answer is the entry's first sentence. There are 10,200 questions
    of four kinds.
    """
    return DatasetDict({split: _questions(entries, num_entries) for split, entries in _dictionary(num_entries).items()})


def order_questions(num_entries: int, num_rows: dict[str, int]) -> DatasetDict:
    """Return questions that name two entries of a text and ask which of them comes first, in the columns of SQuAD.

    The answer is the first sentence of that entry. A part of the text with only one of the two does not tell which
    comes first. The column `other_start` is the place of the other entry's first sentence.

    Args:
        num_entries: entries of a text, each cut after 600 characters, in random order.
        num_rows: split → number of its questions.
    """
    splits = {}
    for split, entries in _dictionary(num_entries).items():
        short = [{**entry, "definition": entry["definition"][:600]} for entry in entries if len(entry["answer"]) < 600]
        splits[split] = Dataset.from_list([_order_question(short, num_entries, row) for row in range(num_rows[split])])
    return DatasetDict(splits)


def _dictionary(num_entries: int) -> dict[str, list[dict[str, str]]]:
    """Return the dictionary's entries for training and for validation.

    Raises:
        SystemExit: there are fewer than `num_entries` for validation.
    """
    archive = packages.fetch(
        "apt-get",
        "dict-foldoc=20230119-1",
        "745cbedb55c2da609cc88ee0284e9d11a67a11ae3709daf7bad0e895ac3294c3",
    )
    ((_, content),) = packages.members(archive, "usr/share/dictd/foldoc.dict.dz")
    entries = held_out(Dataset.from_list(_entries(gzip.decompress(content).decode("utf-8"))))
    if num_entries > (number := len(entries["validation"])):
        raise SystemExit(f"A context needs {num_entries} entries, but only {number} are held out for validation.")
    return {split: rows.to_list() for split, rows in entries.items()}


def _entries(dictionary: str) -> list[dict[str, str]]:
    """Return `word`, `definition` and `answer` of entries with a first sentence of 4 to 60 words, without copies."""
    entries, seen = [], set()
    for block in re.split(r"\n\n(?=\S)", dictionary):
        heads, _, body = block.lstrip("\n").partition("\n\n")
        word = re.split(r"%%%|\n", heads)[0].strip()
        # remove references and dates; then subject, pronunciation and abbreviation before the first sentence
        text = " ".join(re.sub(r"\{\([^)]*\)\}\.?|[{}]|\(\d{4}-\d\d-\d\d\)|\n\s*\[.*?\]\s*\n", "", body).split())
        text = re.sub(r"^(1\. |<[^<>]*> |\[[^][]*\] |/[^/ ][^/]*/ |\([^()]{1,30}\) )+", "", text)
        end = re.search(
            r"(?<!e\.g)(?<!i\.e)(?<!etc)(?<!vs)(?<!\b[A-Zc])(?<!\b[MD]r)[.!?][\"')\]]*(?=\s+[^a-z\s]|$)", text
        )
        answer = text[: end.end()] if end else ""
        copies = {word.lower(), letters(text), letters(answer)}
        if 4 <= len(answer.split()) <= 60 and not re.match("See[ :]|Compare ", answer) and not copies & seen:
            seen |= copies
            entries.append({"word": word, "definition": text, "answer": answer})
    return entries


def _questions(entries: list[dict[str, str]], num_entries: int) -> Dataset:
    rows = []
    for number, entry in enumerate(entries):
        random = Random(number)
        chosen = [entry, *[other for other in random.sample(entries, num_entries) if other is not entry]][:num_entries]
        random.shuffle(chosen)
        kind = random.choice(["What is {}?", "What does {} mean?", "How is {} defined?", "What is meant by {}?"])
        rows.append(_row(kind.format(entry["word"]), chosen, entry))
    return Dataset.from_list(rows)


def _order_question(entries: list[dict[str, str]], num_entries: int, number: int) -> dict[str, Any]:
    random = Random(number)
    chosen = random.sample(entries, num_entries)
    first, second = sorted(random.sample(range(num_entries), 2))
    names = random.sample([chosen[first]["word"], chosen[second]["word"]], 2)
    row = _row("Which comes first, {} or {}?".format(*names), chosen, chosen[first])
    return {**row, "other_start": _row("", chosen, chosen[second])["answers"]["answer_start"][0]}


def _row(question: str, entries: list[dict[str, str]], asked: dict[str, str]) -> dict[str, Any]:
    """Return a row of SQuAD: the text is the entries, the answer is the first sentence of one of them."""
    texts = [f"{entry['word']}: {entry['definition']}" for entry in entries]
    start = len("\n\n".join([*texts[: entries.index(asked)], ""])) + len(f"{asked['word']}: ")
    answers = {"text": [asked["answer"]], "answer_start": [start]}
    row = {"id": f"foldoc-{asked['word']}", "title": asked["word"], "question": question}
    return {**row, "context": "\n\n".join(texts), "answers": answers}
