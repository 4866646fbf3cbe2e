"""Extractive question answering over the Free On-line Dictionary of Computing.

Package: Debian `dict-foldoc` 20230119-1, 2.4 MB. Its copyright file names the GNU Free Documentation License 1.1 or
later, without invariant sections, and asks to be cited as "The Free On-line Dictionary of Computing,
http://www.foldoc.org/, Editor Denis Howe".

12,012 entries, of which 10,223 have an answer of 4 to 60 words and are unique in headword, definition and answer. With
the 8 entries of a context that `load` takes unless told:

| split | questions | words of a context, median | 90 % | longest | words of an answer, median | longest |
|---|---:|---:|---:|---:|---:|---:|
| train | 8,220 | 475 | 802 | 4,517 | 14 | 59 |
| validation | 957 | 507 | 881 | 1,764 | 13 | 57 |
| test | 1,046 | 495 | 824 | 4,632 | 14 | 52 |

The text is real, the questions are four templates: what is learnt is to find an entry in a long text and where its
first sentence ends, not to understand free questions. An answer occurs once in its context. Entries serve as company in
other contexts of their own split only. Some are jargon, a few of them crude; first sentences are found by rule.
"""

import gzip
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from corpora.archives import read_members
from corpora.packages import Package, fetch
from corpora.splits import SPLITS, Row, Splits, letters, split_of

PACKAGE = Package(
    client="apt-get",
    name="dict-foldoc",
    version="20230119-1",
    sha256="745cbedb55c2da609cc88ee0284e9d11a67a11ae3709daf7bad0e895ac3294c3",
    num_bytes=2_408_824,
)
QUESTIONS = ("What is {}?", "What does {} mean?", "How is {} defined?", "What is meant by {}?")
MIN_ANSWER_WORDS, MAX_ANSWER_WORDS = 4, 60
NO_ANSWER = ("See ", "See:", "Compare ")
ABBREVIATIONS = "".join(rf"(?<!\b{word})" for word in (r"e\.g", r"i\.e", "etc", "vs", "c", "Mr", "Dr", "Prof", "[A-Z]"))
SENTENCE_END = re.compile(ABBREVIATIONS + r"[.!?][\"')\]]*(?=\s+[^a-z\s]|\s*$)")


@dataclass(frozen=True)
class Entry:
    """A headword of the dictionary, its definition, and the first sentence of that."""

    headword: str
    definition: str
    first_sentence: str


def load(*, num_entries: int = 8, packages_from: Path | None = None, accept_other_version: bool = False) -> Splits:
    """Return rows in the form of SQuAD: "id", "title", "question", "context" and "answers" {"text", "answer_start"}.

    Each row asks for one entry; its context is that entry and others of the same split, in random order, as
    "headword: definition" and parted by an empty line. The answer is the entry's first sentence. Headwords and
    definitions are unique; the split is by the hash of the headword.

    Args:
        num_entries: dictionary entries in a context, the one asked for included.

    Raises:
        ValueError: a context cannot have that many entries.
        PackageError: the package cannot be had; see `packages.fetch` for the arguments.
    """
    file = fetch(PACKAGE, packages_from=packages_from, accept_other_version=accept_other_version)
    content = dict(read_members(file, "usr/share/dictd/foldoc.dict.dz")).popitem()[1]
    by_split: dict[str, list[Entry]] = {name: [] for name in SPLITS}
    for entry in _distinct(entries(gzip.decompress(content).decode("utf-8"))):
        by_split[split_of(entry.headword.lower())].append(entry)
    fewest = min(map(len, by_split.values()))
    if not 1 <= num_entries <= fewest:
        raise ValueError(f"num_entries={num_entries}. Allowed: 1 to {fewest}, the entries of the smallest split.")
    return {name: [_row(entry, several, num_entries) for entry in several] for name, several in by_split.items()}


def _row(entry: Entry, candidates: list[Entry], num_entries: int) -> Row:
    random = Random(entry.headword)
    others = [other for other in random.sample(candidates, num_entries) if other is not entry]
    chosen = [entry, *others[: num_entries - 1]]
    random.shuffle(chosen)
    place = chosen.index(entry)
    texts = [f"{one.headword}: {one.definition}" for one in chosen]
    before = sum(len(text) + len("\n\n") for text in texts[:place])
    return {
        "id": f"foldoc-{entry.headword}",
        "title": entry.headword,
        "question": random.choice(QUESTIONS).format(entry.headword),
        "context": "\n\n".join(texts),
        "answers": {
            "text": [entry.first_sentence],
            "answer_start": [before + len(f"{entry.headword}: ")],
        },
    }


def entries(dictionary: str) -> Iterator[Entry]:
    """Yield the entries that have an answer: not those that only refer to another, nor those of the dictionary itself.

    Headwords stand at the margin, several of them on lines of their own; the definition is indented.
    """
    for block in re.split(r"\n\n(?=\S)", dictionary):
        heads, _, body = block.lstrip("\n").partition("\n\n")
        headword = re.split(r"%%%|\n", heads)[0].strip()
        if headword.startswith("00-database") or not body.startswith("   "):
            continue
        definition = definition_text(body)
        sentence = first_sentence(definition)
        if MIN_ANSWER_WORDS <= len(sentence.split()) <= MAX_ANSWER_WORDS and not sentence.startswith(NO_ANSWER):
            yield Entry(headword, definition, sentence)


def definition_text(body: str) -> str:
    """Return a definition without marks of references, subject, pronunciation, abbreviation and date.

    >>> definition_text("   <tool> /tu:l/ (TL) A {thing}\\n   for work.\\n\\n   {(http://x.org)}.\\n\\n   (2000-08-06)")
    'A thing for work.'
    """
    paragraphs = (" ".join(paragraph.split()) for paragraph in body.split("\n\n"))
    paragraphs = (re.sub(r"[{}]", "", re.sub(r"\{\([^)]*\)\}\.?", "", paragraph)) for paragraph in paragraphs)
    kept = [paragraph for paragraph in paragraphs if not re.fullmatch(r"(\(\d{4}-\d\d-\d\d\)|\[.*\])?\s*", paragraph)]
    text = " ".join(kept).strip()
    marks = re.compile(r"(1\. |<[^<>]*> |/[^/ ][^/]*/ |\([^()]{1,30}\) )")
    while mark := marks.match(text):
        text = text[mark.end() :]
    return text


def first_sentence(text: str) -> str:
    """Return the text up to its first full stop, question or exclamation mark that ends a sentence.

    >>> first_sentence("A tool, e.g. J. R. Hacker's. It works.")
    "A tool, e.g. J. R. Hacker's."
    """
    end = SENTENCE_END.search(text)
    return text[: end.end()] if end else ""


def _distinct(found: Iterator[Entry]) -> Iterator[Entry]:
    seen: set[str] = set()
    for entry in found:
        keys = {entry.headword.lower(), letters(entry.definition), letters(entry.first_sentence)}
        if not keys & seen:
            seen |= keys
            yield entry
