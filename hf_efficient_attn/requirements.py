"""Which versions of torch and transformers the package needs: said once, and checked before anything else is imported.

`pyproject.toml` says the same (a test compares them); it is not at hand where the package runs from a source tree.
"""

import re
from importlib import import_module, metadata
from importlib.util import find_spec

VERSION = "0.1.0"
# library -> (first version, first version that is too new, if there is one)
REQUIREMENTS: dict[str, tuple[str, str | None]] = {"torch": ("2.11", None), "transformers": ("5.16", "6")}


def check_requirements() -> None:
    """Raise ImportError, which says what is needed and what is installed, unless all of it fits."""
    for library, (first, too_new) in REQUIREMENTS.items():
        needed = f"{library} >= {first}" + (f" and < {too_new}" if too_new else "")
        pinned = f"{library}>={first}" + (f",<{too_new}" if too_new else "")
        version = installed_version(library)
        if version is None or not fits(version, first, too_new):
            raise ImportError(
                f"hf_efficient_attn: {needed} is needed, {version or 'none'} is installed. Run: pip install '{pinned}'",
                name=library,
            )


def installed_version(library: str) -> str | None:
    """Return the version of a library, without importing it where that can be known; None: it is not there."""
    if find_spec(library) is None:
        return None
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        # a source tree
        return str(import_module(library).__version__)


def fits(version: str, first: str, too_new: str | None) -> bool:
    """Return whether a version lies between two others; those before a release count as the release.

    >>> fits("5.16.0.dev0", "5.16", "6"), fits("4.57.6", "5.16", "6"), fits("6.0.0rc1", "5.16", "6")
    (True, False, False)
    """
    return _numbers(first) <= _numbers(version) and (too_new is None or _numbers(version) < _numbers(too_new))


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a release; zeros at the end are left out, so that 6 and 6.0 are equal."""
    release = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(number) for number in release[0].split(".")] if release else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
