"""What was measured and committed, by the name of its benchmark, example or analysis."""

import json
from pathlib import Path
from typing import Any

CARDS = Path(__file__).parent


def results(name: str) -> Any:
    """Return the committed results of a benchmark, an example or an analysis, or those of a script in tests/."""
    places = (CARDS / f"bench_{name}", CARDS / "examples", CARDS)
    file = next(place / f"{name}.json" for place in places if (place / f"{name}.json").exists())
    return json.loads(file.read_text(encoding="utf-8"))
