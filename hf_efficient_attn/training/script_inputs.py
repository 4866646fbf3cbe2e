"""What the user of a training script gives it, checked before it trains: the examples refuse by it, in a sentence."""

import glob
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from hf_efficient_attn.analysis.model_sources import PREFIXED
from hf_efficient_attn.errors import EfficientAttentionError, InputError
from hf_efficient_attn.messages import shown

ROWS_AT_A_TIME = 1000
# by the end of a file's name; others are JSON
LOADERS = {".csv": "csv", ".txt": "text"}
# the only numbers of which 0 means something
MAY_BE_ZERO = ("left", "num_first", "doc_stride")


@contextmanager
def refusals_as_sentences() -> Iterator[None]:
    """Let an error of this package end a script by its message alone, without a traceback."""
    try:
        yield
    except EfficientAttentionError as error:
        raise SystemExit(str(error)) from error


def check_arguments(args: Any) -> None:
    """Refuse numbers below 1, files and models that cannot be, and data given twice, in the options of a script.

    Args:
        args: a dataclass with the options of the examples, or some of them.

    Raises:
        InputError: there are such.
    """
    for name, value in vars(args).items():
        least = int(name not in MAY_BE_ZERO)
        if isinstance(value, int) and not isinstance(value, bool) and value < least:
            raise InputError(f"--{name} {shown(value)}: it must be at least {least}.")
    _check_name(args.model_name_or_path)
    of_hub, files = [], []
    if hasattr(args, "dataset_name"):
        of_hub, files = [args.dataset_name, args.dataset_config_name], [args.train_file, args.validation_file]
    if (any(of_hub) and (any(files) or not of_hub[0])) or (any(files) and not files[0]):
        raise InputError("Give --dataset_name (and its --dataset_config_name) or --train_file (and --validation_file).")
    for file in filter(None, [*files, getattr(args, "text_file", None)]):
        # the name of a file on another machine, or a pattern of names, is left to who opens it
        if "://" not in file and not Path(file).exists() and not glob.glob(file):
            raise InputError(f"There is no file {file} here.")


def _check_name(name: str | None) -> None:
    """Refuse a model that is no folder, and no name that the Hub could have."""
    try:
        if name is not None and not Path(name).exists():
            validate_repo_id(name)
    except (HFValidationError, OSError) as error:
        raise InputError(
            f"--model_name_or_path {shown(name)} is no folder here, and no name that a model on the Hub can have."
        ) from error


def load_files(args: Any, *suffixes: str) -> Any:
    """Return the rows of `args.train_file`, and of `args.validation_file` if there is one, as a `DatasetDict`.

    Args:
        suffixes: of the files that the script reads, for the message.

    Raises:
        InputError: a file holds no rows.
    """
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError

    files = {"train": args.train_file} | ({"validation": args.validation_file} if args.validation_file else {})
    kind = LOADERS.get(Path(args.train_file).suffix, "json")
    try:
        return load_dataset(kind, data_files=files)
    except (DatasetGenerationError, StopIteration) as error:
        kinds = f"{', '.join(suffixes[:-1])} or {suffixes[-1]}"
        raise InputError(f"No rows of {kinds} in {' or '.join(files.values())}.") from error


def check_columns(args: Any, columns: Any, *options: str) -> None:
    """Refuse data without the columns that these options name.

    Raises:
        InputError: a column is missing.
    """
    if without := [option for option in options if getattr(args, option) not in columns]:
        named = " or ".join(f"{getattr(args, option)} (--{option})" for option in without)
        raise InputError(f"No column is called {named}; the data has {', '.join(columns)}.")


def split_rows(data: Any, seed: int, shuffle: bool = True) -> Any:
    """Return a `DatasetDict` of `train` and `validation`: that of the data, its `test`, or a tenth of the rows.

    Raises:
        InputError: a single row, which cannot be divided.
    """
    if not {"validation", "test"} & set(data):
        if len(data["train"]) < 2:
            raise InputError("A single row cannot be divided: more rows or a --validation_file are needed.")
        data = data["train"].train_test_split(0.1, seed=seed, shuffle=shuffle)
    return type(data)(train=data["train"], validation=data["validation" if "validation" in data else "test"])


def check_texts(data: Any, *columns: str) -> None:
    """Refuse rows that have nothing, or nothing but blanks, where there should be a text.

    Args:
        data: splits by their names, as `DatasetDict` has them.

    Raises:
        InputError: there is such a row.
    """
    for rows in data.values():
        for batch in rows.select_columns([*columns]).iter(ROWS_AT_A_TIME):
            if empty := [name for name in columns if any(_is_empty(value) for value in batch[name])]:
                raise InputError(f"A row has no {' and no '.join(empty)}: leave it out.")


def _is_empty(value: Any) -> bool:
    return value is None or isinstance(value, str) and not value.strip()


def num_positions(config: Any) -> int | None:
    """Return how many tokens a model reads at most, by its config; None: as many as there are.

    RoBERTa counts positions from its padding on, and has two more than it reads. An encoder-decoder has those of its
    encoder.
    """
    sizes = (getattr(config, name, None) for name in ("max_encoder_position_embeddings", "max_position_embeddings"))
    positions = next((size for size in sizes if size is not None and size > 0), None)
    return positions - 2 if positions and config.model_type in PREFIXED else positions


def check_lengths(
    data: Any, model: Any, tokenizer: Any, option: str = "max_seq_length", target_length: int | None = None
) -> None:
    """Refuse texts of more tokens than a model and its tokenizer say that they read.

    Args:
        data: splits of encoded texts by their names, with `input_ids`.
        option: that by which the script's user limits the length of texts.
        target_length: tokens that an encoder-decoder shall write, which `--max_target_length` limits.

    Raises:
        InputError: the longest text, or the target, is longer.
    """
    name, config = model.config.name_or_path, model.config
    batches = (batch for rows in data.values() for batch in rows.select_columns(["input_ids"]).iter(ROWS_AT_A_TIME))
    longest = max(len(ids) for batch in batches for ids in batch["input_ids"])
    # where the config has no limit, as T5's, the tokenizer's is that of training, not of the model
    positions = num_positions(config)
    limit = positions and min(positions, tokenizer.model_max_length)
    if limit and longest > limit:
        longer = f"make it longer by `hf-efficient-attn convert {name} FOLDER --max-position-embeddings {longest}`, or "
        advice = f"{longer if name else ''}give --{option} {limit}."
        raise InputError(f"The longest text has {longest:,} tokens, {name or 'the model'} reads {limit:,}: {advice}")
    own = (getattr(config, f"max_{kind}_position_embeddings", None) for kind in ("target", "decoder"))
    limit = next(filter(None, own), positions)
    if limit and target_length and target_length > limit:
        raise InputError(f"--max_target_length {target_length}: {name or 'the model'} writes at most {limit} tokens.")
