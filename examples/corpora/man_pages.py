"""tbd"""

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
