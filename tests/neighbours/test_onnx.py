"""ONNX: onnxruntime computes what every encoder does, also with numbers of eight bits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_models import PATTERN
from attention_models import build as build_in_tree
from families import BY_NAME, FAMILIES, OURS, READERS, SPARSE, SPARSIFIED, WRITERS
from models.onnx_export import check_runs, encoder_inputs, export, first_output, run

import hf_efficient_attn as hea
from hf_efficient_attn.errors import UnsupportedBackendError

onnx, onnxruntime = (pytest.importorskip(name) for name in ("onnx", "onnxruntime"))

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
HEADS = ("SequenceClassification", "TokenClassification", "QuestionAnswering")
# encoders whose keys are chosen, by a sort of the tokens
CHOOSING = [family for family in FAMILIES if "ONNX" in family.refuses]
# encoders whose pattern is laid out for a length
AT_ONE_LENGTH = ("sparse-bigbird", "etc-bigbird", "bp-masked", "bp-positions", "bp-seq2seq")
ENCODERS: dict[str, Callable[[], Any]] = {
    case.name: case.model
    for family in OURS
    if "ONNX" not in family.refuses and not family.is_encoder_decoder
    for case in family.cases
    if not case.is_causal
}
ENCODERS |= {
    case.name: lambda case=case: case.model("AutoModel").encoder
    for family in OURS
    if family.is_encoder_decoder
    for case in family.column("ONNX")
}
ENCODERS |= {name: lambda name=name: hea.sparsify(build_in_tree(name), PATTERN) for name in ("bert", "modernbert")}


@pytest.mark.parametrize("name", [name for name in ENCODERS if name not in AT_ONE_LENGTH])
@pytest.mark.parametrize("is_masked", [False, True], ids=["tokens alone", "padded"])
def test_every_encoder_at_any_batch_and_length(name: str, is_masked: bool, tmp_path: Path) -> None:
    model = ENCODERS[name]()
    inputs = encoder_inputs(("input_ids", "attention_mask") if is_masked else ("input_ids",))
    check_runs(export(model, inputs(3, 12)), model, inputs, tmp_path / "model.onnx")


@pytest.mark.parametrize("head", ["AutoModel", *(f"AutoModelFor{head}" for head in HEADS)])
def test_every_head(head: str, tmp_path: Path) -> None:
    """Those of a family beside its main one, which is exported above; all families share their code."""
    case = BY_NAME["sparse-block_local"]
    model = case.model(head, **case.fewest_layers)
    inputs = encoder_inputs(("input_ids", "attention_mask"))
    check_runs(export(model, inputs(3, 12)), model, inputs, tmp_path / "model.onnx")


@pytest.mark.parametrize("name", AT_ONE_LENGTH)
def test_patterns_of_a_length_at_one_length(name: str, tmp_path: Path) -> None:
    """Random blocks are drawn for a length, and trees are built for one, which is that of the export."""
    model = ENCODERS[name]()
    inputs = encoder_inputs(("input_ids",))(3, 12)
    with pytest.raises(Exception, match="ONNX has no operator for that") as refusal:
        export(model, inputs)
    assert isinstance(refusal.value.__cause__, UnsupportedBackendError)
    export(model, inputs, is_dynamic=False).save(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    torch.testing.assert_close(run(session, inputs), first_output(model, inputs), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", CHOOSING, ids=lambda family: family.name)
def test_chosen_keys_are_refused(family: Any) -> None:
    with pytest.raises(Exception, match=family.refuses["ONNX"]) as refusal:
        export(family.column("ONNX")[0].model(), encoder_inputs(("input_ids",))(3, 12))
    assert isinstance(refusal.value.__cause__, UnsupportedBackendError)


def check_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Check that eight bits change an output by less than a tenth of its size."""
    assert (actual - expected).square().mean() < 0.01 * expected.square().mean()


@pytest.mark.parametrize("case", [*SPARSE.column("ONNX"), *SPARSIFIED.cases[:2]], ids=lambda case: case.name)
def test_eight_bits_of_onnxruntime(case: Any, tmp_path: Path) -> None:
    """Its dynamic quantisation is of maps alone: patterns and masks stay exact."""
    from onnxruntime.quantization import quantize_dynamic

    model = case.model()
    inputs = encoder_inputs(("input_ids", "attention_mask"))
    export(model, inputs(3, 12)).save(tmp_path / "model.onnx")
    quantize_dynamic(tmp_path / "model.onnx", tmp_path / "small.onnx")
    assert "MatMulInteger" in {node.op_type for node in onnx.load(tmp_path / "small.onnx").graph.node}
    session = onnxruntime.InferenceSession(tmp_path / "small.onnx")
    check_close(run(session, inputs(2, 31)), first_output(model, inputs(2, 31)))


# in eight bits some tokens are nearest to other centroids, and read other keys: no rounding bounds what this changes
REROUTED = ("routing_transformer",)
QUANTIZED = {case.name: case for kind in (WRITERS, READERS) for family, case in kind.items() if family not in REROUTED}


@pytest.mark.parametrize("name", sorted(QUANTIZED))
def test_eight_bits_of_torch(name: str) -> None:
    model = QUANTIZED[name].model()
    inputs = encoder_inputs(("input_ids", "attention_mask"))(2, 31)
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"]
    expected = first_output(model, inputs)
    check_close(first_output(torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}), inputs), expected)
