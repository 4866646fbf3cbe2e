"""Padding, packed documents and pairs of sentences: every text is a star of its own."""

import pytest
import torch
from models.star_transformer.tiny_models import FASTNLP, build, random_ids
from models_cases import TOLERANCE

import hf_efficient_attn as hea

FORMS = {"paper": {}, "open": {"ring": "open"}, "fastNLP": FASTNLP}


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_relays_of_packed_documents_are_those_of_the_documents_alone(form: str) -> None:
    model = build("AutoModel", **FORMS[form])
    documents = [random_ids(1, length, seed=length) for length in (4, 1, 2, 5)]
    positions = torch.cat([torch.arange(ids.shape[1]) for ids in documents])[None]
    packed = model(torch.cat(documents, 1), position_ids=positions)
    assert packed.pooler_output is None
    for number, ids in enumerate(documents):
        alone = model(ids)
        torch.testing.assert_close(packed.relay_states[:, number], alone.pooler_output, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("form", FORMS)
def test_contents_of_padding_change_nothing_and_get_no_gradient(form: str) -> None:
    """In fastNLP they change the relay and the tokens beside them."""
    model = build("AutoModel", **FORMS[form])
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
    step = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(step(ids).logits, model(ids).logits)
    with pytest.raises(Exception, match="may hold packed documents"):
        step(ids, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]))


def test_a_matrix_may_close_padding_alone() -> None:
    model, ids = build("AutoModel"), random_ids(1, 5)
    with pytest.raises(hea.InputError, match="closes pairs of real tokens"):
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
    with pytest.raises(Exception, match="cannot look which pairs it closes"):
        torch.compile(model, backend="aot_eager")(ids, attention_mask=matrix)


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
