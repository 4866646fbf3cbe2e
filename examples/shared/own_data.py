"""Data of one's own: loaded, or refused before any training by file, row and column."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corpora.splits import Row
from datasets import load_dataset
from datasets.exceptions import DatasetsError

from shared.arguments import UsageError

# suffix → builder of `datasets.load_dataset` and its options
BUILDERS = {
    ".txt": ("text", {"keep_linebreaks": True}),
    ".json": ("json", {}),
    ".jsonl": ("json", {}),
    ".csv": ("csv", {}),
}
SHOWN_CHARACTERS = 60


@dataclass(frozen=True)
class Column:
    """A column that a script reads.

    Args:
        name: as in the data.
        option: the option that names it, such as "--text_column"; None: it has this name always.
        values: the types that its values may have.
        allowed: these in words.
    """

    name: str
    option: str | None = None
    values: tuple[type, ...] = (str,)
    allowed: str = "text"

    def fault(self, row: Row) -> str | None:
        """Return what is wrong with the row's value; None: nothing."""
        value = row[self.name]
        if isinstance(value, self.values):
            return None
        return f"column {self.name} is {shown(value)}. Allowed: {self.allowed}."


def load_own(option: str, value: str, **options: Any) -> Any:
    """Return what `datasets.load_dataset` makes of a dataset's name or a file, the value of `option`.

    Args:
        options: of `load_dataset`. Without `split` the result is a dictionary of splits; a file's only one is "train".

    Raises:
        UsageError: it cannot be loaded.
    """
    path, is_file = value, option.endswith("_file")
    if is_file:
        path, of_builder = BUILDERS[Path(value).suffix]
        options = {**options, **of_builder, "data_files": value}
    try:
        return load_dataset(path, **options)
    except StopIteration as error:  # of the reader of JSON
        raise UsageError(f"{option} {value} has no rows.") from error
    except (OSError, ValueError, DatasetsError) as error:
        # where a file is not JSON or CSV, the cause says where
        reason = error.__cause__ if isinstance(error.__cause__, ValueError) else error
        advice = "" if is_file else " Without a network give --train_file, or nothing for the example's own text."
        raise UsageError(f"{option} {value} could not be loaded: {reason}{advice}") from error


def check_columns(columns: Sequence[Column], present: Sequence[str], where: str) -> None:
    """Raise UsageError if a column is missing from those of the rows of `where`, a file or a split."""
    missing = [column for column in columns if column.name not in present]
    if not missing:
        return
    options = [column.option for column in missing if column.option]
    advice = f"Name them by {', '.join(options)}." if options else "These names are fixed: rename those of the data."
    raise UsageError(
        f"{where} has no column {', '.join(column.name for column in missing)}. Columns: {', '.join(present)}. "
        f"Needed: {', '.join(column.name for column in columns)}. {advice}"
    )


def check_rows(rows: Iterable[Row], faults: Sequence[Callable[[Row], str | None]], where: str) -> None:
    """Raise UsageError by the first row in which something is wrong; it also says in how many.

    Args:
        faults: each returns what is wrong with a row, None for nothing; the later ones see only rows that the earlier
            ones pass.
        where: the file or split.
    """
    first, num_rows, num_wrong = None, 0, 0
    for num_rows, row in enumerate(rows, start=1):
        fault = next((found for check in faults if (found := check(row))), None)
        if fault:
            num_wrong += 1
            first = first or f"{where}, row {num_rows}: {fault}"
    if first:
        raise UsageError(f"{first} Mend or leave out such rows: {num_wrong:,} of {num_rows:,}.")


def shown(value: Any) -> str:
    """Return a value for an error message, cut where it is long.

    >>> shown(None), shown("x" * 70)[-5:]
    ('null', "xxx…'")
    """
    if isinstance(value, str) and len(value) > SHOWN_CHARACTERS:
        value = f"{value[:SHOWN_CHARACTERS]}…"
    text = "null" if value is None else repr(value)
    return text if len(text) <= SHOWN_CHARACTERS + 4 else f"{text[:SHOWN_CHARACTERS]}…"
