"""The table of every mechanism on ListOps, for `figures.py`."""

import sys
from typing import Any

from committed import CARDS

from hf_efficient_attn.bench.harness.report import machine_line

# what the experiment prints at the end of a run
sys.path.append(str(CARDS.parent / "examples" / "experiments"))

from comparison.list_scores import results_text  # noqa: E402


def list_operations(found: dict[str, Any]) -> str:
    """Return what the mechanisms of `listops.py` reach, and how long they take; `added`: rows of later runs."""
    later = [f"Added: {', '.join(run['mechanisms'])}. {origin(run)}" for run in found.get("added", ())]
    return "\n\n".join((f"{results_text(found)} {origin(found)}", *later))


def origin(run: dict[str, Any]) -> str:
    """Return how, where and when a run was made."""
    return f"`{run['command']}`. *{machine_line(run['machine'])}. {run['note']}*"
