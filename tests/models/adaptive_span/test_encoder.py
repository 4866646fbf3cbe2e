"""Models that see both sides: ramps on either side of a token."""

from typing import Any

import pytest
import torch
from models.adaptive_span.dense_spans import dense_weights
from models.adaptive_span.tiny_models import SPANS, random_ids, set_spans, tiny

import hf_efficient_attn as hea
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.models.spans.attention import SpanInputs
from hf_efficient_attn.models.spans.config import span_window
from hf_efficient_attn.models.spans.module import span_modules

pytestmark = pytest.mark.filterwarnings("ignore:output_attentions")


def encoder(head: str = "ForMaskedLM", **fields: Any) -> Any:
    return tiny(head, preset="modern", is_causal=False, **fields)


@pytest.mark.parametrize("fields", [{}, {"span": "dynamic"}, {"span": "fixed"}])
def test_layer_equals_all_pairs(fields: dict[str, Any]) -> None:
    """One attention layer without positions, padding on the left, against the formula in float64."""
    model = encoder("Model", **fields, position_embedding_type="none").double()
    attention = model.layers[0].self_attn
    hidden, mask = torch.randn(2, 50, 32, dtype=torch.float64), torch.ones(2, 50, dtype=torch.bool)
    mask[0, :9] = False
    query, key, value = (
        projection(hidden).unflatten(-1, (4, 8)).transpose(1, 2)
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    spans = attention.spans(hidden)
    spans = torch.full((1, 4, 1), 40.0).double() if spans is None else spans
    allowed = mask[:, None, None] & mask[:, None, :, None]
    weights = dense_weights(query, key, spans, span_window(model.config), attention.scaling, allowed=allowed)
    expected = attention.o_proj((weights @ value).transpose(1, 2).flatten(2))
    actual, _, _ = attention(hidden, SpanInputs(TokenMask(mask)))
    torch.testing.assert_close(actual[mask], expected[mask], atol=1e-10, rtol=1e-10)
    _, given, _ = attention(hidden, SpanInputs(TokenMask(mask)), output_attentions=True)
    torch.testing.assert_close(given.transpose(1, 2)[mask], weights.transpose(1, 2)[mask], atol=1e-6, rtol=1e-5)


def test_a_token_changes_its_neighbours_on_both_sides_and_no_others() -> None:
    """A layer whose longest span is 5 with a ramp of 4 reads indices 0 to 8: eight tokens to either side."""
    model, ids = encoder("Model", spans=[[0.0, 5.0, 1.25, 2.0]], num_hidden_layers=1), random_ids(1, 60)
    changed = ids.clone()
    changed[0, 30] = (ids[0, 30] + 1) % 50 + 3
    with torch.no_grad():
        before, after = (model(each).last_hidden_state[0] for each in (ids, changed))
    moved = ~before.isclose(after, atol=1e-6).all(-1)
    assert moved.nonzero().flatten().tolist() == list(range(22, 39))


def test_two_overrides_make_an_encoder() -> None:
    """As scripts write them, `--config_overrides is_causal=false,position_embedding_type=rope`."""
    config = hea.AdaptiveSpanConfig(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=1)
    config.update_from_string("is_causal=false,position_embedding_type=rope")
    assert span_window(config).include_self
    assert hea.AdaptiveSpanForMaskedLM(config)(random_ids(1, 9)).logits.isfinite().all()
    assert not span_window(hea.AdaptiveSpanConfig()).include_self
    with pytest.raises(hea.ConfigurationError, match="include_self=False means"):
        hea.AdaptiveSpanConfig(is_causal=False, position_embedding_type="rope", include_self=False)


@pytest.mark.parametrize("head", ["ForMaskedLM", "ForSequenceClassification"])
def test_heads_train_their_spans(head: str) -> None:
    model, ids = encoder(head, span_penalty=0.01).train(), random_ids(2, 30)
    labels = ids if head == "ForMaskedLM" else torch.zeros(2, dtype=torch.long)
    loss = model(ids, labels=labels).loss
    loss.backward()
    torch.testing.assert_close(loss, model.eval()(ids, labels=labels).loss + 0.01 * mean_span(model))
    assert all(module.ratio.grad.all() for module in span_modules(model))


def mean_span(model: Any) -> torch.Tensor:
    """Return the sum over layers of the mean span."""
    return sum(module.head_spans().mean() for module in span_modules(model))


@pytest.mark.parametrize("kernel", ["efficient", "eager", "sdpa"])
def test_frozen(kernel: str) -> None:
    model, ids = encoder(), random_ids(2, 60)
    with torch.no_grad():
        expected = model(ids).logits
        hea.freeze_spans(model).set_attn_implementation(kernel)
        torch.testing.assert_close(model(ids).logits, expected, atol=1e-5, rtol=1e-5)


def test_segments_of_an_encoder_read_what_came_before() -> None:
    """A token of the first segment was computed without the second: only one layer equals one long pass."""
    model, ids = encoder("Model", num_hidden_layers=1, spans=SPANS[:1]), random_ids(1, 40)
    with torch.no_grad():
        expected = model(ids).last_hidden_state
        first = model(ids[:, :20], segment_index=torch.tensor([0])).last_hidden_state
        second = model(ids[:, 20:], segment_index=torch.tensor([1])).last_hidden_state
    torch.testing.assert_close(second, expected[:, 20:], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(first, expected[:, :20], atol=1e-3)


def test_all_of_the_limit_equals_fixed_spans() -> None:
    model, ids = set_spans(encoder("Model"), [[40.0] * 4] * 2), random_ids(2, 90)
    fixed = encoder("Model", span="fixed")
    missing = fixed.load_state_dict(model.state_dict(), strict=False)
    assert missing.missing_keys == []
    with torch.no_grad():
        assert torch.equal(model(ids).last_hidden_state, fixed(ids).last_hidden_state)
