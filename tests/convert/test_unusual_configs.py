"""No constant of a foreign head is read from the config here, and no field there is a constant here: every head of
every type with fields other than their defaults, both ways; and what `parity` computes before it says so."""

import re
import warnings
from typing import Any

import pytest
import torch
import transformers
from in_tree_models import FIELDS, heads_of, in_tree, inputs_of, largest_difference

import hf_efficient_attn as hea
from hf_efficient_attn.convert.configs import our_config
from hf_efficient_attn.convert.registry import COUNTERPARTS, resolve_head

ENCODER = {"hidden_act": "silu", "layer_norm_eps": 1e-2, "type_vocab_size": 3, "tie_word_embeddings": False}
SIDES = {"activation_function": "silu", "tie_word_embeddings": True}
UNUSUAL: dict[str, dict[str, Any]] = {
    "bert": ENCODER,
    "roberta": ENCODER,
    "xlm-roberta": ENCODER,
    "longformer": ENCODER,
    "big_bird": {**ENCODER, "rescale_embeddings": True, "use_bias": False},
    "nystromformer": ENCODER,
    "modernbert": {
        "hidden_activation": "silu",
        "classifier_activation": "relu",
        "classifier_pooling": "mean",
        "classifier_bias": True,
        "decoder_bias": False,
        "norm_eps": 1e-2,
        "norm_bias": True,
        "mlp_bias": True,
        "attention_bias": True,
        "tie_word_embeddings": False,
    },
    "bart": {**SIDES, "scale_embedding": True},
    "pegasus": SIDES,
    "marian": SIDES,
    "led": SIDES,
    "bigbird_pegasus": {**SIDES, "scale_embedding": False, "use_bias": True},
    "reformer": {"hidden_act": "silu", "layer_norm_eps": 1e-2, "axial_pos_embds": False},
}
TARGETS = [name for name, each in COUNTERPARTS.items() if each.to_theirs]
FIELDS_OF_HEADS = {
    "hidden_act": ("LM", "Classification", "Answering"),
    "lm_transform_activation": "LM",
    "classifier_activation": ("Classification", "Choice"),
}
CAUSAL = ("big_bird", "AutoModelForCausalLM")

pytestmark = pytest.mark.filterwarnings(
    "ignore:Left out, because (sparse|lm_head)|Newly initialized|stream_join=",
    "ignore:.*is not kept",
    "ignore:Even with parity",
)


def unusual(model_type: str, head: str, **changes: Any) -> Any:
    decoder = {"is_decoder": True, "attention_type": "original_full"} if head == CAUSAL[1] else {}
    return in_tree(model_type, head, **{**UNUSUAL[model_type], **decoder, **changes})


# which are the backbone alone, one matrix, and what the head of sequences computes
ALIKE = ("AutoModel", "AutoModelForTokenClassification", "AutoModelForMultipleChoice")
# whose heads are BART's
LIKE_BART = [(name, head) for name, head in heads_of("led", "bigbird_pegasus") if not head.endswith("Seq2SeqLM")]


@pytest.mark.parametrize(
    ("model_type", "head"),
    [
        pytest.param(*pair, marks=[pytest.mark.thorough] * (pair[1] in ALIKE or pair in LIKE_BART))
        for pair in [*heads_of(*FIELDS), CAUSAL]
    ],
)
def test_same_outputs_both_ways(model_type: str, head: str) -> None:
    theirs = unusual(model_type, head)
    inputs = inputs_of(model_type, head)
    ours = hea.convert(theirs, parity=True)
    assert largest_difference(theirs, ours, inputs) < 2e-5
    if model_type in TARGETS:
        assert largest_difference(theirs, hea.convert(ours, to=model_type, parity=True), inputs) == 0


@pytest.mark.parametrize(
    ("model_type", "head", "field"),
    [
        pytest.param(model_type, head, field, marks=[pytest.mark.thorough] * (head in ALIKE))
        for model_type, head in [*heads_of(*TARGETS), CAUSAL]
        for field, ending in FIELDS_OF_HEADS.items()
        if head.endswith(ending)
    ],
)
def test_what_their_head_cannot_say_is_refused_or_named(model_type: str, head: str, field: str) -> None:
    decoder = {"is_decoder": True, "attention_type": "original_full"} if head == CAUSAL[1] else {}
    config = transformers.AutoConfig.for_model(model_type, **{**FIELDS[model_type], **decoder})
    fields = our_config(COUNTERPARTS[model_type], config, resolve_head(head), parity=True).to_dict()
    if field not in fields:
        return
    torch.manual_seed(0)
    ours = (
        getattr(transformers, head).from_config(transformers.AutoConfig.for_model(**{**fields, field: "relu"})).eval()
    )
    inputs = inputs_of(model_type, head)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            theirs = hea.convert(ours, to=model_type, parity=True)
        except hea.ConfigurationError as error:
            theirs, refusal = None, str(error)
    if theirs is None:
        assert f"{model_type} models cannot have: " in refusal
        assert "_activation='" in refusal
    elif largest_difference(ours, theirs, inputs) > 1e-5:
        kept = r" is not kept: (big_bird|nystromformer) has .*the activation of the MLP"
        assert any(re.search(kept, str(each.message)) for each in caught)


@pytest.mark.parametrize(
    ("model_type", "head", "wrong"),
    [
        ("roberta", "AutoModelForMaskedLM", {"lm_transform_activation": "gelu_new"}),
        ("bert", "AutoModelForSequenceClassification", {"classifier_activation": "gelu"}),
        ("big_bird", "AutoModelForQuestionAnswering", {"question_answering_excludes_question": False}),
        ("bart", "AutoModelForSeq2SeqLM", {"norm_eps": 1e-3}),
        ("longformer", "AutoModel", {"global_tokens": "first"}),
    ],
)
def test_parity_is_computed_before_it_is_said(
    model_type: str, head: str, wrong: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """A table that translates one field wrongly: no word of parity, and nothing written."""
    table = COUNTERPARTS[model_type]
    changed = lambda *args: {**table.to_ours(*args), **wrong}  # noqa: E731
    broken = type(table)(**{**vars(table), "to_ours": changed})
    monkeypatch.setitem(COUNTERPARTS, model_type, broken)
    with pytest.raises(hea.CheckpointError, match="parity=True") as error:
        hea.convert(in_tree(model_type, head), tmp_path / "new", parity=True)
    assert len(str(error.value)) <= 500
    assert not (tmp_path / "new").exists()
