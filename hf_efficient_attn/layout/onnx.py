"""ONNX export: all pairs are computed by standard operators, since ONNX has none for attention with a pattern.

Time and memory are then quadratic in the length.
"""

from typing import Any

import torch

from hf_efficient_attn.errors import UnsupportedBackendError
from hf_efficient_attn.layout.layout import HeadGroups, Layout
from hf_efficient_attn.layout.operator_args import read_call_text
from hf_efficient_attn.layout.token_mask import TokenMask


def is_written() -> bool:
    """Return whether a model is being traced by `torch.onnx.export`."""
    return torch.onnx.is_in_onnx_export()


def refuse_operator(name: str, call_text: str) -> None:
    """Raise UnsupportedBackendError during `torch.onnx.export`; called by the operators' shape functions."""
    if is_written():
        raise UnsupportedBackendError(
            f"backend='{name}' cannot be written as ONNX, which has no operator for attention with a "
            f"{read_call_text(call_text)[0].kind} pattern. Use backend='auto', which then computes all pairs."
        )


def refuse_selected_keys() -> None:
    """Raise UnsupportedBackendError during `torch.onnx.export`, since keys are selected by a stable sort.

    The exporter cannot write a stable sort, and another sort would break ties differently.
    """
    if is_written():
        raise UnsupportedBackendError(
            "Keys that are selected by content (LSH and routing layers, BlockTopK, indexers) cannot be written as "
            "ONNX, because its exporter has no stable sort. Use torch.export.export, which writes them."
        )


def written_groups(layout: Layout, tokens: TokenMask) -> HeadGroups:
    """Return the patterns of the heads, as `Layout.head_groups`.

    Raises:
        UnsupportedBackendError: the patterns depend on the length, which is dynamic or differs between examples.
    """
    pattern: Any = layout.pattern
    if not (pattern.depends_on_length or pattern.is_random):
        return layout.groups_at_any_length()
    if isinstance(layout.num_keys, int) and isinstance(layout.num_queries, int) and tokens.is_empty:
        return layout.head_groups()
    raise UnsupportedBackendError(
        f"A {pattern.kind} pattern depends on the length, and ONNX has no operator for that. Export with a "
        "fixed length and without attention_mask, or with a pattern that is the same at every length, such as Band."
    )
