"""Whatever libraries raise over damaged files, as one error of this package and one line."""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager

from hf_efficient_attn.convert.hub import why_not_from_hub
from hf_efficient_attn.errors import CheckpointError, EfficientAttentionError
from hf_efficient_attn.messages import cut

# of another library's message
LETTERS = 240


@contextmanager
def reading(path: str, what: str, what_to_do: str) -> Iterator[None]:
    """Let a library read from a folder or Hub name; its errors, of any kind, become a CheckpointError.

    Only calls into libraries belong inside: what damage makes them raise is not known, but it is never our own.

    Args:
        what: what is read, as the message begins: "The weights in FOLDER".
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
    """Return the message of an error on one line, without its end mark; of none, the name of its kind.

    >>> one_line(ValueError("first\\n  second.")), one_line(KeyError())
    ('first second', 'KeyError')
    """
    if isinstance(error, pickle.UnpicklingError):
        return "no file of torch.save, or one that holds more than tensors"
    text = " ".join(str(error).split()).rstrip(".")
    known = isinstance(error, OSError | ValueError | RuntimeError) and " " in text
    said = text if known else f"{type(error).__name__}{': ' if text else ''}{text}"
    return cut(said, LETTERS, LETTERS // 4)
