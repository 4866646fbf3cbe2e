"""Calls that cannot be written as ONNX are refused while the model is traced, before the conversion fails."""

import torch

from hf_efficient_attn.errors import UnsupportedBackendError
from hf_efficient_attn.layout.call_text import read_call_text


def refuse_onnx(call_text: str) -> None:
    """Raise UnsupportedBackendError during `torch.onnx.export`; called by the operators' shape functions."""
    if torch.onnx.is_in_onnx_export():
        raise UnsupportedBackendError(
            f"ONNX has no operator for attention with a {read_call_text(call_text)[0].kind} pattern. Use torch.export, "
            "or export the model without attention_pattern."
        )
