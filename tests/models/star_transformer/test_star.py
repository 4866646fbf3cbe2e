"""Stars by their specification, token by token; heads, presets, padding, documents and pairs of sentences."""

from typing import Any

import pytest
import torch
from layout.test_bounded_work import Written
from models.star_transformer.star_by_tokens import star_by_tokens
from models.star_transformer.tiny_models import FASTNLP, build, random_ids
from models_cases import TOLERANCE

import hf_efficient_attn as hea

FORMS: dict[str, dict[str, Any]] = {
    "paper": {},
    "paper, open ring": {"ring": "open", "num_hidden_layers": 3},
    "shared layers, learned relay": {"share_layers": True, "relay_init": "learned", "num_hidden_layers": 3},
    "fastNLP": FASTNLP,
    "fastNLP, closed ring": {**FASTNLP, "ring": "closed"},
}


def gradients(model: Any, outputs: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the gradients of a sum that no output takes part in evenly."""
    total = sum((each * torch.arange(each.numel(), dtype=each.dtype).view_as(each).sin()).sum() for each in outputs)
    named = {name: each for name, each in model.named_parameters() if not name.startswith("embed_tokens")}
    found = torch.autograd.grad(total, list(named.values()))
    return dict(zip(named, found, strict=True))


@pytest.mark.parametrize("tokens", [1, 2, 3, 7])
@pytest.mark.parametrize("form", FORMS)
def test_states_and_gradients_are_those_of_the_specification(form: str, tokens: int) -> None:
    model = build("AutoModel", **FORMS[form]).double()
    ids = random_ids(1, tokens)
    found = model(ids)
    weights = dict(model.named_parameters())
    embedded = weights["embed_tokens.weight"][ids[0]] + weights["embeddings.positions.table.weight"][:tokens]
    nodes, relay = star_by_tokens(model.config, weights, embedded)
    for actual, expected in ((found.last_hidden_state[0], nodes), (found.pooler_output[0], relay)):
        torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-10)
    actual = gradients(model, (found.last_hidden_state[0], found.pooler_output[0]))
    for name, expected in gradients(model, (nodes, relay)).items():
        torch.testing.assert_close(actual[name], expected, atol=1e-10, rtol=1e-8, msg=name)


@torch.no_grad()
def test_a_closed_ring_has_no_beginning() -> None:
    """Without positions, turned texts have turned states and the same relay; an open ring tells its ends apart."""
    ids = random_ids(2, 9)
    for ring, is_equal in (("closed", True), ("open", False)):
        model = build("AutoModel", position_embedding_type="none", ring=ring)
        here, turned = model(ids), model(ids.roll(3, 1))
        assert torch.allclose(turned.last_hidden_state, here.last_hidden_state.roll(3, 1), atol=1e-5) is is_equal
        assert torch.allclose(turned.pooler_output, here.pooler_output, atol=1e-5) is is_equal


@pytest.mark.parametrize("ring", ["closed", "zero_ends"])
@pytest.mark.parametrize("how", ["plain", "padded", "packed"])
def test_no_tensor_grows_with_the_square_of_the_length(how: str, ring: str) -> None:
    largest = []
    for tokens in (512, 1024):
        model = build("AutoModel", max_position_embeddings=1024, ring=ring).train()
        inputs: dict[str, Any] = {"input_ids": random_ids(1, tokens)}
        if how == "padded":
            inputs["attention_mask"] = (torch.arange(tokens) < tokens - 5).long()[None]
        if how == "packed":
            # as many documents as there can be in texts that have neighbours
            inputs["position_ids"] = (torch.arange(tokens) % 2)[None]
        with Written() as note:
            model(**inputs).last_hidden_state.sum().backward()
        largest.append(note.largest)
    assert largest[1] <= 2 * largest[0]
    assert largest[1] <= 1024 * 5 * 32


DENSE = {"classifier_head": "dense", "num_labels": 3}


def by_hand(model: torch.nn.Module, features: torch.Tensor) -> torch.Tensor:
    inner = features @ model.classifier.dense.weight.T + model.classifier.dense.bias
    inner = torch.where(inner > 0, inner, 0.01 * inner)
    return inner @ model.classifier.out_proj.weight.T + model.classifier.out_proj.bias


def represented(outputs: object, row: slice, number: int, pooling: str) -> torch.Tensor:
    nodes, relay = outputs.last_hidden_state[:, row], outputs.relay_states[:, number]
    highest = nodes.max(1).values
    return {"relay_max": (relay + highest) / 2, "relay": relay, "max": highest, "mean": nodes.mean(1)}[pooling]


@pytest.mark.parametrize("pooling", ["relay_max", "relay", "max", "mean"])
@torch.no_grad()
def test_texts_and_pairs(pooling: str) -> None:
    ids, types = random_ids(2, 9), torch.tensor([[0] * 4 + [1] * 5] * 2)
    mask = torch.ones_like(ids)
    mask[:, 8:] = 0
    model = build("AutoModelForSequenceClassification", classifier_pooling=pooling, **DENSE)
    expected = by_hand(model, represented(model.model(ids, mask), slice(8), 0, pooling))
    torch.testing.assert_close(model(ids, mask).logits, expected)
    pairs = {"separate_sentences": True, "classifier_pooling": pooling}
    model = build("AutoModelForSequenceClassification", **pairs, **DENSE)
    outputs = model.model(ids, mask, token_type_ids=types)
    u, v = (represented(outputs, row, number, pooling) for number, row in enumerate((slice(4), slice(4, 8))))
    expected = by_hand(model, torch.cat((u, v, (u - v).abs(), u * v), -1))
    torch.testing.assert_close(model(ids, mask, token_type_ids=types).logits, expected)
    choice = build("AutoModelForMultipleChoice", **pairs, **DENSE)
    stacked = [each[:, None].expand(-1, 2, -1) for each in (ids, mask, types)]
    assert choice(stacked[0], stacked[1], token_type_ids=stacked[2]).logits.shape == (2, 2)


@torch.no_grad()
def test_every_token_has_the_head_of_texts() -> None:
    model, ids = build("AutoModelForTokenClassification", **DENSE), random_ids(2, 7)
    expected = by_hand(model, model.model(ids).last_hidden_state)
    torch.testing.assert_close(model(ids).logits, expected)


@torch.no_grad()
def test_no_tokens_have_the_maximum_0() -> None:
    model, ids = build("AutoModelForSequenceClassification", classifier_pooling="max"), random_ids(2, 7)
    mask = torch.ones_like(ids)
    mask[0] = 0
    assert torch.equal(model(ids, mask).logits[0], model.classifier.bias)


def test_embeddings_of_another_width_are_mapped() -> None:
    model, ids = build(embedding_size=10), random_ids(2, 5)
    assert model.get_input_embeddings().weight.shape == (61, 10)
    with torch.no_grad():
        embedded = model.get_input_embeddings()(ids)
        torch.testing.assert_close(model(inputs_embeds=embedded).logits, model(ids).logits)


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


RINGS = {"paper": {}, "open": {"ring": "open"}, "fastNLP": FASTNLP}


@pytest.mark.parametrize("form", RINGS)
@torch.no_grad()
def test_relays_of_packed_documents_are_those_of_the_documents_alone(form: str) -> None:
    model = build("AutoModel", **RINGS[form])
    documents = [random_ids(1, length, seed=length) for length in (4, 1, 2, 5)]
    positions = torch.cat([torch.arange(ids.shape[1]) for ids in documents])[None]
    packed = model(torch.cat(documents, 1), position_ids=positions)
    assert packed.pooler_output is None
    for number, ids in enumerate(documents):
        alone = model(ids)
        torch.testing.assert_close(packed.relay_states[:, number], alone.pooler_output, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("form", RINGS)
def test_contents_of_padding_change_nothing_and_get_no_gradient(form: str) -> None:
    """In fastNLP they change the relay and the tokens beside them."""
    model = build("AutoModel", **RINGS[form])
    ids, mask = random_ids(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[0, 6:] = mask[1, :2] = 0
    found = []
    for content in (0.0, 50.0):
        embedded = model.embed_tokens(ids).detach()
        embedded[mask == 0] = content
        outputs = model(inputs_embeds=embedded.requires_grad_(), attention_mask=mask)
        (outputs.last_hidden_state.sin().sum() + outputs.pooler_output.cos().sum()).backward()
        assert embedded.grad[mask == 0].count_nonzero() == 0
        assert outputs.last_hidden_state[mask == 0].count_nonzero() == 0
        found.append(outputs)
    assert torch.equal(found[0].last_hidden_state, found[1].last_hidden_state)
    assert torch.equal(found[0].pooler_output, found[1].pooler_output)


@torch.no_grad()
def test_a_masked_token_between_others_is_read_by_none() -> None:
    model = build("AutoModel", position_embedding_type="none", ring="open")
    ids, mask = random_ids(1, 7), torch.ones(1, 7, dtype=torch.long)
    mask[0, 3] = 0
    first, other = (model(each, attention_mask=mask) for each in (ids, ids.scatter(1, torch.tensor([[3]]), 5)))
    assert torch.equal(first.pooler_output, other.pooler_output)
    weights = model(ids, attention_mask=mask, output_attentions=True).attentions[0][0, :, :, (0, 2)]
    nothing = ((4, 0), (2, 1), (0, 0), (6, 1), (3, 0), (3, 1))
    assert all((weights[:, token, side] == 0).all() for token, side in nothing)
    assert (weights == 0).sum() == len(nothing) * len(weights)


PAIRS = {"separate_sentences": True, "type_vocab_size": 2}


def test_sentences_are_stars_of_their_own() -> None:
    model = build("AutoModel", **PAIRS)
    first, second = random_ids(2, 4), random_ids(2, 6, seed=3)
    types = torch.tensor([[0] * 4 + [1] * 6] * 2)
    with torch.no_grad():
        pair = model(torch.cat((first, second), 1), token_type_ids=types)
        for number, (ids, place) in enumerate(((first, slice(4)), (second, slice(4, None)))):
            # alone it is a pair with an empty second or first sentence
            alone = model(ids, token_type_ids=torch.full_like(ids, number))
            torch.testing.assert_close(pair.last_hidden_state[:, place], alone.last_hidden_state)
            torch.testing.assert_close(pair.relay_states[:, number], alone.relay_states[:, number])


def test_a_tokenizer_s_pairs_are_compared(tmp_path: object) -> None:
    """Padded on either side, a pair has the same logits; the order of the sentences matters."""
    model = build("AutoModelForSequenceClassification", **PAIRS)
    ids = random_ids(1, 9)
    types = torch.tensor([[0] * 4 + [1] * 5])
    swapped = model(torch.cat((ids[:, 4:], ids[:, :4]), 1), token_type_ids=torch.tensor([[0] * 5 + [1] * 4])).logits
    plain = model(ids, token_type_ids=types).logits
    assert not torch.allclose(swapped, plain, atol=1e-3)
    for before, behind in ((3, 0), (0, 3)):
        padded, kinds, mask = (
            torch.nn.functional.pad(each, (before, behind)) for each in (ids, types, torch.ones_like(ids))
        )
        torch.testing.assert_close(model(padded, mask, token_type_ids=kinds).logits, plain)


def test_pairs_must_be_told_apart() -> None:
    model, ids = build("AutoModel", **PAIRS), random_ids(2, 6)
    types = torch.tensor([[0, 0, 0, 1, 1, 1]] * 2)
    with pytest.raises(hea.InputError, match="token_type_ids"):
        model(ids)
    with pytest.raises(hea.InputError, match="other types than 0 and 1"):
        model(ids, token_type_ids=types * 2)
    for said in ({"position_ids": torch.arange(6)[None]}, {"seq_idx": types}):
        with pytest.raises(hea.InputError, match="position_ids"):
            model(ids, token_type_ids=types, **said)


def test_a_row_of_documents_has_no_single_class() -> None:
    model = build("AutoModelForSequenceClassification")
    with pytest.raises(hea.InputError, match="2 packed documents"):
        model(random_ids(1, 6), position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]))


def test_a_class_of_what_may_be_several_documents_is_refused_while_compiling() -> None:
    torch.compiler.reset()
    model, ids = build("AutoModelForSequenceClassification", num_hidden_layers=1), random_ids(1, 6)
    step = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(step(ids).logits, model(ids).logits)
        with pytest.raises(Exception, match="may mark packed documents"):
            step(ids, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]))


def test_a_matrix_may_close_padding_alone() -> None:
    model, ids = build("AutoModel"), random_ids(1, 5)
    with pytest.raises(hea.InputError, match="masks pairs of real tokens"):
        model(ids, attention_mask=torch.ones(1, 1, 5, 5, dtype=torch.bool).tril())


@torch.no_grad()
def test_a_matrix_that_leaves_out_padding_is_the_padding_mask() -> None:
    """Padding on the left, too, over which no position is counted, and sentences by it."""
    ids, mask = random_ids(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[0, :3] = 0
    matrix = mask[:, None, None].bool().expand(2, 1, 9, 9)
    types = torch.tensor([[0] * 5 + [1] * 4] * 2)
    for fields, given in (({}, {}), (PAIRS, {"token_type_ids": types})):
        model = build("AutoModelForSequenceClassification", **fields)
        expected = model(ids, mask, **given).logits
        torch.testing.assert_close(model(ids, matrix, **given).logits, expected)


def test_a_compiled_model_refuses_a_matrix() -> None:
    """It cannot see which pairs it closes."""
    torch.compiler.reset()
    model, ids = build("AutoModel", num_hidden_layers=1), random_ids(1, 5)
    matrix = torch.ones(1, 1, 5, 5, dtype=torch.bool)
    with pytest.raises(Exception, match="cannot see which pairs it masks"):
        torch.compile(model, backend="eager")(ids, attention_mask=matrix)


def test_compiled_documents_are_those_of_the_plain_model() -> None:
    """A compiler does not know how many documents there are."""
    torch.compiler.reset()
    model, ids = build("AutoModel", num_hidden_layers=1), random_ids(1, 12)
    positions = torch.tensor([[0, 1, 2, 3, 0, 0, 1, 2, 3, 4, 5, 6]])
    with torch.no_grad():
        expected = model(ids, position_ids=positions)
        found = torch.compile(model, fullgraph=True, backend="aot_eager")(ids, position_ids=positions)
    torch.testing.assert_close(found.last_hidden_state, expected.last_hidden_state)
    torch.testing.assert_close(found.relay_states[:, :3], expected.relay_states)
