"""Configurations that no tree can have are refused with a sentence; presets, roots and explanations."""

import pytest
import torch
from models.bp_transformer.tiny_models import build
from models_cases import random_ids

import hf_efficient_attn as hea

# the authors name 38 and 39 million
SIZES = [("enwik8", 903, 38_629_632), ("text8", 903, 38_512_384), ("sst5", 15, 2_968_800), ("imdb", 54, 3_701_400)]


@pytest.mark.parametrize(("preset", "relations", "parameters"), SIZES)
def test_presets_have_the_parameters_of_their_shapes(preset: str, relations: int, parameters: int) -> None:
    config = getattr(hea.BPTransformerConfig, preset)()
    with torch.device("meta"):
        model = hea.BPTransformerModel(config)
    hidden, inner = config.hidden_size, config.intermediate_size
    layer = 4 * hidden**2 + 2 * hidden * inner + inner + hidden + 4 * hidden + relations * config.head_dim
    total = config.num_hidden_layers * layer + config.vocab_size * hidden + 2 * hidden
    assert model.num_parameters() == total == parameters


@pytest.mark.parametrize("pooling", ["root", "first", "last", "mean"])
def test_classifiers_read_what_the_config_says(pooling: str) -> None:
    model, ids = build("AutoModelForSequenceClassification", classifier_pooling=pooling), random_ids(2, 7)
    with torch.no_grad():
        states = model.model(ids)
        tokens = states.last_hidden_state
        # of seven tokens, the span of eight, whose left half ends with the fourth
        read = {"root": states.span_states[:, 3], "first": tokens[:, 0], "last": tokens[:, -1], "mean": tokens.mean(1)}
        torch.testing.assert_close(model(ids).logits, model.classifier(read[pooling]))


def test_a_row_of_several_documents_has_no_root() -> None:
    model = build("AutoModelForSequenceClassification")
    with pytest.raises(hea.InputError, match="Pass one whole text in each row"):
        model(random_ids(1, 6), position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]))
