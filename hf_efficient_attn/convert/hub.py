"""Look up checkpoints on the Hub, explain its errors and those of damaged files, and give notes to users."""

import os
import pickle
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from transformers.utils import CONFIG_NAME

from hf_efficient_attn.errors import CheckpointError, EfficientAttentionError
from hf_efficient_attn.messages import cut, shown

# the base class of HTTP errors in whichever HTTP library huggingface_hub uses
HTTP_ERROR: type[Exception] = HfHubHTTPError.__bases__[0]
# timeout when asking whether the Hub has a file; downloads have their own timeouts
SECONDS = 10


def find_on_hub(name: str, files: Sequence[str] = (CONFIG_NAME,)) -> str:
    """Return the folder or Hub name to read from: `name`, or the folder of its cached copy if the Hub does not answer.

    The Hub is asked for each of `files` in turn until it has one.

    Raises:
        CheckpointError: the Hub has none of the files, refuses, or does not answer while there is no cached copy.
    """
    copy = None
    try:
        if os.path.lexists(name):
            return name
        copies = [try_to_load_from_cache(name, file) for file in files]
        copy = next((each for each in copies if isinstance(each, str)), None)
        _ask_for_one(name, files)
    except (HTTP_ERROR, OSError, ValueError, EntryNotFoundError) as error:
        # a cached copy stands in for a Hub that does not answer, but not for one that refuses
        if copy is not None and _is_silent(error):
            return os.path.dirname(copy)
        message = why_not_from_hub(name, error) or f"{shown(name)} cannot be looked up: {type(error).__name__}."
        raise CheckpointError(message) from error
    return name


def check_weights(name: str, files: Iterable[str]) -> None:
    """Check that the Hub has one of these files, because transformers reports a failing Hub as missing files.

    Raises:
        CheckpointError: the Hub has none of the files, refuses, or fails.
    """
    if os.path.lexists(name):
        return
    listed = tuple(files)
    try:
        _ask_for_one(name, listed)
    except EntryNotFoundError as error:
        raise CheckpointError(f"{name} has no weights on the Hub: none of the files {', '.join(listed)}.") from error
    except (HTTP_ERROR, OSError) as error:
        raise CheckpointError(why_not_from_hub(name, error) or _unreachable(name, error)) from error


def _ask_for_one(name: str, files: Sequence[str]) -> None:
    """Ask for each file until the Hub has one; if it has none, raise its error for the last."""
    *others, last = files
    for file in others:
        with suppress(EntryNotFoundError):
            return _ask(name, file)
    _ask(name, last)


def _ask(name: str, file: str) -> None:
    get_hf_file_metadata(hf_hub_url(name, file), timeout=SECONDS)


def why_not_from_hub(name: str, error: BaseException) -> str | None:
    """Return why the Hub refused or failed, from an error or its causes; None: the error does not come from the Hub."""
    return next((message for each in _causes(error) if (message := _say(name, each)) is not None), None)


def _say(name: str, error: BaseException) -> str | None:
    where, status = f"The Hub ({constants.ENDPOINT})", getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, HFValidationError):
        return f"{shown(name)} is not a folder here, and not a valid name of a model on the Hub."
    if isinstance(error, OfflineModeIsEnabled):
        return (
            f"{name} is neither a folder here nor in the cache, and HF_HUB_OFFLINE is set. Unset it, or give a folder."
        )
    if isinstance(error, GatedRepoError) or status == 403:
        return f"{where} answers {status}: {name} is gated, or your token has no access. Request access on its page."
    if status == 401:
        return (
            f"{where} answers 401: {name} is private or does not exist, and the token is missing or invalid. Log in "
            "with `hf auth login`, or set HF_TOKEN."
        )
    if isinstance(error, RepositoryNotFoundError):
        return f"{where} answers 404: there is no model {name}, and no folder of that name here. Check the name."
    if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
        return f"{where} answers 404: {name} has no {CONFIG_NAME}. Give the name of a model of transformers."
    if status == 429:
        return f"{where} answers 429: too many requests. Wait a few minutes, or log in with `hf auth login`."
    if status is not None and status >= 500:
        return f"{where} answers {status} for {name}: the Hub failed, the name may be correct. Try again later."
    if status is not None:
        return f"{where} answers {status} for {name}. Check the name, and HF_ENDPOINT if it is set."
    return _unreachable(name, error) if isinstance(error, HTTP_ERROR) else None


def _unreachable(name: str, error: BaseException) -> str:
    return (
        f"{name} is neither a folder here nor in the cache, and the Hub ({constants.ENDPOINT}) cannot be reached: "
        f"{type(error).__name__}. Check the network, proxies, and HF_ENDPOINT if it is set; or give a folder."
    )


def _is_silent(error: BaseException) -> bool:
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status is None or status >= 500 or status == 429


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its chain of causes."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


# longest message of another library, in characters
LETTERS = 240


@contextmanager
def reading(path: str, what: str, what_to_do: str) -> Iterator[None]:
    """Turn every error of a library that reads from a folder or Hub name into a CheckpointError.

    Put only calls to libraries inside: damaged files make them raise errors of any type, so all types are caught.

    Args:
        what: what is read; the message begins with it: "The weights in FOLDER".
        what_to_do: a sentence for the end of the message.
    """
    try:
        yield
    except EfficientAttentionError:
        raise
    except Exception as error:
        answer = why_not_from_hub(path, error)
        raise CheckpointError(answer or f"{what} cannot be read: {one_line(error)}. {what_to_do}") from error


def one_line(error: BaseException) -> str:
    """Return the message of an error on one line without the final period; if it is empty, the name of the class.

    >>> one_line(ValueError("first\\n  second.")), one_line(KeyError())
    ('first second', 'KeyError')
    """
    if isinstance(error, pickle.UnpicklingError):
        return "it is not a file of torch.save, or holds more than tensors"
    text = " ".join(str(error).split()).rstrip(".")
    known = isinstance(error, OSError | ValueError | RuntimeError) and " " in text
    message = text if known else f"{type(error).__name__}{': ' if text else ''}{text}"
    return cut(message, LETTERS, LETTERS // 4)


def summarize(names: Iterable[str]) -> str:
    """Return the names as a list in one line; names that differ only in a layer index appear once with their count.

    >>> summarize(["pooler.bias", "layers.0.norm.weight", "layers.1.norm.weight"])
    'pooler.bias, layers.*.norm.weight (2)'
    """
    counts = Counter(re.sub(r"\.\d+\.", ".*.", name) for name in names)
    return ", ".join(f"{name} ({count})" if "*" in name else name for name, count in counts.items())


def give(notes: Iterable[str]) -> None:
    """Issue each note as a UserWarning."""
    for note in notes:
        warnings.warn(note, UserWarning, stacklevel=3)
