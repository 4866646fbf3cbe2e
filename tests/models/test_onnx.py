"""ONNX: onnxruntime computes what a model does, patterns included; the encoders are tested as neighbours."""

from pathlib import Path

import pytest
import torch
from families import BY_NAME
from models.onnx_export import check_runs, encoder_inputs, export
from torch.onnx._internal.exporter._capture_strategies import TorchExportNonStrictStrategy

from hf_efficient_attn.attention.select import use_backend
from hf_efficient_attn.errors import UnsupportedBackendError

pytest.importorskip("onnxscript")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


def build(name: str) -> torch.nn.Module:
    return BY_NAME[name].model(**BY_NAME[name].fewest_layers)


def test_runs_at_any_batch_and_length(tmp_path: Path) -> None:
    model, inputs = build("sparse-block_local"), encoder_inputs(("input_ids", "attention_mask"))
    check_runs(export(model, inputs(3, 12)), model, inputs, tmp_path / "model.onnx")


def test_what_is_laid_out_by_length_and_other_backends_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # where one way to trace fails, torch tries another one, which fails alike
    ways = "torch.onnx._internal.exporter._capture_strategies.CAPTURE_STRATEGIES"
    monkeypatch.setattr(ways, (TorchExportNonStrictStrategy,))
    inputs = encoder_inputs(("input_ids",))(3, 12)
    # the exporter wraps every error in its own
    with pytest.raises(Exception, match="ONNX has no operator for that") as raised:
        export(build("sparse-bigbird"), inputs)
    assert isinstance(raised.value.__cause__, UnsupportedBackendError)
    with pytest.raises(Exception, match="backend='blocked'"), use_backend("blocked"):
        export(build("sparse-block_local"), inputs)
