"""What was measured and committed, by the name of its benchmark, example or analysis."""

import json
from pathlib import Path
from typing import Any

CARDS = Path(__file__).parent


def files(name: str) -> list[Path]:
    """Return the file of committed results, in a list; empty: nothing was committed yet."""
    places = (CARDS / f"bench_{name}", CARDS / "examples", CARDS)
    return [file for file in (place / f"{name}.json" for place in places) if file.exists()][:1]


def results(name: str) -> Any:
    """Return the committed results of a benchmark, an example or an analysis, or those of a script in tests/."""
    found = files(name)
    if not found:
        raise FileNotFoundError(
            f"There is no {name}.json in bench_{name} or examples: commit what its command has written."
        )
    return json.loads(found[0].read_text(encoding="utf-8"))
