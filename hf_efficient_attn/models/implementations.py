"""Which backend each attention implementation of transformers stands for."""

from typing import Any

from hf_efficient_attn.errors import UnsupportedBackendError
from hf_efficient_attn.messages import shown

# every one computes the same function, the model's own
BACKEND_OF_IMPLEMENTATION = {"efficient": "auto", "eager": "reference", "sdpa": "sdpa", "flex_attention": "flex"}


def backend_of(config: Any) -> str:
    """Return the backend for the attention implementation of a config.

    Raises:
        UnsupportedBackendError: an implementation that would ignore the model's attention pattern.
    """
    implementation = config._attn_implementation or "efficient"
    if implementation not in BACKEND_OF_IMPLEMENTATION:
        raise UnsupportedBackendError(
            f"attn_implementation={shown(implementation)} would drop the attention pattern of this "
            f"{type(config).__name__}. Use one of: {', '.join(BACKEND_OF_IMPLEMENTATION)}; all compute the same."
        )
    return BACKEND_OF_IMPLEMENTATION[implementation]
