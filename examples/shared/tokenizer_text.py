"""The text that a tokenizer is trained on."""

from collections.abc import Iterable, Iterator

TOKENIZER_TRAINING_BYTES = 8_000_000


def first_bytes(texts: Iterable[str], max_bytes: int = TOKENIZER_TRAINING_BYTES) -> Iterator[str]:
    """Yield texts until they have more than `max_bytes` bytes together."""
    num_bytes = 0
    for text in texts:
        yield text
        num_bytes += len(text.encode())
        if num_bytes > max_bytes:
            return
