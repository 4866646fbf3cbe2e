"""Nyströmformer of transformers, converted: the same outputs where it reads texts, and what differs said."""

import warnings
from typing import Any

import pytest
import torch
from in_tree_models import in_tree, inputs_of, largest_difference

import hf_efficient_attn as hea

LANDMARKS = {"num_landmarks": 4, "segment_means_seq_len": 40}
pytestmark = pytest.mark.filterwarnings("ignore:Even with parity", "ignore:.*is not kept", "ignore:The nystromformer")


def unlike(model: Any) -> Any:
    """Return the model with queries that make landmarks differ."""
    with torch.no_grad():
        for name, each in model.named_parameters():
            if "query" in name or "q_proj" in name:
                each.mul_(3)
    return model


def test_same_outputs_both_ways() -> None:
    """Of one head; all of them: `test_unusual_configs.py`."""
    model_type, head = "nystromformer", "AutoModelForMaskedLM"
    theirs = unlike(in_tree(model_type, head, **LANDMARKS))
    inputs = inputs_of(model_type, head, 40)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = hea.convert(theirs, parity=True)
    assert any("Compared with the source" in str(each.message) for each in caught)
    assert ours.config.num_landmarks == 4
    assert largest_difference(theirs, ours, inputs) < 1e-5
    # 80 positions, of which 4 landmarks leave segments of 20 tokens
    back = hea.convert(ours, to=model_type)
    assert (back.config.num_landmarks, back.config.segment_means_seq_len) == (4, 80)
    longer = inputs_of(model_type, head, 80)
    assert largest_difference(back, ours, longer) < 1e-5
    assert back.config.conv_kernel_size == 5
    again = in_tree(model_type, head, **{**LANDMARKS, "segment_means_seq_len": 80})
    again.load_state_dict(theirs.state_dict())
    assert largest_difference(again, back, longer) == 0


def test_without_parity_batch_mates_change_nothing_and_landmarks_are_the_papers() -> None:
    theirs = in_tree("nystromformer")
    ours = hea.convert(theirs)
    assert (ours.config.num_landmarks, ours.config.inverse_scale) == (61, "head")
    exact = hea.convert(theirs, parity=True)
    assert (exact.config.num_landmarks, exact.config.inverse_scale) == (80, "batch")
    assert hea.convert(theirs, parity=True, max_position_embeddings=100).config.num_landmarks == 100
    inputs = inputs_of("nystromformer", "AutoModel", 78)
    assert largest_difference(theirs, exact, inputs) < 1e-5
    assert largest_difference(theirs, ours, inputs) > 1e-4
    assert largest_difference(theirs, ours, inputs_of("nystromformer", "AutoModel", 61)) < 1e-5


def test_what_differs_is_said() -> None:
    ours = hea.convert(in_tree("nystromformer", "AutoModelForMaskedLM", **LANDMARKS))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hea.convert(ours, to="nystromformer")
    text = "\n".join(str(each.message) for each in caught)
    assert "inverse_scale='head' is not kept: nystromformer divides by one number" in text
    assert "takes texts of exactly segment_means_seq_len=80 tokens" in text


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"inv_coeff_init_option": True}, {}, "inv_coeff_init_option must be False"),
        ({"num_landmarks": 7}, {}, "num_landmarks must divide segment_means_seq_len"),
        ({}, {"pattern": "band(2, 2)"}, "the layers of a Nyströmformer attend to landmarks"),
    ],
)
def test_what_cannot_be_converted_is_refused(
    changes: dict[str, Any], options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = in_tree("nystromformer")
    for name, value in changes.items():
        # transformers builds no model of it
        monkeypatch.setattr(theirs.config, name, value)
    with pytest.raises(hea.ConfigurationError, match=message):
        hea.convert(theirs, **options)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_landmarks": 50}, "max_position_embeddings=100"),
        ({"mechanism": "linear", "num_landmarks": 64, "conv_kernel_size": 65}, "mechanism='linear'"),
        ({"conv_kernel_size": None}, "cannot become part of a nystromformer config"),
    ],
)
def test_what_they_cannot_say_is_refused(fields: dict[str, Any], message: str) -> None:
    config = hea.convert(in_tree("nystromformer", **LANDMARKS)).config.to_dict()
    ours = hea.CompressedTransformerModel(hea.CompressedTransformerConfig.from_dict({**config, **fields}))
    with pytest.raises(hea.ConfigurationError, match=message):
        hea.convert(ours, to="nystromformer")
