"""Rows become texts that begin at their first place, and come back; what lies between texts is nothing."""

from typing import Any

import pytest
import torch
from models.compressed_transformer.tiny_models import build, random_ids
from models_cases import TOLERANCE

import hf_efficient_attn as hea
from hf_efficient_attn.models.mechanisms.texts import texts_of

CPU = torch.device("cpu")


def packed(lengths: list[int]) -> torch.Tensor:
    """Return the number of each token's document, [1, T]."""
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]


def test_rows_behind_which_is_padding_stay_where_they_are() -> None:
    real = torch.arange(6) < torch.tensor([[6], [4]])
    (group,) = texts_of(real, None, 2, 6, CPU).groups
    assert group.index is None
    assert torch.equal(group.real, real)
    assert texts_of(torch.ones_like(real), None, 2, 6, CPU).real is None


@pytest.mark.parametrize("is_traced", [False, True])
def test_padding_before_and_within_a_text_goes_behind_it(is_traced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: is_traced)
    real = torch.tensor([[0, 1, 1, 0, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]]).bool()
    states = torch.arange(15.0).view(3, 5, 1)
    texts = texts_of(real, None, 3, 5, CPU)
    (split,), (group,) = texts.split(states), texts.groups
    assert split[0, :3, 0].tolist() == [1, 2, 4]
    assert group.real[0].tolist() == [True] * 3 + [False] * 2
    assert torch.equal(texts.join([split]), states * real.unsqueeze(-1))


@pytest.mark.parametrize("lengths", [[5, 1, 9], [1] * 40 + [100], [64] * 3 + [3] * 20 + [1]])
def test_documents_come_back_and_their_places_are_few(lengths: list[int]) -> None:
    documents = packed(lengths)
    tokens = documents.shape[1]
    states = torch.randn(1, tokens, 3)
    texts = texts_of(None, documents, 1, tokens, CPU)
    assert torch.equal(texts.join(texts.split(states)), states)
    assert sum(group.index.numel() for group in texts.groups) <= 2 * tokens


def test_contents_of_padding_change_nothing_and_get_no_gradient() -> None:
    model, ids, mask = build("AutoModel"), random_ids(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[0, 6:] = mask[1, :2] = mask[1, 4] = 0
    found = []
    for content in (0.0, 50.0, torch.nan):
        embedded = model.embed_tokens(ids).detach()
        embedded[mask == 0] = content
        states = model(inputs_embeds=embedded.requires_grad_(), attention_mask=mask).last_hidden_state[mask.bool()]
        states.sin().sum().backward()
        # of a token that is not a number, gradients of its own are not, either
        assert content != content or embedded.grad[mask == 0].count_nonzero() == 0
        found.append(states)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@torch.no_grad()
def test_weights_of_packed_documents_are_theirs() -> None:
    model, lengths = build("AutoModel", projection_type="mean", projected_tokens=16), [5, 1, 9]
    ids = random_ids(1, 15)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    weights = model(ids, position_ids=positions, output_attentions=True).attentions[0]
    for part, own in zip(ids.split(lengths, 1), weights.split(lengths, 2), strict=True):
        alone = model(part, output_attentions=True).attentions[0]
        torch.testing.assert_close(own[..., : alone.shape[3]], alone, atol=TOLERANCE, rtol=TOLERANCE)
        assert own[..., alone.shape[3] :].count_nonzero() == 0


@pytest.mark.filterwarnings("ignore:output_attentions=True")
@pytest.mark.parametrize("fields", [{"mechanism": "nystrom", "num_landmarks": 3}, {"mechanism": "linear"}])
@torch.no_grad()
def test_weights_of_tokens_are_where_these_are(fields: dict[str, Any]) -> None:
    """With padding before a text and within it, and in packed documents."""
    model, ids = build("AutoModel", position_embedding_type="none", **fields), random_ids(1, 7)
    alone = model(ids, output_attentions=True).attentions[0]
    places = torch.tensor([1, 2, 4, 5, 6, 7, 9])
    mask = torch.zeros(1, 10, dtype=torch.long)
    mask[0, places] = 1
    padded = torch.zeros_like(mask)
    padded[0, places] = ids[0]
    found = model(padded, attention_mask=mask, output_attentions=True).attentions[0]
    expected = torch.zeros(1, 4, 10, 10)
    expected[:, :, places[:, None], places] = alone
    torch.testing.assert_close(found * mask[:, None, :, None], expected, atol=TOLERANCE, rtol=TOLERANCE)
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    packed = model(torch.cat((random_ids(1, 5), ids), 1), position_ids=positions, output_attentions=True).attentions[0]
    torch.testing.assert_close(packed[:, :, 5:, 5:], alone, atol=TOLERANCE, rtol=TOLERANCE)
    assert packed[:, :, 5:, :5].count_nonzero() == packed[:, :, :5, 5:].count_nonzero() == 0


def test_what_no_layer_could_compute_is_refused() -> None:
    model, ids = build("AutoModel"), random_ids(1, 6)
    with pytest.raises(hea.InputError, match="other pairs than a padding mask"):
        model(ids, attention_mask=torch.ones(1, 1, 6, 6).tril().bool())
    inputs = {"input_ids": ids, "position_ids": torch.arange(6)[None]}
    with pytest.raises(hea.InputError, match="is compiled or exported"):
        torch.export.export(model, (), inputs, strict=False)
