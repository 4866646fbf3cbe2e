"""What `torch.jit.trace` would keep of one input."""

import torch

from hf_efficient_attn.errors import UnsupportedBackendError


def refuse_tracing() -> None:
    """Raise UnsupportedBackendError under `torch.jit.trace`, which keeps what masks and lengths say of one input."""
    if not torch.compiler.is_compiling() and torch._C._is_tracing():
        raise UnsupportedBackendError(
            "torch.jit.trace (which torch.onnx.export(dynamo=False) and TensorBoard's add_graph call) would keep the "
            "masks, buckets and lengths of the inputs that it is given, and compute other inputs wrongly. Use "
            "torch.export.export, or torch.onnx.export(dynamo=True), which take masks and lengths as inputs."
        )
