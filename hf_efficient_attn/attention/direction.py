"""Whether an attention layer of transformers reads ahead, by the mask that its model asked for.

Attributes of modules prove nothing: some decoders have `is_causal=False`, some encoders have no such attribute, and
transformers' own functions follow the mask. Attributes only count if a model asked for no mask.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from hf_efficient_attn.attention.model_parts import DECODER, part_of
from hf_efficient_attn.attention.table_form import BIDIRECTIONAL, CAUSAL, is_table, table_kind
from hf_efficient_attn.errors import UnsupportedBackendError

# a layer that reads another sequence
CROSS = "cross"


def direction(module: nn.Module, options: Mapping[str, Any], attention_mask: Tensor | None = None) -> str | None:
    """Return CAUSAL, BIDIRECTIONAL or CROSS; None: only a matrix decides.

    Args:
        options: keyword arguments of the attention call; `is_causal` is used.
        attention_mask: the mask that the layer got: a token table, a matrix, or None.

    Raises:
        UnsupportedBackendError: the mask and the module contradict each other, or there is neither.
    """
    kind = None if attention_mask is None or not is_table(attention_mask) else table_kind(attention_mask)
    flag = options.get("is_causal")
    flag = getattr(module, "is_causal", None) if flag is None else bool(flag)
    if is_named_cross(module):
        if kind == CAUSAL:
            _refuse(module, "is cross-attention by its name or flags, but its mask is causal")
        return CROSS
    if kind == CAUSAL:
        return CAUSAL
    if kind == BIDIRECTIONAL or flag is False:
        # a decoder never reads another sequence causally
        return CROSS if part_of(module) == DECODER else BIDIRECTIONAL
    if flag is None and attention_mask is None:
        _refuse(module, "gets no mask and has no is_causal, so that nothing says whether it may read ahead")
    return CAUSAL if flag else None


def is_named_cross(module: nn.Module) -> bool:
    """Return whether the name or a flag of a module says that it reads another sequence."""
    return "CrossAttention" in type(module).__name__ or bool(getattr(module, "is_cross_attention", False))


def _refuse(module: nn.Module, what: str) -> None:
    raise UnsupportedBackendError(
        f'{type(module).__name__} {what}. attn_implementation="efficient" cannot compute it; load the model with '
        '"sdpa" or "eager" and without attention_pattern.'
    )
