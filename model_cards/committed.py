"""What was measured and committed, by the name of its benchmark, example or analysis."""

import json
from pathlib import Path
from typing import Any

CARDS = Path(__file__).parent


def results(name: str) -> dict[str, Any]:
    """Return the committed results of a benchmark, an example or an analysis, or those of tests/neighbours.sh."""
    places = (CARDS / f"bench_{name}", CARDS / "examples", CARDS)
    file = next(place / f"{name}.json" for place in places if (place / f"{name}.json").exists())
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found
