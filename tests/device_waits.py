"""How often a computation waits for its device, by the line that makes it wait; `pretended_cuda` counts."""

from __future__ import annotations

import re
import traceback
from collections import Counter

PACKAGE = "hf_efficient_attn"
# whose code makes the host wait: that which stands nearest
PLACES = rf"/({PACKAGE}|transformers)/(?!tests/)"


class Waits(Counter[str]):
    """How often each line of the package, or of transformers, waited for the device or copied from one to the other."""

    def note(self, what: str) -> None:
        frames = [frame for frame in traceback.extract_stack() if re.search(PLACES, frame.filename)]
        name = re.split(PLACES, frames[-1].filename)[1] if frames else "elsewhere"
        place = f"{frames[-1].filename.rpartition(name)[2]}:{frames[-1].lineno}" if frames else ""
        self[f"{name}: {what} at {place}"] += 1

    def of_package(self) -> Waits:
        """Return those that are not transformers' own."""
        return Waits({key: count for key, count in self.items() if not key.startswith("transformers")})


waits = Waits()
