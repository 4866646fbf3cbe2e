"""What was measured and committed, by the name of its benchmark, example or analysis."""

import json
from pathlib import Path
from typing import Any

CARDS = Path(__file__).parent


def results(name: str) -> dict[str, Any]:
    """Return the committed results of a benchmark, an example or an analysis."""
    folder = CARDS / f"bench_{name}"
    file = (folder if folder.exists() else CARDS / "examples") / f"{name}.json"
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found
