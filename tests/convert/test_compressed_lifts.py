"""BERT and RoBERTa as start values of compressed Transformers: what is copied, what starts anew, what is refused."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from convert.test_folders import run, save
from in_tree_models import HEADS, in_tree, inputs_of, largest_difference
from models_cases import TOLERANCE

import hf_efficient_attn as hea
from hf_efficient_attn.convert.tables.lifts import EXACT, MECHANISMS
from hf_efficient_attn.patterns import Band

SOURCES = ("bert", "roberta", "xlm-roberta")

pytestmark = pytest.mark.filterwarnings(
    "ignore:Left out, because", "ignore:Newly initialized", "ignore:The .* layers start"
)


def lifted(theirs: Any, **options: Any) -> Any:
    return hea.convert(theirs, to="compressed_transformer", **options)


def exact(theirs: Any, mechanism: str | list[str]) -> Any:
    """Return what a model becomes with parity, of which it is said that it was compared."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = lifted(theirs, mechanism=mechanism, parity=True)
    messages = [str(each.message) for each in caught]
    assert any("Compared with the source" in each for each in messages)
    assert not any("Train the model further" in each for each in messages)
    return ours


@pytest.mark.parametrize("model_type", SOURCES)
@pytest.mark.parametrize("mechanism", [*EXACT, list(EXACT[:2])], ids=str)
def test_layers_of_these_compute_what_the_source_does(mechanism: str | list[str], model_type: str) -> None:
    theirs = in_tree(model_type)
    ours = exact(theirs, mechanism)
    assert ours.config.max_position_embeddings == (80 if model_type == "bert" else 78)
    assert largest_difference(theirs, ours, inputs_of(model_type, "AutoModel", 61, padded=9)) < TOLERANCE


@pytest.mark.parametrize("head", HEADS)
def test_every_head_comes_with_it(head: str) -> None:
    theirs = in_tree("roberta", head)
    assert largest_difference(theirs, exact(theirs, "pattern"), inputs_of("roberta", head, 61)) < TOLERANCE


# by mechanism, parameters with which its layers are full attention
NEUTRAL = {
    # of texts of up to 64 landmarks
    "nystrom": {"conv.weight": 0},
    "linformer": {"length_maps.key_map": 1, "length_maps.value_map": 1},
    "prior": {"prior_weight": 0, "prior_bias": 0},
}


@pytest.mark.parametrize("mechanism", NEUTRAL)
@torch.no_grad()
def test_without_what_is_new_they_are_the_source(mechanism: str) -> None:
    """Tokens of a Linformer are all projected to themselves."""
    theirs = in_tree("bert")
    ours = lifted(theirs, mechanism=mechanism)
    inputs = inputs_of("bert", "AutoModel", 61 if mechanism != "linformer" else 80)
    assert largest_difference(theirs, ours, inputs) > 1e-3
    for layer in ours.layers:
        for name, value in NEUTRAL[mechanism].items():
            parameter = layer.self_attn.get_parameter(name)
            parameter.copy_(value * torch.eye(*parameter.shape) if value else torch.zeros_like(parameter))
    assert largest_difference(theirs, ours, inputs) < TOLERANCE


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_what_starts_anew_is_said(mechanism: str) -> None:
    theirs = in_tree("bert", "AutoModelForMaskedLM")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = lifted(theirs, mechanism=mechanism)
    message = "\n".join(str(each.message) for each in caught)
    assert (f"The {mechanism} layers start with the weights of the source" in message) == (mechanism not in EXACT)
    has_new = mechanism not in ("pattern", "residual_scores")
    assert ("Newly initialized in CompressedTransformerForMaskedLM, because the source has none" in message) == has_new
    for layer, other in zip(ours.model.layers, theirs.bert.encoder.layer, strict=True):
        assert layer.self_attn.k_proj.weight.equal(other.attention.self.key.weight)
        assert layer.mlp.up_proj.weight.equal(other.intermediate.dense.weight)
    assert ours(inputs_of("bert", "AutoModel", 41)["input_ids"])[0].isfinite().all()


def test_products_of_features_are_those_of_softmax_in_the_mean() -> None:
    config = lifted(in_tree("bert"), mechanism="linear").config
    assert (config.feature_map, config.num_features) == ("positive_random", None)


@pytest.mark.parametrize(("tokens", "projected"), [(None, 80), (512, 128), (600, 256)])
def test_long_texts_are_projected_to_more(tokens: int | None, projected: int) -> None:
    ours = lifted(in_tree("bert"), mechanism="linformer", max_position_embeddings=tokens)
    assert ours.config.projected_tokens == projected
    assert ours.config.max_position_embeddings == (tokens or 80)


def test_patterns_and_windows() -> None:
    ours = lifted(in_tree("bert"), mechanism=["nystrom", "prior"], pattern=[None, Band(3, 3)])
    assert ours.config.mechanism == ["nystrom", "prior"]
    assert ours.layers[1].self_attn.layer_request(64, None).layer_spec.pattern == Band(3, 3)
    ours = lifted(in_tree("bert"), mechanism="collaborative_heads", attention_window=8)
    assert ours.layers[0].self_attn.layer_request(64, None).layer_spec.pattern == Band(4, 4)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"parity": True}, "parity=True: nystrom layers cannot compute"),
    ({"parity": True, "mechanism": ["pattern", "linear"]}, "linear layers cannot"),
    ({"mechanism": "linfomer"}, "mechanism='linfomer'.*Did you mean 'linformer'"),
    ({"mechanism": "reused_weights"}, "mechanism='reused_weights'"),
    ({"mechanism": ["linear"]}, "lists 1 mechanisms for 2 layers"),
    ({"pattern": "band(3, 3)"}, "no layer follows a pattern"),
    ({"global_projections": True}, "has no global tokens"),
    ({"attention_window": 7, "mechanism": "pattern"}, "attention_window=7"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[str(options) for options, _ in REFUSED])
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(hea.ConfigurationError, match=message):
        lifted(in_tree("bert"), **options)


@pytest.mark.parametrize("model_type", ["bert", "nystromformer"])
def test_other_targets_have_no_mechanism(model_type: str) -> None:
    with pytest.raises(hea.ConfigurationError, match="mechanism=.* is only for bert, roberta and xlm-roberta"):
        hea.convert(in_tree(model_type), mechanism="linear")


def test_from_folder_to_folder_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save(in_tree("roberta", "AutoModelForMaskedLM"), tmp_path / "theirs", with_tokenizer=True)
    options = ("--to", "compressed_transformer", "--mechanism", "linformer")
    code, printed, notes = run(capsys, folder, tmp_path / "ours", *options)
    assert code == 0, notes
    assert "CompressedTransformerForMaskedLM" in printed
    assert "note: The linformer layers start with the weights" in notes
    loaded = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "ours")
    assert loaded.config.projected_tokens == 78
    again = lifted(folder, mechanism="linformer").state_dict()
    assert all(each.equal(again[name]) for name, each in loaded.state_dict().items() if "length_maps" not in name)
