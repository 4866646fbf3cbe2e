"""Sparse models of transformers, converted: the same outputs for every head, and back the same weights."""

import warnings

import numpy as np
import pytest
import torch
from in_tree_models import in_tree, inputs_of, largest_difference

import hf_efficient_attn as hea

# of which every head goes both ways in `test_unusual_configs.py`
SPARSE = [
    ("longformer", "AutoModelForMaskedLM"),
    ("big_bird", "AutoModelForSequenceClassification"),
    ("led", "AutoModelForSeq2SeqLM"),
    ("bigbird_pegasus", "AutoModelForQuestionAnswering"),
]
NO_DROPOUT = {
    "big_bird": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "bigbird_pegasus": {"dropout": 0.0},
}

pytestmark = pytest.mark.filterwarnings(
    "ignore:Left out, because sparse|Newly initialized", "ignore:.*is not kept", "ignore:Even with parity"
)


# every head at 61 tokens: `test_unusual_configs.py`; in transformers BigBird reads all of up to 28
@pytest.mark.parametrize("tokens", [64, 29, 28, 20])
@pytest.mark.parametrize("model_type", ["longformer", "big_bird", "led", "bigbird_pegasus"])
def test_same_outputs(model_type: str, tokens: int) -> None:
    head = "AutoModel"
    theirs = in_tree(model_type, head)
    ours = hea.convert(theirs, parity=True)
    assert largest_difference(theirs, ours, inputs_of(model_type, head, tokens)) < 1e-5


@pytest.mark.parametrize("model_type", ["big_bird", "bigbird_pegasus"])
def test_padded_bigbird_is_what_it_is_without_padding(model_type: str) -> None:
    """In transformers the last block of the longest example is global, for a shorter one padding; here its own is."""
    theirs = in_tree(model_type, **NO_DROPOUT[model_type]).train()
    ours = hea.convert(theirs)
    inputs = inputs_of(model_type, "AutoModel", 61, padded=17)
    state = np.random.get_state()
    try:
        with torch.no_grad():
            found = ours(**inputs)[0]
            alone = theirs(
                **{name: each[:1] if "decoder" in name else each[:1, :-17] for name, each in inputs.items()}
            )[0]
            others = theirs(**{name: each[1:] for name, each in inputs.items()})[0]
    finally:
        np.random.set_state(state)
    assert (found[:1, : alone.shape[1]] - alone).abs().max() < 1e-5
    assert (found[1:] - others).abs().max() < 1e-5


@pytest.mark.parametrize("model_type", ["longformer", "led"])
@pytest.mark.parametrize("parity", [False, True])
def test_marked_global_tokens(model_type: str, parity: bool) -> None:
    theirs = in_tree(model_type)
    inputs = inputs_of(model_type, "AutoModel", padded=9)
    marked = torch.zeros_like(inputs["input_ids"])
    marked[0, :3], marked[1, [0, 17, 30]], marked[2, 5] = 1, 1, 1
    inputs["global_attention_mask"] = marked
    assert largest_difference(theirs, hea.convert(theirs, parity=parity), inputs) < 1e-5


def test_the_first_token_of_led_is_global_as_its_authors_have_it() -> None:
    theirs = in_tree("led")
    ours = hea.convert(theirs)
    inputs = inputs_of("led", "AutoModel")
    assert largest_difference(theirs, ours, inputs) > 1e-3
    inputs["global_attention_mask"] = (torch.arange(61) == 0).long().expand(3, -1)
    assert largest_difference(theirs, ours, inputs) < 1e-5


@pytest.mark.parametrize("parity", [False, True])
@pytest.mark.parametrize("model_type", ["big_bird", "bigbird_pegasus"])
def test_bigbird_in_training(model_type: str, parity: bool) -> None:
    """The random blocks are those that transformers draws in training, layer by layer."""
    theirs = in_tree(model_type, **NO_DROPOUT[model_type]).train()
    ours = hea.convert(theirs, parity=parity).train()
    state = np.random.get_state()
    try:
        assert largest_difference(theirs, ours, inputs_of(model_type, "AutoModel", 64)) < 1e-5
    finally:
        np.random.set_state(state)  # which the model of transformers seeds anew


@pytest.mark.parametrize("model_type", ["big_bird", "bigbird_pegasus"])
def test_bigbird_evaluates_as_it_was_trained_unless_parity_is_asked_for(model_type: str) -> None:
    theirs = in_tree(model_type, **NO_DROPOUT[model_type])
    ours = hea.convert(theirs)
    inputs = inputs_of(model_type, "AutoModel", 64)
    assert largest_difference(theirs, ours, inputs) > 1e-3
    state = np.random.get_state()
    try:
        assert largest_difference(theirs.train(), ours.eval(), inputs) < 1e-5
    finally:
        np.random.set_state(state)


def test_dense_bigbird() -> None:
    theirs = in_tree("big_bird", "AutoModelForMaskedLM", attention_type="original_full")
    ours = hea.convert(theirs)
    assert ours.config.attention_pattern is None
    assert largest_difference(theirs, ours, inputs_of("big_bird", "AutoModelForMaskedLM")) < 1e-5
    assert hea.convert(ours, to="big_bird").config.attention_type == "original_full"


def test_causal_bigbird_is_dense() -> None:
    theirs = in_tree("big_bird", "AutoModelForCausalLM", is_decoder=True, attention_type="original_full")
    ours = hea.convert(theirs)
    assert ours.config.is_causal
    assert largest_difference(theirs, ours, inputs_of("big_bird", "AutoModelForCausalLM")) < 1e-5
    back = hea.convert(ours, to="big_bird")
    assert back.config.is_decoder
    assert largest_difference(theirs, back, inputs_of("big_bird", "AutoModelForCausalLM")) == 0


def test_encoder_as_language_model_is_refused() -> None:
    theirs = in_tree("big_bird", "AutoModelForCausalLM")
    with pytest.raises(hea.ConfigurationError, match="is_decoder=True"):
        hea.convert(theirs)


@pytest.mark.parametrize(("model_type", "head"), SPARSE)
def test_round_trip(model_type: str, head: str) -> None:
    theirs = in_tree(model_type, head)
    back = hea.convert(hea.convert(theirs), to=model_type)
    assert type(back) is type(theirs)
    before, after = theirs.state_dict(), back.state_dict()
    assert list(before) == list(after)
    differing = {name for name in before if not before[name].equal(after[name])}
    assert all("pooler" in name for name in differing)
    sides = ("hidden_dropout_prob", "dropout", "attention_window", "block_size", "num_random_blocks", "label2id")
    for name in [*theirs.config.to_dict().keys() & set(sides), "vocab_size", "pad_token_id", "use_cache"]:
        assert getattr(back.config, name, None) == getattr(theirs.config, name, None), name
    assert [length for name, length in theirs.config.to_dict().items() if "position_embeddings" in name] == [
        length for name, length in back.config.to_dict().items() if "position_embeddings" in name
    ]


@pytest.mark.parametrize("model_type", ["longformer", "big_bird"])
def test_what_is_lost_is_named(model_type: str) -> None:
    theirs = in_tree(model_type)
    with pytest.warns(UserWarning, match=r"Left out, because sparse_transformer .*: pooler.*weight, pooler.*bias"):
        ours = hea.convert(theirs)
    with pytest.warns(UserWarning, match=r"Newly initialized in .*Model, because .*: pooler.*weight, pooler.*bias"):
        hea.convert(ours, to=model_type)


def test_what_differs_by_design_is_named() -> None:
    ours = hea.convert(in_tree("big_bird", "AutoModelForQuestionAnswering"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hea.convert(ours, to="big_bird")
    text = "\n".join(str(warning.message) for warning in caught)
    for name in ("random_blocks_in_eval", "full_attention_up_to", "question_answering_excludes_question"):
        assert f"{name}=" in text


def test_nothing_is_said_where_nothing_is_lost() -> None:
    theirs = in_tree("longformer", "AutoModelForMaskedLM")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hea.convert(hea.convert(theirs), to="longformer")


def test_half_precision_stays() -> None:
    theirs = in_tree("longformer", "AutoModelForMaskedLM").to(torch.bfloat16)
    ours = hea.convert(theirs)
    assert ours.dtype == torch.bfloat16
    back = hea.convert(ours, to="longformer").state_dict()
    assert all(tensor.equal(back[name]) for name, tensor in theirs.state_dict().items())
