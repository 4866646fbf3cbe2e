"""Questions about entries of a dictionary."""

import gzip
import re
from random import Random

from datasets import Dataset, DatasetDict

from example_data import packages
from example_data.texts import held_out, letters


def dictionary_questions(num_entries: int = 8) -> DatasetDict:
    """Return questions with a passage that answers them, in the columns of SQuAD.

    A context is that many entries of the Free On-line Dictionary of Computing (foldoc.org), some 500 words; a question
    asks for one of them, and its answer is the entry's first sentence. 10,200 questions of four kinds.
    """
    archive = packages.fetch(
        "apt-get",
        "dict-foldoc=20230119-1",
        "745cbedb55c2da609cc88ee0284e9d11a67a11ae3709daf7bad0e895ac3294c3",
    )
    ((_, content),) = packages.members(archive, "usr/share/dictd/foldoc.dict.dz")
    entries = held_out(Dataset.from_list(_entries(gzip.decompress(content).decode("utf-8"))))
    return DatasetDict({split: _questions(rows.to_list(), num_entries) for split, rows in entries.items()})


def _entries(dictionary: str) -> list[dict[str, str]]:
    """Return `word`, `definition` and `answer` of the entries with a first sentence of 4 to 60 words, copies once."""
    entries, seen = [], set()
    for block in re.split(r"\n\n(?=\S)", dictionary):
        heads, _, body = block.lstrip("\n").partition("\n\n")
        word = re.split(r"%%%|\n", heads)[0].strip()
        # references, dates; then subject, pronunciation and abbreviation before the first sentence
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
    if num_entries > len(entries):
        raise SystemExit(f"A context of {num_entries} entries: there are {len(entries)} for validation.")
    rows = []
    for number, entry in enumerate(entries):
        random = Random(number)
        chosen = [entry, *[other for other in random.sample(entries, num_entries) if other is not entry]][:num_entries]
        random.shuffle(chosen)
        texts = [f"{one['word']}: {one['definition']}" for one in chosen]
        start = len("\n\n".join([*texts[: chosen.index(entry)], ""])) + len(f"{entry['word']}: ")
        kind = random.choice(["What is {}?", "What does {} mean?", "How is {} defined?", "What is meant by {}?"])
        answers = {"text": [entry["answer"]], "answer_start": [start]}
        row = {"id": f"foldoc-{entry['word']}", "title": entry["word"], "question": kind.format(entry["word"])}
        rows.append({**row, "context": "\n\n".join(texts), "answers": answers})
    return Dataset.from_list(rows)
