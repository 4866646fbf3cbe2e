"""Rows for a task: a corpus from a package, a dataset of the Hub, or files of one's own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from corpora.splits import SPLITS, Row, Splits

from shared.arguments import UsageError
from shared.own_data import Column, check_columns, check_rows, load_own

FILES = ("train_file", "validation_file", "test_file")
SUFFIXES = (".json", ".jsonl", ".csv")
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
            if value and Path(value).suffix not in SUFFIXES:
                raise UsageError(f"--{name} {value}: must end in {', '.join(SUFFIXES)}.")
        for name in ("max_train_samples", "max_eval_samples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"--{name} {value} leaves nothing; it must be at least 1.")

    @property
    def source(self) -> str | None:
        """The user's data in words for a report; None: the example's corpus."""
        return self.dataset_name or (Path(self.train_file).name if self.train_file else None)

    def load(
        self, corpus: Callable[..., Splits], columns: Sequence[Column], fault: Callable[[Row], str | None] | None = None
    ) -> Splits:
        """Return rows of "train", "validation" and "test": the user's, else those of `corpus.load`.

        Args:
            corpus: takes `packages_from` and `accept_other_version`.
            columns: what a row must have.
            fault: returns what else is wrong with a row; None: nothing.

        Raises:
            UsageError: the data cannot be had, lacks a column, has a row that is wrong, or none to train or evaluate
                on.
            PackageError: the corpus's package cannot be had.
        """
        if self.source is None:
            splits = corpus(packages_from=self.packages_from, accept_other_version=self.accept_other_version)
        else:
            splits = self._load_own()
        faults = [column.fault for column in columns] + ([fault] if fault else [])
        for name, rows in splits.items():
            if rows:
                check_columns(columns, list(rows[0]), self._title(name))
                check_rows(rows, faults, self._title(name))
        if self.source is not None:
            splits = _completed(splits)
        for name, rows in splits.items():
            if not rows:
                raise UsageError(
                    f"{self.source or 'The corpus'} has no {name} rows. Give more rows, or a file for them."
                )
        limits = {"train": self.max_train_samples, "validation": self.max_eval_samples, "test": self.max_eval_samples}
        return {name: spread(rows, limits[name]) for name, rows in splits.items()}

    def _load_own(self) -> Splits:
        if self.dataset_name:
            splits = load_own("--dataset_name", self.dataset_name, name=self.dataset_config_name)
            return {name: splits[name].to_list() for name in SPLITS if name in splits}
        files = {name: getattr(self, f"{name}_file") for name in SPLITS}
        return {name: load_own(f"--{name}_file", file, split="train").to_list() for name, file in files.items() if file}

    def _title(self, split: str) -> str:
        """Return where the rows of a split are from, before missing splits are taken from others."""
        if self.train_file:
            return Path(getattr(self, f"{split}_file")).name
        return f"{self.dataset_name or 'The corpus'}, split {split}"


def _completed(splits: Splits) -> Splits:
    """Return train, validation and test; what is missing is taken from what there is, training rows last."""
    train = splits.get("train", [])
    held_out = splits.get("test") or splits.get("validation")
    if not held_out:
        held_out = train[::HELD_OUT_EVERY]
        train = [row for index, row in enumerate(train) if index % HELD_OUT_EVERY]
    return {"train": train, "validation": splits.get("validation") or held_out, "test": held_out}


def spread(rows: list[Row], max_rows: int | None) -> list[Row]:
    """Return at most `max_rows` rows, evenly spaced."""
    if max_rows is None or len(rows) <= max_rows:
        return rows
    return [rows[index * len(rows) // max_rows] for index in range(max_rows)]
