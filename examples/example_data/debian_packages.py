"""Descriptions of Debian's packages."""

import re
from collections.abc import Iterator
from random import Random

from datasets import Dataset, DatasetDict

from example_data import packages
from example_data.texts import letters

LEAST_WORDS, MOST_WORDS = 15, 60
# limit for validation, because a few large families would otherwise be half of it
MOST_OF_A_FAMILY = 3


def package_summaries() -> DatasetDict:
    """Return descriptions of Debian's packages, `source`, and the line that sums each up, `target`.

    There are 39,000 descriptions, of 36 words on average. A source becomes several packages (a library, its headers,
    its documentation) whose descriptions begin alike. Packages with the same source, opening paragraph or summary are a
    family, and a tenth of the families is held out, with at most three packages each. The rows come from apt-get's
    signed lists of packages, which change every day, and the rows change a little with them.
    """
    families: dict[str, list[dict[str, str]]] = {}
    rows = _distinct_rows()
    for row, family in zip(rows, _families(rows), strict=True):
        families.setdefault(family, []).append({"source": row["text"], "target": row["summary"]})
    names = list(families)
    Random(0).shuffle(names)
    num_held_out = -(-len(names) // 10)
    validation = [row for name in names[:num_held_out] for row in families[name][:MOST_OF_A_FAMILY]]
    train = [row for name in names[num_held_out:] for row in families[name]]
    return DatasetDict(train=Dataset.from_list(train), validation=Dataset.from_list(validation))


def _distinct_rows() -> list[dict[str, str]]:
    """Return `text`, `summary` and `source` of each package whose description is neither too short nor too long."""
    if not list(packages.LISTS.glob("*_Translation-en")):
        packages.update_package_lists()
    sources, rows = {}, {}
    for fields in _stanzas("*_Packages"):
        sources[fields["Package"]] = fields.get("Source", fields["Package"]).split()[0]
    for fields in _stanzas("*_Translation-en"):
        summary, _, text = fields["Description-en"].partition("\n")
        row = {"text": re.sub(r"(?m)^ \.?", "", text).strip(), "summary": summary.strip()}
        row["source"] = sources.get(fields["Package"], fields["Package"])
        if LEAST_WORDS <= len(row["text"].split()) <= MOST_WORDS and not re.search("(?i)transitional|dummy", summary):
            rows.setdefault((letters(row["text"]), letters(summary)), row)
    return list(rows.values())


def _families(rows: list[dict[str, str]]) -> list[str]:
    """Return a name for each row, the same for rows that have a source, an opening or a summary in common."""
    parents: dict[str, str] = {}

    def head(name: str) -> str:
        while (parent := parents.setdefault(name, name)) != name:
            name = parent
        return name

    heads = []
    for row in rows:
        opening = row["text"].split("\n\n")[0]
        heads.append(head(f"source {row['source']}"))
        for shared in (f"opening {letters(opening)}", f"summary {letters(row['summary'])}"):
            parents[head(shared)] = heads[-1]
    return [head(name) for name in heads]


def _stanzas(lists: str) -> Iterator[dict[str, str]]:
    """Yield the fields of each package in the lists whose names match."""
    for file in sorted(packages.LISTS.glob(lists)):
        for stanza in file.read_text("utf-8").split("\n\n"):
            if fields := dict(re.findall(r"(?m)^([\w-]+): ?(.*(?:\n .*)*)", stanza)):
                yield fields
