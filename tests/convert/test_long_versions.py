"""Dense models made sparse and long: the same on short inputs, and what they should be on long ones."""

import pytest
import torch
from in_tree_models import heads_of, in_tree, inputs_of, largest_difference

import hf_efficient_attn as hea
from hf_efficient_attn.patterns import Band, GlobalTokens

DENSE = ("bert", "roberta", "xlm-roberta", "modernbert", "bart", "pegasus", "marian")
LEARNED = ("bert", "roberta", "bart")

pytestmark = pytest.mark.filterwarnings("ignore:Left out, because sparse", "ignore:Copied from")


# which are the backbone alone, one matrix, and what the head of sequences computes
ALIKE = ("AutoModel", "AutoModelForTokenClassification", "AutoModelForMultipleChoice")


@pytest.mark.parametrize(
    ("model_type", "head"),
    [pytest.param(*pair, marks=[pytest.mark.thorough] * (pair[1] in ALIKE)) for pair in heads_of(*DENSE)],
)
def test_short_inputs_give_the_same(model_type: str, head: str) -> None:
    theirs = in_tree(model_type, head)
    ours = hea.convert(theirs, global_projections=True if head == "AutoModel" else None)
    assert largest_difference(theirs, ours, inputs_of(model_type, head, padded=9)) < 1e-5


@pytest.mark.parametrize("model_type", DENSE)
def test_inputs_as_long_as_half_a_window_and_one(model_type: str) -> None:
    """With a window of 2w, all of w + 1 tokens read each other; one token more, and the ends do not."""
    theirs = in_tree(model_type)
    ours = hea.convert(theirs, attention_window=40)
    assert largest_difference(theirs, ours, inputs_of(model_type, "AutoModel", 21)) < 1e-5
    assert largest_difference(theirs, ours, inputs_of(model_type, "AutoModel", 61)) > 1e-4


@pytest.mark.parametrize("model_type", DENSE)
def test_long_inputs(model_type: str) -> None:
    ours = hea.convert(in_tree(model_type), max_position_embeddings=1000)
    inputs = inputs_of(model_type, "AutoModel", 1000)
    with torch.no_grad():
        out = ours(**inputs)
    hidden = out[0] if "decoder_input_ids" not in inputs else out.encoder_last_hidden_state
    assert hidden.shape[:2] == (3, 1000)
    assert hidden.isfinite().all()


@pytest.mark.parametrize("model_type", LEARNED)
def test_positions_come_round_and_round(model_type: str) -> None:
    theirs = in_tree(model_type)
    ours = hea.convert(theirs, max_position_embeddings=300)
    weights = theirs.state_dict()
    old = next(tensor for name, tensor in weights.items() if "position" in name)
    new = next(tensor for name, tensor in ours.state_dict().items() if "positions.table" in name)
    offset = 0 if model_type == "bert" else 2
    assert len(new) == offset + 300
    assert new[:offset].equal(old[:offset])
    period = len(old) - offset
    assert new[offset : offset + period].equal(old[offset:])
    assert new[offset + period :].equal(new[offset : offset + 300 - period])


def test_longer_targets() -> None:
    ours = hea.convert(in_tree("bart"), max_target_position_embeddings=100)
    table = ours.decoder.embeddings.positions.table.weight
    assert table[2:22].equal(table[82:102])
    assert len(table) == 102
    with pytest.raises(hea.ConfigurationError, match="max_target_position_embeddings=16"):
        hea.convert(ours, max_target_position_embeddings=16)
    with pytest.raises(hea.ConfigurationError, match="is for encoder-decoders"):
        hea.convert(in_tree("bert"), max_target_position_embeddings=100)


@pytest.mark.filterwarnings("ignore:.*is not kept")
def test_bigbird_pegasus_has_one_length_for_both_sides() -> None:
    ours = hea.convert(in_tree("bigbird_pegasus"), max_position_embeddings=200)
    with pytest.raises(hea.ConfigurationError, match="max_target_position_embeddings=80"):
        hea.convert(ours, to="bigbird_pegasus")
    back = hea.convert(ours, to="bigbird_pegasus", max_target_position_embeddings=200)
    assert back.config.max_position_embeddings == 200


def test_a_pattern_replaces_the_window_and_the_global_token() -> None:
    ours = hea.convert(in_tree("bert"), pattern="band(8, 8) | global(0, 3)")
    assert ours.config.attention_pattern == (Band(8, 8) | GlobalTokens([0, 3])).to_dict()
    assert ours.config.global_tokens is None
    assert hea.convert(in_tree("bart"), pattern=Band(8, 8)).config.attention_pattern["decoder"] is None


def test_sliding_layers_of_modernbert_stay() -> None:
    config = hea.convert(in_tree("modernbert"), attention_window=40).config
    long = (Band(20, 20) | GlobalTokens([0])).to_dict()
    assert config.attention_pattern == [long, Band(4, 4).to_dict(), Band(4, 4).to_dict()]
    assert config.rope_theta_per_layer == [160_000.0, 10_000.0, 10_000.0]
    assert config.max_position_embeddings == 4096


def test_global_projections_start_as_copies() -> None:
    with pytest.warns(UserWarning, match=r"Copied from the projections that all tokens use: layers\.\*\.self_attn"):
        ours = hea.convert(in_tree("roberta"), global_projections=True)
    for layer in ours.layers:
        for name in ("q_proj", "k_proj", "v_proj"):
            local, copied = getattr(layer.self_attn, name), getattr(layer.self_attn.global_attention, name)
            assert local.weight.equal(copied.weight)
            assert local.bias.equal(copied.bias)
            assert local.weight.data_ptr() != copied.weight.data_ptr()


@pytest.mark.filterwarnings("ignore:.*is not kept", "ignore:Newly initialized")
@pytest.mark.parametrize(("model_type", "to"), [("roberta", "longformer"), ("bert", "longformer"), ("bart", "led")])
def test_the_papers_recipes(model_type: str, to: str) -> None:
    """RoBERTa becomes the Longformer of transformers, BART its LED; tables have the rows that those want."""
    theirs = in_tree(model_type)
    long = hea.convert(theirs, to=to, max_position_embeddings=256, attention_window=64)
    assert long.config.model_type == to
    inputs = inputs_of(model_type, "AutoModel", 21)
    assert largest_difference(theirs, long, inputs) < 1e-5


def test_ours_longer() -> None:
    ours = hea.convert(in_tree("longformer", "AutoModelForMaskedLM"))
    longer = hea.convert(ours, max_position_embeddings=500, attention_window=16)
    assert longer.config.max_position_embeddings == 500
    assert longer.config.attention_pattern == Band(8, 8).to_dict()
    same = hea.convert(ours, max_position_embeddings=500)
    inputs = inputs_of("longformer", "AutoModelForMaskedLM")
    assert largest_difference(ours, same, inputs) == 0
    table = same.model.embeddings.positions.table.weight
    assert table[2:80].equal(table[80:158])


@pytest.mark.filterwarnings("ignore:.*is not kept", "ignore:Newly initialized")
def test_ours_longer_and_back() -> None:
    theirs = in_tree("big_bird")
    longer = hea.convert(hea.convert(theirs, max_position_embeddings=200), to="big_bird")
    assert longer.embeddings.position_embeddings.weight[:80].equal(theirs.embeddings.position_embeddings.weight)
    assert longer.config.max_position_embeddings == 200


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("bert", {"is_decoder": True}, "is_decoder=True"),
        ("bart", {"decoder_ffn_dim": 64}, "encoder_ffn_dim=48"),
        ("pegasus", {"scale_embedding": False}, "sinusoids of amplitude"),
        ("marian", {"decoder_vocab_size": 70, "share_encoder_decoder_embeddings": False}, "share the vocabulary"),
    ],
)
def test_what_cannot_be_said_is_refused(model_type: str, changes: dict, message: str) -> None:
    with pytest.raises(hea.ConfigurationError, match=message):
        hea.convert(in_tree(model_type, **changes))


@pytest.mark.parametrize("model_type", ["bart", "led", "pegasus", "bigbird_pegasus", "marian"])
def test_the_dropout_of_activations_is_kept(model_type: str) -> None:
    assert hea.convert(in_tree(model_type, activation_dropout=0.3)).config.activation_dropout == 0.3


def test_fields_without_counterpart_are_named() -> None:
    with pytest.warns(UserWarning, match=r"no such config fields: encoder_layerdrop=0\.3\."):
        hea.convert(in_tree("bart", encoder_layerdrop=0.3))


def test_the_decoder_keeps_its_length() -> None:
    ours = hea.convert(in_tree("bart"), max_position_embeddings=300)
    assert ours.encoder.embeddings.positions.table.num_embeddings == 302
    assert ours.decoder.embeddings.positions.table.num_embeddings == 82


def test_defaults() -> None:
    config = hea.convert(in_tree("bert")).config
    assert config.max_position_embeddings == 4096
    assert config.attention_pattern == Band(256, 256).to_dict()
    assert (config.global_tokens, config.global_projections) == ("first", False)
