"""Descriptions of Debian's packages."""

import re
from collections.abc import Iterator

from datasets import Dataset, DatasetDict

from example_data import packages
from example_data.texts import held_out, letters


def package_summaries() -> DatasetDict:
    """Return descriptions of Debian's packages, `text`, and the line that sums each up, `summary`.

    Of each source one package, so that no row is like another: 33,000 of 60 words in the mean. They come from the
    lists of packages that apt-get keeps, signed, in a version of their own each day: the rows differ a little with it.
    """
    if not list(packages.LISTS.glob("*_Translation-en")):
        packages.update_package_lists()
    sources, by_source, by_letters = {}, {}, {}
    for fields in _stanzas("*_Packages"):
        sources[fields["Package"]] = fields.get("Source", fields["Package"]).split()[0]
    for fields in _stanzas("*_Translation-en"):
        by_source.setdefault(sources.get(fields["Package"], fields["Package"]), []).append(fields)
    for several in by_source.values():
        # the shortest name is that of the package itself, not of its documentation or data
        fields = min(several, key=lambda fields: (len(fields["Package"]), fields["Package"]))
        summary, _, text = fields["Description-en"].partition("\n")
        row = {"text": re.sub(r"(?m)^ \.?", "", text).strip(), "summary": summary.strip()}
        if len(row["text"].split()) >= 15 and not re.search("(?i)transitional|dummy", summary):
            by_letters.setdefault(letters(summary), row)
    return held_out(Dataset.from_list(list({letters(row["text"]): row for row in by_letters.values()}.values())))


def _stanzas(lists: str) -> Iterator[dict[str, str]]:
    """Yield the fields of each package in the lists whose names match."""
    for file in sorted(packages.LISTS.glob(lists)):
        for stanza in file.read_text("utf-8").split("\n\n"):
            if fields := dict(re.findall(r"(?m)^([\w-]+): ?(.*(?:\n .*)*)", stanza)):
                yield fields
