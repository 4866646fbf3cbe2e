"""The standard library's source, for language models of tokens and of bytes."""

from example_data import python_sources


def python_texts(max_train_bytes: int) -> tuple[list[str], list[str]]:
    """Return the training texts that fit into `max_train_bytes`, and all held-out texts."""
    data = python_sources()
    train, left = [], max_train_bytes
    for text in data["train"]["text"]:
        if (num_bytes := len(text.encode())) <= left:
            train.append(text)
            left -= num_bytes
    if not train:
        raise SystemExit(f"--max_train_bytes {max_train_bytes}: every file of the standard library is larger.")
    return train, list(data["validation"]["text"])
