"""Figures, tick labels, and checks of output paths; matplotlib is optional, and imported only to draw a figure."""

import os
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import Any

from hf_efficient_attn.errors import ConfigurationError, InputError


def new_figure(width_inches: float, height_inches: float) -> Any:
    """Return an empty matplotlib `Figure` that arranges its panels itself and needs no display.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "The picture needs matplotlib, which is not installed. Run: pip install matplotlib"
        ) from error
    return Figure(figsize=(width_inches, height_inches), layout="constrained")


def plain_number(value: float, position: int | None = None) -> str:
    """Return a number as the label of a tick: no powers of ten, and commas between thousands.

    >>> plain_number(2500.0), plain_number(0.5), plain_number(0.00001)
    ('2,500', '0.5', '0.00001')
    """
    return f"{value:,.0f}" if abs(value) >= 10 else f"{value:.10f}".rstrip("0").rstrip(".")


def can_draw() -> bool:
    """Return whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def check_picture(path: str | PathLike[str]) -> None:
    """Raise the errors that `save_figure` would raise, before anything is measured.

    Raises:
        ImportError: matplotlib is not installed.
        ConfigurationError: matplotlib cannot write files of this suffix.
        InputError: the file cannot be written.
    """
    _check_suffix(new_figure(1, 1), path)
    check_destination(path)


def check_destination(path: str | PathLike[str]) -> None:
    """Check that a file can be written. Its content is kept; a file and folders created for the check are removed.

    Raises:
        InputError: the file cannot be written.
    """
    file = Path(path)
    is_new = not os.path.lexists(file)
    missing = [folder for folder in file.parents if not folder.exists()]
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("ab"):
            pass
        if is_new:
            file.unlink()
        for folder in missing:
            folder.rmdir()
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}. Give another path.") from error


def save_figure(figure: Any, path: str | PathLike[str], pixels_per_inch: int) -> None:
    """Write a figure in the format of the path's suffix; missing folders are created.

    Raises:
        ConfigurationError: matplotlib cannot write files of this suffix.
    """
    _check_suffix(figure, path)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=pixels_per_inch)


def _check_suffix(figure: Any, path: str | PathLike[str]) -> None:
    formats = figure.canvas.get_supported_filetypes()
    if Path(path).suffix.removeprefix(".").lower() not in formats:
        raise ConfigurationError(
            f"{path} does not end with the suffix of a picture; use one of: {', '.join(sorted(formats))}."
        )


def legend_below(axis: Any, columns: int) -> None:
    """Write the legend of a panel below it, in so many columns."""
    axis.legend(
        fontsize=8, ncols=columns, columnspacing=1.2, loc="upper center", bbox_to_anchor=(0.5, -0.17), frameon=False
    )
