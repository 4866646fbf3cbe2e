"""ONNX: dense families run in onnxruntime at any batch and length; what has a pattern is refused before conversion."""

from pathlib import Path

import pytest
import torch
from models_cases import CASES, head_inputs

from hf_efficient_attn.errors import UnsupportedBackendError

pytest.importorskip("onnxscript")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


def export(name: str) -> tuple[torch.nn.Module, torch.onnx.ONNXProgram]:
    model = next(case for case in CASES if case.name == name).model()
    model.config.use_cache = False
    dims = {0: torch.export.Dim("batch", min=1, max=64), 1: torch.export.Dim("tokens", min=5, max=64)}
    ids = {"input_ids": head_inputs("AutoModel")["input_ids"]}
    return model, torch.onnx.export(
        model, (), kwargs=ids, dynamic_shapes={"input_ids": dims}, dynamo=True, verbose=False
    )


def test_runs_at_any_batch_and_length(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    model, program = export("simplified-sas_p")
    program.save(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    ids = head_inputs("AutoModel", rows=2, tokens=31)["input_ids"]
    actual, *_ = session.run(None, {"input_ids": ids.numpy()})
    torch.testing.assert_close(torch.from_numpy(actual), model(ids).logits, atol=1e-5, rtol=1e-5)


def test_patterns_are_refused() -> None:
    # the exporter wraps every error in its own
    with pytest.raises(Exception, match="ONNX has no operator for attention with a band pattern") as raised:
        export("sparse-sliding-grouped")
    assert isinstance(raised.value.__cause__, UnsupportedBackendError)
