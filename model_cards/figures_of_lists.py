"""The table of every mechanism on ListOps, for `figures.py`."""

import sys
from typing import Any

from committed import CARDS

from hf_efficient_attn.bench.harness.report import machine_line

# what the experiment prints at the end of a run
sys.path.append(str(CARDS.parent / "examples" / "experiments"))

from comparison.list_scores import results_text  # noqa: E402


def list_operations(found: dict[str, Any]) -> str:
    """Return what the mechanisms of `listops.py` reach, and how long they take."""
    return f"{results_text(found)} `{found['command']}`. *{machine_line(found['machine'])}. {found['note']}*"
