"""What cannot be written as ONNX is refused while the model is traced, before the conversion fails on it."""

import torch

from hf_efficient_attn.errors import UnsupportedBackendError
from hf_efficient_attn.layout.call_text import read_call_text


def refuse_onnx(call_text: str) -> None:
    """Raise UnsupportedBackendError during `torch.onnx.export`; called by the operators' shapes, which it needs."""
    if torch.onnx.is_in_onnx_export():
        raise UnsupportedBackendError(
            f"ONNX has no operator for attention with a {read_call_text(call_text)[0].kind} pattern. Use torch.export, "
            "or export the model without attention_pattern."
        )
