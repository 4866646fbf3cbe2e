"""The field of a config that says that the layers of its model have indexers."""

from typing import Any

# {"top_k": …, "num_heads": …, "head_dim": …, "stage": …}
INDEXER = "attention_indexer"


def has_indexer(config: Any) -> bool:
    """Return whether the layers of a model have indexers."""
    return getattr(config, INDEXER, None) is not None
