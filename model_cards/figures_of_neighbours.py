"""The tables of what the tests have found of the libraries beside this package, and of versions."""

from typing import Any

from hf_efficient_attn.bench.harness.report import markdown_table

YES, NO, UNTESTED = "✓", "no", ""
SPARSIFIED = "models of Transformers, sparsified"


def neighbours_table(found: dict[str, Any]) -> str:
    """Return the table, with a number at each cell of which something is refused or cannot be, and below it what."""
    notes: list[str] = []
    lines = []
    for family, cells in found["cells"].items():
        shown = [_cell(cells.get(column), notes) for column in found["columns"]]
        lines.append([SPARSIFIED if family == "sparsified" else f"`{family}`", *shown])
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    numbered = "\n".join(f"{number}. {note}" for number, note in enumerate(notes, 1))
    table = markdown_table(["", *found["columns"]], lines)
    said = "What is refused, in the words that a user reads (… is a name), or cannot be:"
    return f"{table}\n\n{said}\n\n{numbered}\n\n*{versions}*"


def versions_table(found: list[dict[str, Any]]) -> str:
    """Return the versions that were tested together, which parts with them, and how many tests have passed."""
    lines = [
        [
            *(row[name] for name in ("python", "torch", "transformers")),
            ", ".join(row["parts"]),
            f"{row['passed']:,}",
            _failed(row),
            row["date"],
        ]
        for row in found
    ]
    return markdown_table(["Python", "torch", "transformers", "parts", "tests passed", "failed", "on"], lines)


def _failed(row: dict[str, Any]) -> str:
    return ", ".join(f"`{test}`" for test in row["failed"]) or "0"


def _cell(cell: dict[str, Any] | None, notes: list[str]) -> str:
    if cell is None:
        return UNTESTED
    found = [*cell["refused"], *cell.get("reasons", [])]
    notes.extend(note for note in found if note not in notes)
    numbers = " ".join(f"({notes.index(note) + 1})" for note in found)
    return f"{YES if cell['works'] else NO} {numbers}".strip()
