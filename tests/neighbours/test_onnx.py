"""ONNX: onnxruntime computes what every encoder does, also with numbers of eight bits."""

from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from attention_models import PATTERN
from attention_models import build as build_in_tree
from capabilities import family_of
from models.onnx_export import check_runs, encoder_inputs, export, first_output, run
from models_cases import CASES
from neighbours.saved_models import ALL, READERS, build_model
from seq2seq_cases import CASES as SEQ2SEQ_CASES

import hf_efficient_attn as hea
from hf_efficient_attn.errors import UnsupportedBackendError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
HEADS = ("SequenceClassification", "TokenClassification", "QuestionAnswering")
# encoders that sort tokens by what they say, each with a layer that does so
CHOOSING: dict[str, dict[str, Any]] = {
    "reformer-masked": {"attn_layers": ["lsh"], "num_hidden_layers": 1},
    "routing-masked": {"num_hidden_layers": 1},
}
ELSEWHERE = ("sparse-bigbird", *CHOOSING)
ENCODERS = {case.name: case.model for case in CASES if not case.is_causal and case.name not in ELSEWHERE}
ENCODERS |= {case.name: lambda case=case: case.model("AutoModel").encoder for case in SEQ2SEQ_CASES[:1]}
ENCODERS |= {name: lambda name=name: hea.sparsify(build_in_tree(name), PATTERN) for name in ("bert", "modernbert")}


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("is_masked", [False, True], ids=["tokens alone", "padded"])
def test_every_encoder_at_any_batch_and_length(name: str, is_masked: bool, tmp_path: Path, capability: Any) -> None:
    model: Any = ENCODERS[name]()
    inputs = encoder_inputs(("input_ids", "attention_mask") if is_masked else ("input_ids",))
    check_runs(export(model, inputs(3, 12)), model, inputs, tmp_path / "model.onnx")
    capability(family_of(model.config), "ONNX")


@pytest.mark.parametrize("head", ["AutoModel", *(f"AutoModelFor{head}" for head in HEADS)])
def test_every_head(head: str, tmp_path: Path) -> None:
    """Those of a family beside its main one, which is exported above; all families share their code."""
    case = next(case for case in CASES if case.name == "sparse-block_local")
    model = case.model(head, **case.fewest_layers)
    inputs = encoder_inputs(("input_ids", "attention_mask"))
    check_runs(export(model, inputs(3, 12)), model, inputs, tmp_path / "model.onnx")


def test_bigbird_at_one_length(tmp_path: Path, capability: Any) -> None:
    """Its random blocks are drawn for a length, which is that of the export."""
    model = next(case for case in CASES if case.name == "sparse-bigbird").model()
    inputs = encoder_inputs(("input_ids",))(3, 12)
    with pytest.raises(Exception, match="is laid out anew for every length") as refusal:
        export(model, inputs)
    assert isinstance(refusal.value.__cause__, UnsupportedBackendError)
    capability("sparse_transformer", "ONNX", refusal=str(refusal.value.__cause__))
    export(model, inputs, is_dynamic=False).save(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    torch.testing.assert_close(run(session, inputs), first_output(model, inputs), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", CHOOSING)
def test_chosen_keys_cannot_be_written(name: str, capability: Any) -> None:
    """They are found by a stable sort."""
    model = next(case for case in CASES if case.name == name).model(**CHOOSING[name])
    with pytest.raises(Exception, match=r"No ONNX function found for .*aten\.sort"):
        export(model, encoder_inputs(("input_ids",))(3, 12))
    reason = "Its keys are chosen by a stable sort of the tokens, which `torch.onnx.export` cannot write."
    capability(family_of(model.config), "ONNX", reason=reason)


def check_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Check that eight bits change an output by less than a tenth of its size."""
    assert (actual - expected).square().mean() < 0.01 * expected.square().mean()


@pytest.mark.parametrize("name", ["sparse-longformer", "bert", "llama"])
def test_eight_bits_of_onnxruntime(name: str, tmp_path: Path) -> None:
    """Its dynamic quantisation is of maps alone: patterns and masks stay exact."""
    from onnxruntime.quantization import quantize_dynamic

    model: Any = build_model(name)
    inputs = encoder_inputs(("input_ids", "attention_mask"))
    export(model, inputs(3, 12)).save(tmp_path / "model.onnx")
    quantize_dynamic(tmp_path / "model.onnx", tmp_path / "small.onnx")
    assert "MatMulInteger" in {node.op_type for node in onnx.load(tmp_path / "small.onnx").graph.node}
    session = onnxruntime.InferenceSession(tmp_path / "small.onnx")
    check_close(run(session, inputs(2, 31)), first_output(model, inputs(2, 31)))


# in eight bits some tokens are nearest to other centroids, and read other keys: no rounding bounds what this changes
REROUTED = ("routing-rope", "routing-masked")


@pytest.mark.parametrize("name", sorted({*ALL.values(), *READERS.values()} - {*REROUTED}))
def test_eight_bits_of_torch(name: str) -> None:
    model: Any = build_model(name)
    inputs = encoder_inputs(("input_ids", "attention_mask"))(2, 31)
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"]
    expected = first_output(model, inputs)
    check_close(first_output(torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}), inputs), expected)
