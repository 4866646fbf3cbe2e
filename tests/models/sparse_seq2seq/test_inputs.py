"""What the two sides take: masks, default decoder inputs, global tokens, and the sentences of refusals."""

from typing import Any

import pytest
import torch
from families import BY_NAME
from seq2seq_cases import TINY, head_inputs, random_ids

import hf_efficient_attn as hea
from hf_efficient_attn.models.encoder_decoder.model import shift_right

LED = BY_NAME["seq2seq-led"]


def test_shifted_labels() -> None:
    labels = torch.tensor([[5, 6, 2, -100], [7, 8, 9, 2]])
    assert shift_right(LED.config(), labels).tolist() == [[1, 5, 6, 2], [1, 7, 8, 9]]
    assert shift_right(LED.config(), labels[:, 3:]).tolist() == [[1], [1]]


def test_labels_equal_decoder_input_ids_made_of_them() -> None:
    model, inputs = LED.model(), head_inputs("AutoModelForSeq2SeqLM")
    made = model.prepare_decoder_input_ids_from_labels(labels=inputs["labels"])
    with torch.no_grad():
        expected = model(**inputs)
        actual = model(**inputs, decoder_input_ids=made)
    assert torch.equal(actual.logits, expected.logits)
    assert expected.past_key_values is None


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        ({"attention_mask": (2, 5)}, r"length of the target: the mask is on the wrong side. Pass it as decoder_"),
        ({"decoder_attention_mask": (2, 9)}, r"length of the source: the mask is on the wrong side. Pass it as att"),
        ({"attention_mask": (2, 8)}, "8 columns, but the source has 9 tokens. Pass one column for each source token"),
        ({"decoder_attention_mask": (2, 4)}, "4 columns, but the target has 5 tokens"),
        ({"global_attention_mask": (2, 5)}, "global_attention_mask"),
        ({"attention_mask": (2, 1, 9, 9)}, r"must be \[batch, source tokens\]"),
    ],
)
def test_masks_on_the_wrong_side(masks: dict[str, tuple[int, ...]], message: str) -> None:
    tensors = {name: torch.ones(shape, dtype=torch.long) for name, shape in masks.items()}
    with pytest.raises(hea.InputError, match=message):
        LED.model()(random_ids(2, 9), decoder_input_ids=random_ids(2, 5), **tensors)


def test_mask_of_another_length_is_no_mask_of_the_encoder() -> None:
    model, ids = LED.model(), random_ids(1, 9)
    for columns in (8, 10):
        with pytest.raises(hea.InputError, match=f"{columns} columns, but the source has 9 tokens"):
            model.get_encoder()(ids, torch.ones(1, columns, dtype=torch.long))
        with pytest.raises(hea.InputError, match=f"{columns} columns, but the source has 9 tokens"):
            model.generate(ids, attention_mask=torch.ones(1, columns, dtype=torch.long), max_new_tokens=2)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"input_ids": random_ids(1, 65), "decoder_input_ids": random_ids(1, 3)}, "max_position_embeddings=64.*conv"),
        ({"input_ids": random_ids(1, 9), "decoder_input_ids": random_ids(1, 65)}, "max_target_position_embeddings=64"),
        ({"input_ids": random_ids(1, 9)}, "Pass decoder_input_ids, or labels"),
        ({"decoder_input_ids": random_ids(1, 9)}, "Pass the source"),
        (
            {
                "input_ids": random_ids(1, 9),
                "decoder_input_ids": random_ids(1, 9),
                "decoder_inputs_embeds": torch.zeros(1, 9, 32),
            },
            "not both",
        ),
    ],
)
def test_inputs_that_are_missing_doubled_or_too_long(inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(hea.InputError, match=message):
        LED.model()(**inputs)


@pytest.mark.parametrize("name", ["decoder_start_token_id", "pad_token_id"])
def test_no_start_or_padding_token(name: str) -> None:
    model = LED.model(**{name: None})
    with pytest.raises(hea.InputError, match=f"config.{name} is None"):
        model(random_ids(1, 5), labels=random_ids(1, 4))


def test_by_default_the_decoder_reads_the_source() -> None:
    model, ids = LED.model("AutoModel"), random_ids(2, 9)
    with torch.no_grad():
        expected = model(ids, decoder_input_ids=shift_right(model.config, ids)).last_hidden_state
        assert torch.equal(model(ids).last_hidden_state, expected)
    with pytest.raises(hea.InputError, match="the decoder has no input"):
        model(inputs_embeds=torch.zeros(1, 4, 32))


def test_rule_equals_mask_and_both_differ_from_none() -> None:
    model, ids = LED.model(), random_ids(2, 20)
    target, first = random_ids(2, 4), torch.zeros_like(ids)
    first[:, 0] = 1
    with torch.no_grad():
        by_rule = model(ids, decoder_input_ids=target).logits
        by_mask = model(ids, decoder_input_ids=target, global_attention_mask=first).logits
        other = model(ids, decoder_input_ids=target, global_attention_mask=first.roll(5, 1)).logits
    torch.testing.assert_close(by_mask, by_rule, atol=1e-5, rtol=1e-5)
    assert (other - by_rule).abs().max() > 1e-3


def test_auto_rule_follows_the_head() -> None:
    ids = random_ids(1, 9)
    ids[0, 3], ids[0, -1] = TINY["sep_token_id"], TINY["eos_token_id"]
    masks = {
        "AutoModelForSequenceClassification": [1, 0, 0, 0, 0, 0, 0, 0, 0],
        "AutoModelForQuestionAnswering": [1, 1, 1, 0, 0, 0, 0, 0, 0],
    }
    for head, mask in masks.items():
        compare_rule_with_mask(head, "auto", ids, mask)


def test_choice_begins_behind_the_token_that_follows_the_separator() -> None:
    ids = random_ids(1, 9)
    ids[0, [3, 4, -1]] = TINY["sep_token_id"]
    compare_rule_with_mask("AutoModel", "choice", ids, [0, 0, 0, 0, 0, 1, 1, 1, 1])


def compare_rule_with_mask(head: str, rule: str, ids: torch.Tensor, mask: list[int]) -> None:
    model = LED.model(head, global_tokens=rule, attention_pattern={"kind": "band", "left": 1, "right": 1})
    with torch.no_grad():
        by_rule = model(ids)
        by_mask = model(ids, global_attention_mask=torch.tensor([mask]))
        by_none = model(ids, global_attention_mask=torch.zeros_like(ids))
    torch.testing.assert_close(by_rule[0], by_mask[0], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(by_rule[0], by_none[0], atol=1e-3)


def test_generate_hands_global_tokens_to_the_encoder_only() -> None:
    model, ids = LED.model(), random_ids(2, 20)
    chosen = torch.zeros_like(ids)
    chosen[:, [3, 11]] = 1
    options = {"max_new_tokens": 8, "do_sample": False, "num_beams": 2}
    with torch.no_grad():
        source = model.get_encoder()(ids, global_attention_mask=chosen)
    by_mask = model.generate(ids, global_attention_mask=chosen, **options)
    assert torch.equal(by_mask, model.generate(encoder_outputs=source, **options))


def test_classification_reads_the_last_end_token() -> None:
    model = LED.model("AutoModelForSequenceClassification")
    ids = random_ids(1, 9)
    with pytest.raises(hea.InputError, match="eos_token_id=2"):
        model(ids)
    with pytest.raises(hea.InputError, match="decoder gets 4 tokens and the source has 9"):
        model(ids, decoder_input_ids=ids[:, :4])
    ids[0, [3, 6]] = TINY["eos_token_id"]
    with torch.no_grad():
        hidden = model.model(ids).last_hidden_state[:, 6]
        assert torch.equal(model(ids).logits, model.classifier(hidden))


def test_adapters_on_the_embedding_reach_both_stacks() -> None:
    """The stacks look the embedding up in the model: whatever replaces it counts."""
    model, ids = LED.model(), random_ids(1, 6)
    replaced = torch.nn.Sequential(model.get_input_embeddings(), torch.nn.Tanh())
    with torch.no_grad():
        embedded = replaced(ids)
        expected = model(inputs_embeds=embedded, decoder_inputs_embeds=embedded).logits
        model.set_input_embeddings(replaced)
        torch.testing.assert_close(model(ids, decoder_input_ids=ids).logits, expected)
