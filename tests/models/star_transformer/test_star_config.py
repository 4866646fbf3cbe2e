"""Configurations that no star can have are refused with a sentence, and what fields say acts."""

import pytest
import torch
from models.star_transformer.tiny_models import build, random_ids

import hf_efficient_attn as hea


def test_embeddings_of_another_width_are_mapped() -> None:
    model, ids = build(embedding_size=10), random_ids(2, 5)
    assert model.get_input_embeddings().weight.shape == (61, 10)
    with torch.no_grad():
        embedded = model.get_input_embeddings()(ids)
        torch.testing.assert_close(model(inputs_embeds=embedded).logits, model(ids).logits)


def test_token_types_have_embeddings_or_are_refused() -> None:
    ids, types = random_ids(1, 5), torch.tensor([[0, 0, 1, 1, 1]])
    with torch.no_grad():
        model = build(type_vocab_size=2)
        assert not torch.allclose(model(ids).logits, model(ids, token_type_ids=types).logits)
    with pytest.raises(hea.InputError, match="no token types"):
        build()(ids, token_type_ids=types)


def test_shared_layers_have_one_set_of_parameters() -> None:
    parameters = [build("AutoModel", share_layers=shared, num_hidden_layers=3) for shared in (True, False)]
    shared, own = ([name for name, _ in model.named_parameters() if "layers" in name] for model in parameters)
    assert len(own) == 3 * len(shared)
    assert len(parameters[0](random_ids(1, 4), output_hidden_states=True).hidden_states) == 4


@pytest.mark.parametrize("preset", ["fastnlp", "sst", "snli", "tagging"])
def test_presets_have_the_parameters_of_their_shapes(preset: str) -> None:
    config = getattr(hea.StarTransformerConfig, preset)()
    with torch.device("meta"):
        model = hea.StarTransformerModel(config)
    hidden, width = config.hidden_size, config.num_attention_heads * config.head_dim
    attention = 3 * (hidden + 1) * width + (width + 1) * hidden
    layers = config.num_hidden_layers * (2 * attention + 2 * hidden)
    tables = (config.vocab_size + config.max_position_embeddings) * hidden
    assert model.num_parameters() == layers + tables


def test_weights_of_tokens_and_relays_are_shown() -> None:
    model, ids = build("AutoModel"), random_ids(2, 6)
    mask = torch.ones_like(ids)
    mask[0, 4:] = 0
    found = model(ids, mask, output_attentions=True, output_relay_attentions=True)
    for weights, of_relays in zip(found.attentions, found.relay_attentions, strict=True):
        assert weights.shape == (2, 4, 6, 5)
        assert of_relays.shape == (2, 4, 7)
        assert of_relays[0, :, 4:6].count_nonzero() == 0
        for each in (weights, of_relays):
            torch.testing.assert_close(each.sum(-1), torch.ones(each.shape[:-1]))
