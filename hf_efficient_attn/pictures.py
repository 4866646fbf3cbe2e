"""An empty figure for whoever draws; matplotlib is optional and imported only here."""

from importlib.util import find_spec
from typing import Any


def new_figure(width_inches: float, height_inches: float) -> Any:
    """Return an empty matplotlib `Figure` that arranges its panels itself and needs no display.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "The picture needs matplotlib, which is not installed. Run: pip install 'hf-efficient-attn[plot]'"
        ) from error
    return Figure(figsize=(width_inches, height_inches), layout="constrained")


def can_draw() -> bool:
    """Return whether matplotlib is installed."""
    return find_spec("matplotlib") is not None
