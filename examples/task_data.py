"""Rows for a task: a corpus from a package, a dataset of the Hub, or files of one's own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from clm_arguments import UsageError
from corpora.splits import Row, Splits
from datasets import load_dataset
from datasets.exceptions import DatasetNotFoundError

FILES = ("train_file", "validation_file", "test_file")
BUILDERS = {".json": "json", ".jsonl": "json", ".csv": "csv"}
HELD_OUT_EVERY = 10


@dataclass
class TaskDataArguments:
    """Which data. With none named, the example's own corpus, from a package."""

    dataset_name: str | None = field(default=None, metadata={"help": "A dataset of the Hub, or a folder."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "The configuration of that dataset."})
    train_file: str | None = field(default=None, metadata={"help": "A .json, .jsonl or .csv file to train on."})
    validation_file: str | None = field(default=None, metadata={"help": "A file of the same kind."})
    test_file: str | None = field(
        default=None,
        metadata={"help": "The same, to evaluate on. Default: the validation rows, or each tenth training row."},
    )
    max_train_samples: int | None = field(default=None, metadata={"help": "Train on at most so many rows."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Evaluate on at most so many rows."})
    packages_from: Path | None = field(
        default=None,
        metadata={"help": "A folder that holds the corpus's package. Default: the cache, else it is downloaded."},
    )
    accept_other_version: bool = field(
        default=False, metadata={"help": "Take another version of the package where the pinned one is not served."}
    )

    def __post_init__(self) -> None:
        if self.dataset_name and self.train_file:
            raise UsageError("Give --dataset_name or --train_file, not both.")
        if (self.validation_file or self.test_file) and not self.train_file:
            raise UsageError("--validation_file and --test_file need a --train_file of the same kind.")
        for name in FILES:
            value = getattr(self, name)
            if value and not Path(value).is_file():
                raise UsageError(f"--{name} {value}: no such file.")
            if value and Path(value).suffix not in BUILDERS:
                raise UsageError(f"--{name} {value}: must end in {', '.join(BUILDERS)}.")
        for name in ("max_train_samples", "max_eval_samples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"--{name} {value} leaves nothing; it must be at least 1.")

    @property
    def source(self) -> str | None:
        """The user's data in words for a report; None: the example's corpus."""
        return self.dataset_name or (Path(self.train_file).name if self.train_file else None)

    def load(self, corpus: Callable[..., Splits], columns: Sequence[str]) -> Splits:
        """Return rows of "train", "validation" and "test": the user's, else those of `corpus.load`.

        Args:
            corpus: takes `packages_from` and `accept_other_version`.
            columns: what a row must have.

        Raises:
            UsageError: the data cannot be had, lacks a column, or has no row to train or evaluate on.
            PackageError: the corpus's package cannot be had.
        """
        if self.source is None:
            splits = corpus(packages_from=self.packages_from, accept_other_version=self.accept_other_version)
        else:
            splits = _completed(self._load_own())
        _check(splits, columns, self.source)
        limits = {"train": self.max_train_samples, "validation": self.max_eval_samples, "test": self.max_eval_samples}
        return {name: spread(rows, limits[name]) for name, rows in splits.items()}

    def _load_own(self) -> Splits:
        try:
            if self.dataset_name:
                loaded = load_dataset(self.dataset_name, name=self.dataset_config_name)
            else:
                given = {name.removesuffix("_file"): getattr(self, name) for name in FILES if getattr(self, name)}
                loaded = load_dataset(BUILDERS[Path(self.train_file).suffix], data_files=given)
        except (OSError, ValueError, DatasetNotFoundError) as error:
            what = f"--dataset_name {self.dataset_name}" if self.dataset_name else f"--train_file {self.train_file}"
            raise UsageError(
                f"{what} could not be loaded: {error} Without a network give --train_file, or nothing for the "
                "example's own corpus."
            ) from error
        return {name: rows.to_list() for name, rows in loaded.items()}


def _completed(splits: Splits) -> Splits:
    """Return train, validation and test; what is missing is taken from what there is, training rows last."""
    train = splits.get("train", [])
    held_out = splits.get("test") or splits.get("validation")
    if not held_out:
        held_out = train[::HELD_OUT_EVERY]
        train = [row for index, row in enumerate(train) if index % HELD_OUT_EVERY]
    return {"train": train, "validation": splits.get("validation") or held_out, "test": held_out}


def _check(splits: Splits, columns: Sequence[str], source: str | None) -> None:
    for name, rows in splits.items():
        if not rows:
            raise UsageError(f"{source or 'The corpus'} has no {name} rows. Give more rows, or a file for them.")
        missing = [column for column in columns if column not in rows[0]]
        if missing:
            raise UsageError(
                f"{source or 'The corpus'} has no column {', '.join(missing)} in its {name} rows. Columns: "
                f"{', '.join(rows[0])}. Needed: {', '.join(columns)}; name them by the --…_column_name options."
            )


def spread(rows: list[Row], max_rows: int | None) -> list[Row]:
    """Return at most `max_rows` rows, evenly spaced."""
    if max_rows is None or len(rows) <= max_rows:
        return rows
    return [rows[index * len(rows) // max_rows] for index in range(max_rows)]
