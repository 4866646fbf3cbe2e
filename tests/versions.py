"""The table of versions that the package was tested with: `python tests/versions.py FOLDER` with one of them.

FOLDER has pytest's reports (--junitxml). Puts this Python, torch and transformers into
model_cards/results/versions.json, with the parts that were tested, how many tests have passed and which have failed;
`python model_cards/figures.py` makes the table. See tests/versions.sh.
"""

import importlib.metadata
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

TABLE = Path(__file__).parents[1] / "model_cards" / "results" / "versions.json"
LIBRARIES = ("torch", "transformers")


def main(folder: Path) -> None:
    """Put what the reports say into the table."""
    reports = sorted(folder.glob("*.xml"))
    entries = [test for report in reports for test in ElementTree.parse(report).iter("testcase")]
    # by their names, since parts may overlap; an entry without a name is a test that was interrupted
    tested = {name_of(test): test for test in entries if test.get("name")}
    if not tested:
        raise SystemExit(f"{folder} has no report of a test.")
    failed = [name for name, test in tested.items() if {"failure", "error"} & {child.tag for child in test}]
    num_skipped = sum(test.find("skipped") is not None for test in tested.values())
    versions = {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in LIBRARIES}}
    row = {
        **versions,
        "parts": [report.stem for report in reports],
        "passed": len(tested) - len(failed) - num_skipped,
        "skipped": num_skipped,
        "failed": sorted(failed),
        "date": time.strftime("%Y-%m-%d"),
    }
    known = json.loads(TABLE.read_text(encoding="utf-8")) if TABLE.exists() else []
    rows = sorted([row, *(other for other in known if minor(other) != minor(row))], key=minor)
    TABLE.write_text("[\n" + ",\n".join(f" {json.dumps(row)}" for row in rows) + "\n]\n", encoding="utf-8")
    print(f"{versions}: {row['passed']} passed, {num_skipped} skipped, {len(failed)} failed")


def name_of(test: ElementTree.Element) -> str:
    return f"{test.get('classname')}::{test.get('name')}"


def minor(row: dict[str, Any]) -> list[int]:
    """Return a row's version of Python, of which the table has one row: 3.10.13 is [3, 10]."""
    return [int(number) for number in row["python"].split(".")[:2]]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
