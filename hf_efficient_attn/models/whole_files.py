"""Whether a file of tensors is whole, by its header and its length; no tensor is read."""

import json
import zipfile
from pathlib import Path

# headers of real models are smaller; a larger length is damaged
MOST_HEADER_BYTES = 100_000_000
SAFETENSORS = ".safetensors"
# as torch.save writes them
ZIPS = (".bin", ".pt", ".pth")


def why_not_whole(file: Path) -> str | None:
    """Return what is wrong with a file of safetensors or `torch.save`, as the end of a sentence; None: nothing."""
    try:
        if not file.is_file():
            return "is missing" if not file.exists() else "is no file"
        return _why_not_safetensors(file) if file.suffix == SAFETENSORS else _why_not_zip(file)
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def tensor_names(file: Path) -> set[str]:
    """Return the names in the header of a whole file of safetensors."""
    return set(_header(file)[0]) - {"__metadata__"}


def _header(file: Path) -> tuple[dict[str, dict], int]:
    """Return the header of a file of safetensors, and the byte at which the numbers begin.

    Raises:
        ValueError: it has no header.
    """
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        if not 0 < size <= MOST_HEADER_BYTES:
            raise ValueError(f"a header of {size} bytes")
        header = json.loads(stream.read(size))
    if not isinstance(header, dict) or not all(isinstance(entry, dict) for entry in header.values()):
        raise ValueError("a header that is no table")
    return header, 8 + size


def _why_not_safetensors(file: Path) -> str | None:
    try:
        header, start = _header(file)
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        wanted = start + max(ends, default=0)
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        return "has no readable header"
    size = file.stat().st_size
    return None if size == wanted else f"has {size:,} bytes where its header says {wanted:,}"


def _why_not_zip(file: Path) -> str | None:
    try:
        with zipfile.ZipFile(file) as archive:
            # the list of members is at the end
            return None if archive.namelist() else "is empty"
    except (zipfile.BadZipFile, ValueError, EOFError, NotImplementedError):
        return "is cut off"
