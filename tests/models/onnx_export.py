"""Export a model as ONNX, for any batch and length, and compare what onnxruntime computes with it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models_cases import first_tensor, head_inputs

# who imports this is skipped where it is not installed
onnxruntime = pytest.importorskip("onnxruntime")
SIZES = ((3, 12), (2, 31), (1, 9))


def export(model: Any, inputs: dict[str, torch.Tensor], is_dynamic: bool = True) -> torch.onnx.ONNXProgram:
    """Return the program; `inputs` are [batch, tokens]."""
    model.config.use_cache = False
    dims = {0: torch.export.Dim("batch", min=1, max=64), 1: torch.export.Dim("tokens", min=5, max=64)}
    shapes = dict.fromkeys(inputs, dims) if is_dynamic else None
    return torch.onnx.export(model, (), kwargs=inputs, dynamic_shapes=shapes, dynamo=True, verbose=False)


def encoder_inputs(names: tuple[str, ...]) -> Callable[[int, int], dict[str, torch.Tensor]]:
    """Return a function that makes inputs of these names, for so many rows and tokens; the first row is padded."""
    return lambda rows, tokens: {name: head_inputs("AutoModel", rows, tokens)[name] for name in names}


def check_runs(
    program: torch.onnx.ONNXProgram, model: Any, inputs: Callable[[int, int], dict[str, torch.Tensor]], file: Path
) -> None:
    """Check that onnxruntime computes what the model does, at other sizes than those of the export, too."""
    program.save(file)
    session = onnxruntime.InferenceSession(file)
    for size in SIZES:
        actual, expected = run(session, inputs(*size)), first_output(model, inputs(*size))
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def run(session: onnxruntime.InferenceSession, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the first output, without rows of padding."""
    out = torch.from_numpy(session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})[0])
    return real(out, inputs)


def first_output(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return real(first_tensor(model(**inputs)), inputs)


def real(out: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    mask = inputs.get("attention_mask")
    return out if mask is None or out.shape[:2] != mask.shape else out[mask.bool()]
