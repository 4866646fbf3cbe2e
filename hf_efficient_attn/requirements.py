"""The versions of torch and transformers that the package needs, checked before anything else is imported.

`pyproject.toml` repeats them (a test compares the two), but cannot be read when the package is not installed.
"""

import re
from importlib import import_module, metadata
from importlib.util import find_spec

VERSION = "0.1.0"
# library -> (first version, first version that is too new, if there is one)
REQUIREMENTS: dict[str, tuple[str, str | None]] = {"torch": ("2.11", None), "transformers": ("5.16", "6")}


def check_requirements() -> None:
    """Raise ImportError, with the needed and the installed version, if a library is missing or does not fit."""
    for library, (first, too_new) in REQUIREMENTS.items():
        needed = f"{library} >= {first}" + (f" and < {too_new}" if too_new else "")
        pinned = f"{library}>={first}" + (f",<{too_new}" if too_new else "")
        version = installed_version(library)
        if version is None or not fits(version, first, too_new):
            raise ImportError(
                f"hf_efficient_attn needs {needed}, but {version or 'none'} is installed. Run: pip install '{pinned}'",
                name=library,
            )


def installed_version(library: str) -> str | None:
    """Return the version of a library, or None if it is missing. It is imported only if it has no metadata."""
    if find_spec(library) is None:
        return None
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        # a source tree
        return str(import_module(library).__version__)


def fits(version: str, first: str, too_new: str | None) -> bool:
    """Return whether `first <= version < too_new`; a pre-release counts as its release.

    >>> fits("5.16.0.dev0", "5.16", "6"), fits("4.57.6", "5.16", "6"), fits("6.0.0rc1", "5.16", "6")
    (True, False, False)
    """
    return _numbers(first) <= _numbers(version) and (too_new is None or _numbers(version) < _numbers(too_new))


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a release without trailing zeros, so that 6 and 6.0 are equal."""
    release = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(number) for number in release[0].split(".")] if release else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
