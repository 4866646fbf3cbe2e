"""Heads that read global tokens, and the loss that tells masked sentences apart."""

import pytest
import torch
from models.etc_transformer.dense_etc import Text, dense_etc
from models.etc_transformer.tiny_models import build, random_ids

import hf_efficient_attn as hea


def sentences_of(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return two rows of eight tokens in three sentences; of one the first is masked, of the other the last."""
    links = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2], [0, 1, 1, 1, 1, 1, 2, 2]])
    chosen = torch.tensor([[1, 0, 0], [0, 0, 1]])
    masked = ids.masked_fill(chosen.gather(1, links).bool(), 2)
    given = {"input_ids": masked, "cpc_input_ids": ids, "cpc_mask": chosen, "long_to_global": links}
    return {**given, "global_input_ids": torch.tensor([[3, 1, 1], [1, 1, 4]])}


def test_masked_sentences_are_told_apart_by_what_they_are_alone() -> None:
    model = build(num_hidden_layers=1, cpc_loss_weight=0.25).double()
    ids = random_ids(2, 8)
    inputs = sentences_of(ids)
    found = model(**inputs)
    rows, numbers = torch.nonzero(inputs["cpc_mask"], as_tuple=True)
    own = found.global_hidden_state[rows, numbers]
    parts = ((ids[0, :3], 3), (ids[1, 6:], 4))
    alone = [dense_etc(model, Text(part.tolist(), [token], [{0}] * len(part)))[1][0] for part, token in parts]
    scores = own @ torch.stack(alone).T / 32**0.5
    expected = 0.25 * torch.nn.functional.cross_entropy(scores, torch.arange(2))
    torch.testing.assert_close(found.auxiliary_loss, expected)


def test_padding_is_part_of_no_sentence() -> None:
    """Even if it has its link, as the rest of a row that is all of one sentence."""
    model, ids = build(cpc_loss_weight=0.25), random_ids(2, 8)
    mask = torch.ones_like(ids)
    mask[:, 6:] = 0
    losses = []
    for word in (5, 6):
        inputs = sentences_of(ids.masked_fill(mask == 0, word))
        losses.append(model(**inputs, attention_mask=mask).auxiliary_loss)
    assert torch.equal(*losses)


def test_the_loss_of_masked_tokens_has_it_beside() -> None:
    model = build("AutoModelForMaskedLM", cpc_loss_weight=0.25)
    inputs = sentences_of(random_ids(2, 8))
    labels = inputs["cpc_input_ids"].where(inputs["input_ids"] == 2, -100)
    found = model(**inputs, labels=labels)
    del inputs["cpc_mask"], inputs["cpc_input_ids"]
    torch.testing.assert_close(found.loss, model(**inputs, labels=labels).loss + found.auxiliary_loss)
    found.loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_no_masked_sentence_is_no_loss_and_wrong_shapes_are_refused() -> None:
    model, inputs = build(cpc_loss_weight=0.25), sentences_of(random_ids(2, 8))
    assert model(**{**inputs, "cpc_mask": torch.zeros(2, 3)}).auxiliary_loss == 0
    for name, wrong in (("cpc_mask", torch.ones(2, 4)), ("cpc_input_ids", None)):
        with pytest.raises(hea.InputError, match=f"{name} has shape"):
            model(**{**inputs, name: wrong})
    for name in ("output_hidden_states", "output_attentions", "output_global_attentions"):
        with pytest.raises(hea.InputError, match=f"{name}=True with cpc_mask"):
            model(**inputs, **{name: True})


@pytest.mark.parametrize("how", ["mean", "first"])
def test_texts_are_classified_by_their_global_tokens(how: str) -> None:
    model, ids = build("AutoModelForSequenceClassification", classifier_pooling=how), random_ids(2, 9)
    mask = torch.ones_like(ids)
    mask[0, 4:] = 0
    with torch.no_grad():
        states = model.model(ids, mask)
        pooled = states.global_hidden_state[:, 0] if how == "first" else states.global_hidden_state.mean(1)
        if how == "mean":
            # four real tokens are one chunk
            pooled[0] = states.global_hidden_state[0, 0]
        torch.testing.assert_close(model(ids, mask).logits, model.classifier(pooled))


def test_long_answers_are_global_tokens() -> None:
    model, ids = build("AutoModelForQuestionAnswering", long_answers=True), random_ids(2, 9)
    mask = torch.ones_like(ids)
    mask[0, 4:] = 0
    spans = {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 4])}
    right = torch.tensor([0, 2])
    both = model(ids, mask, **spans, long_answer_positions=right)
    assert both.long_answer_logits.shape == (2, 3)
    assert (both.long_answer_logits[0, 1:] == torch.finfo(torch.float32).min).all()
    alone = torch.nn.functional.cross_entropy(both.long_answer_logits, right)
    torch.testing.assert_close(both.loss, (model(ids, mask, **spans).loss + alone) / 2)
    torch.testing.assert_close(model(ids, mask, long_answer_positions=right).loss, alone)
    both.loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    with pytest.raises(hea.InputError, match="long_answers=False"):
        build("AutoModelForQuestionAnswering")(ids, long_answer_positions=right)


def test_losses_of_one_kind_reach_every_parameter() -> None:
    """DDP waits for the gradient of each."""
    model, ids = build("AutoModelForQuestionAnswering", long_answers=True), random_ids(2, 9)
    spans = {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 4])}
    for given in (spans, {"long_answer_positions": torch.tensor([0, 2])}):
        model.zero_grad()
        model(ids, **given).loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("right", "message"),
    [
        ([0, 2, 1], r"has shape \[3\]; it must be \[2\]"),
        ([2, 0], "has 2 in row 0, which has 1 global tokens; give the index of one"),
    ],
)
def test_a_long_answer_is_a_global_token(right: list[int], message: str) -> None:
    model, ids = build("AutoModelForQuestionAnswering", long_answers=True), random_ids(2, 9)
    mask = torch.ones_like(ids)
    mask[0, 4:] = 0
    with pytest.raises(hea.InputError, match=f"long_answer_positions {message}"):
        model(ids, mask, long_answer_positions=torch.tensor(right))


def test_rows_of_several_texts_have_no_class() -> None:
    """One text may say its positions."""
    model, ids = build("AutoModelForSequenceClassification"), random_ids(2, 9)
    one, two = torch.arange(9).expand(2, -1), torch.tensor([[*range(9)], [*range(4), *range(5)]])
    torch.testing.assert_close(model(ids, position_ids=one).logits, model(ids).logits)
    with pytest.raises(hea.InputError, match=r"A row holds 2 packed documents, .*Pass one text in each row"):
        model(ids, position_ids=two)
    choices = build("AutoModelForMultipleChoice")
    with pytest.raises(hea.InputError, match=r"A row holds 2 packed documents"):
        choices(ids.unsqueeze(0), position_ids=two.unsqueeze(0))
