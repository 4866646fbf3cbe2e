"""Linux manual pages and their one-line summaries: long documents, short summaries.

Packages: Debian `manpages` and `manpages-dev` 6.03-2, 1.3 and 2.0 MB. Their copyright file names GPL-2+ for most pages,
and Linux-man-pages-copyleft, GPL-1+, GPL-2, BSD and Expat licences for others.

1,113 pages, of which 13 only refer to another one.

| split | pages | words, median | 90 % | longest | words of a summary, median | longest |
|---|---:|---:|---:|---:|---:|---:|
| train | 868 | 390 | 1,600 | 24,527 | 5 | 23 |
| validation | 106 | 434 | 1,626 | 6,507 | 5 | 15 |
| test | 126 | 364 | 2,105 | 6,354 | 5 | 13 |

The summary is what stands behind the dash of the NAME section, which is taken out of the page; 84 of the 1,100 pages
hold it word by word elsewhere. The first 12 words of DESCRIPTION reach ROUGE-L 0.22 on the test split. The summaries
name things rather than retell: this is closer to giving a title than to a summary of news. Pages of one family (such as
the character sets) resemble each other across the splits.

The pages are read by `roff_text`: compared with what nroff prints of all 1,100, 22 words are missing and 5 too many of
937,582.
"""

import gzip
import re
from pathlib import Path

from corpora.archives import read_members
from corpora.packages import Package, fetch
from corpora.roff_text import roff_text
from corpora.splits import Row, Splits, letters, split_rows, without_duplicates

PACKAGES = (
    Package(
        client="apt-get",
        name="manpages",
        version="6.03-2",
        sha256="efa1ba4cd19ad7baeae959c9209a7eb74be2ebb858bcabb412597bfc9f588c91",
        num_bytes=1_331_652,
    ),
    Package(
        client="apt-get",
        name="manpages-dev",
        version="6.03-2",
        sha256="96f55cb5e26231d5567c89b692bced63825a14a2d5bd18fdf16ea2ed44eb9838",
        num_bytes=2_030_264,
    ),
)


def load(*, packages_from: Path | None = None, accept_other_version: bool = False) -> Splits:
    """Return rows of "id" (such as "qsort.3"), "document" (the page without its name) and "summary" (one line).

    Pages with the same letters are kept once. The split is by the hash of the summary: no summary is on two sides.

    Raises:
        PackageError: a package cannot be had; see `packages.fetch` for the arguments.
    """
    rows = []
    for package in PACKAGES:
        file = fetch(package, packages_from=packages_from, accept_other_version=accept_other_version)
        pages = sorted(read_members(file, "usr/share/man/man*/*.gz"))
        rows += [row for path, content in pages if (row := _row(path, content))]
    rows = without_duplicates(rows, key=lambda row: letters(row["document"]))
    return split_rows(rows, key=lambda row: letters(row["summary"]))


def _row(path: str, content: bytes) -> Row | None:
    """Return the row of a page, or None for a page that only refers to another one."""
    sections = roff_text(gzip.decompress(content).decode("utf-8", "replace"))
    name = re.fullmatch(r"(.+?)\s+(?:-|–|—)+\s+(.+)", " ".join(sections.pop("NAME", "").split()))
    if name is None or not sections:
        return None
    document = "\n\n".join(f"{heading}\n{text}".strip() for heading, text in sections.items())
    return {"id": path.rsplit("/", 1)[-1].removesuffix(".gz"), "document": document, "summary": name[2]}
