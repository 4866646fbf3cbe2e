"""The soft mask's closed forms, and the spans of a layer: their kinds, their bounds, their precision."""

import copy
from typing import Any

import pytest
import torch
from models.adaptive_span.tiny_models import SPANS, random_ids, set_spans, tiny

import hf_efficient_attn as hea
from hf_efficient_attn.models.spans.module import Spans, log_soft_mask, span_modules


def config(**fields: Any) -> hea.AdaptiveSpanConfig:
    return hea.AdaptiveSpanConfig(
        **{"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "span_limit": 1024, **fields}
    )


def soft_mask(span: float, limit: int = 1024) -> torch.Tensor:
    """Return m_z of every key within a limit, nearest first, at R = 32."""
    return log_soft_mask(torch.tensor(span, dtype=torch.float64), 0, limit, 32).exp()


def test_span_zero_reads_the_ramp() -> None:
    """The spec's test 1."""
    mask = soft_mask(0.0)
    torch.testing.assert_close(mask[:32], (32 - torch.arange(32).double()) / 32)
    assert int((mask > 0).sum()) == 32
    assert float(mask.sum()) == pytest.approx(16.5)


def test_span_one_hundred_reads_132_keys() -> None:
    """The spec's test 1: the nearest key counts as 0, so that 101 keys have weight 1."""
    mask = soft_mask(100.0)
    assert int((mask > 0).sum()) == 132
    assert torch.equal(mask[:101], torch.ones(101).double())
    assert mask[101] < 1


def test_span_of_the_limit_is_no_mask() -> None:
    """The spec's test 1."""
    assert torch.equal(soft_mask(1024.0), torch.ones(1024).double())


@pytest.mark.parametrize("span", [0.5, 31.5, 100.25, 1000.75])
def test_slope_of_the_mask_is_the_share_of_keys_on_the_ramp(span: float) -> None:
    """The spec's test 5: d Σm / dz = (keys strictly on the ramp) / R."""
    tokens = torch.tensor(span, dtype=torch.float64, requires_grad=True)
    mask = log_soft_mask(tokens, 0, 1024, 32).exp()
    (slope,) = torch.autograd.grad(mask.sum(), tokens)
    on_ramp = int(((mask > 0) & (mask < 1)).sum())
    assert float(slope) == pytest.approx(on_ramp / 32)
    assert on_ramp == min(32, int(1024 - span))


def test_every_span_below_the_limit_has_a_slope() -> None:
    """A span can grow from 0, where it starts; only at the limit no key is on the ramp."""
    tokens = torch.tensor([0.0, 7.0, 1024.0], dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(log_soft_mask(tokens, 0, 1024, 32).exp().sum(), tokens)
    assert slope[0] >= 31 / 32
    assert slope[1] >= 31 / 32
    assert slope.isfinite().all()


def test_gradient_of_a_ratio_is_that_of_finite_differences() -> None:
    """The spec's test 5, through the whole model."""
    model = tiny(spans=[[0.3, 3.6, 12.4, 33.7], [1.2, 0.7, 5.5, 20.1]]).double()
    ids = random_ids(2, 48)

    def loss() -> torch.Tensor:
        # that of the model is in float32, too coarse for differences
        return torch.nn.functional.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    loss().backward()
    step = 1e-5
    for ratio in (module.ratio for module in span_modules(model)):
        for head in range(4):
            moved = []
            for change in (step, -2 * step):
                ratio.data[head] += change
                moved.append(loss().item())
            ratio.data[head] += step
            expected = (moved[0] - moved[1]) / (2 * step)
            assert float(ratio.grad[head]) == pytest.approx(expected, rel=1e-5, abs=1e-9)
            assert abs(expected) > 1e-5


@pytest.mark.parametrize("lr", [1e9, -1e9])
def test_clamp_brings_back_what_a_step_has_moved_out(lr: float) -> None:
    """The spec's test 6."""
    model = tiny().train()
    ids = random_ids(2, 20)
    model(ids, labels=ids).loss.backward()
    for module in span_modules(model):
        with torch.no_grad():
            module.ratio -= lr * module.ratio.grad
        assert ((module.ratio < 0) | (module.ratio > 1)).any()
        module.clamp_()
        assert ((module.ratio >= 0) & (module.ratio <= 1)).all()


@pytest.mark.parametrize("is_training", [True, False])
def test_spans_outside_of_their_bounds_compute_what_the_bounds_do(is_training: bool) -> None:
    """Without a callback that clamps, too: a negative span would read less than the ramp, or nothing."""
    model = tiny().train(is_training)
    ids, outside = random_ids(2, 30), [[-900.0, -3.0, 12.0, 55.0], [80.0, 0.0, 1.25, 7.0]]
    with torch.no_grad():
        actual = set_spans(model, outside)(ids, labels=ids)
        first = span_modules(model)[0]
        assert first.head_spans().tolist() == [0.0, 0.0, 12.0, 40.0]
        # in training the parameter itself comes back, so that an optimizer starts from the bound
        assert (first.ratio.min() < 0, first.ratio.max() > 1) == (not is_training, not is_training)
        expected = set_spans(model, [[0.0, 0.0, 12.0, 40.0], [40.0, 0.0, 1.25, 7.0]])(ids, labels=ids)
    assert torch.equal(actual.logits, expected.logits)
    assert actual.loss == expected.loss


def test_evaluation_changes_no_span() -> None:
    """The spec's test 6."""
    model = set_spans(tiny(), [[50.0] * 4, [-1.0] * 4])
    before = copy.deepcopy(model.state_dict(keep_vars=True))
    with torch.no_grad():
        model(random_ids(2, 30))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name


def test_compiled_training_keeps_within_the_bounds() -> None:
    model = tiny().train()
    ids = random_ids(2, 12)
    inside = model(ids, labels=ids, use_cache=False).loss
    bounded = set_spans(model, [[-900.0, 3.5, 12.0, 55.0], SPANS[1]])
    torch._dynamo.reset()
    loss = torch.compile(bounded, backend="aot_eager")(ids, labels=ids, use_cache=False).loss
    torch.testing.assert_close(loss, inside, atol=1e-6, rtol=1e-6)
    loss.backward()
    gradient = span_modules(model)[0].ratio.grad
    # a gradient that stopped at the bounds would leave the span there for ever
    assert gradient[0] != 0


def test_two_forward_passes_before_one_backward_pass() -> None:
    model = tiny().train()
    ids = random_ids(2, 12)
    losses = [model(ids, labels=ids).loss for _ in range(2)]
    sum(losses).backward()
    assert span_modules(model)[0].ratio.grad.abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("span", ["adaptive", "dynamic"])
def test_spans_are_never_rounded(dtype: torch.dtype, span: str) -> None:
    """The spec's test 11: in bfloat16 a span of 8,192 tokens moves by 32."""
    model = tiny(span=span, span_limit=8192)
    before = [parameter.clone() for module in span_modules(model) for parameter in module.parameters()]
    for cast in (lambda: model.to(dtype), model.half, model.bfloat16, model.float):
        cast()
        parameters = [parameter for module in span_modules(model) for parameter in module.parameters()]
        assert all(parameter.itemsize >= 4 for parameter in parameters)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert all(torch.equal(*pair) for pair in zip(parameters, before, strict=True))


def test_kinds() -> None:
    hidden = torch.randn(2, 5, 32)
    assert Spans(config(span="fixed"), 0)(hidden) is None
    assert Spans(config(span="fixed"), 0).head_spans().tolist() == [1024.0] * 4
    adaptive = Spans(config(span_init=0.25), 0)
    assert adaptive(hidden).flatten().tolist() == [256.0] * 4
    assert adaptive.head_spans().tolist() == [256.0] * 4
    assert not Spans(config(), 0)(hidden).any()
    frozen = Spans(config(span_penalty=0.0, frozen_spans=[[0.0, 1.5, 200.0, 1024.0]]), 0)
    assert frozen(hidden).flatten().tolist() == [0.0, 1.5, 200.0, 1024.0]
    assert list(frozen.parameters()) == []


def test_dynamic_spans_start_as_constants() -> None:
    """The spec's test 12: b = -4 and v = 0 give 18.42 tokens at S = 1,024."""
    spans = Spans(config(span="dynamic"), 0)
    assert spans.head_spans().tolist() == pytest.approx([18.4178] * 4, abs=1e-3)
    tokens = spans(torch.randn(2, 5, 32))
    assert tokens.shape == (2, 4, 5)
    torch.testing.assert_close(tokens, torch.full((2, 4, 5), 18.4178), atol=1e-3, rtol=0)


def test_dynamic_spans_are_chosen_by_each_token() -> None:
    spans, hidden = Spans(config(span="dynamic"), 0), torch.randn(2, 5, 32)
    with torch.no_grad():
        spans.weight.normal_()
        spans.bias.copy_(torch.tensor([-1.0, 0.0, 1.0, 2.0]))
    tokens = spans(hidden)
    expected = 1024 * torch.sigmoid(hidden[1, 3] @ spans.weight[2] + 1.0)
    torch.testing.assert_close(tokens[1, 2, 3], expected)
    spans.note(tokens, None)
    torch.testing.assert_close(spans.head_spans(), tokens.mean((0, 2)))
    real = torch.ones(2, 5, dtype=torch.bool)
    real[0, 2:] = False
    spans.note(tokens, real)
    torch.testing.assert_close(spans.head_spans(), torch.cat((tokens[0, :, :2], tokens[1]), 1).mean(1))


def test_modules_come_in_the_order_of_the_layers() -> None:
    model = tiny()
    assert [module.layer_idx for module in span_modules(model)] == [0, 1]
    assert span_modules(model)[1].head_spans().tolist() == pytest.approx(SPANS[1])
    assert span_modules(torch.nn.Linear(2, 2)) == []


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")
def test_the_copy_that_an_adapter_trains_counts() -> None:
    peft = pytest.importorskip("peft")
    model = tiny(preset="modern", span_penalty=0.0).train()
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["spans"]))
    found = span_modules(adapted)
    assert [module.layer_idx for module in found] == [0, 1]
    assert all(module.ratio.requires_grad for module in found)
    segment = torch.tensor([0, 0])
    adapted(input_ids=random_ids(2, 9), segment_index=segment).logits.sum().backward()
    adapted(input_ids=random_ids(2, 9), segment_index=segment + 1)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")
def test_spans_of_an_adapter_that_is_off_do_not_count() -> None:
    """What is read for all layers at once are the spans that the layers use."""
    peft = pytest.importorskip("peft")
    model, ids = tiny(preset="modern").eval(), random_ids(2, 30)
    expected = model(input_ids=ids).logits
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["spans"])).eval()
    for module in span_modules(adapted):
        module.ratio.data.fill_(1.0)
    assert not torch.allclose(adapted(input_ids=ids).logits, expected, atol=1e-3)
    with adapted.disable_adapter():
        torch.testing.assert_close(adapted(input_ids=ids).logits, expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_step_brings_spans_back() -> None:
    model = tiny(preset="modern", span_penalty=10.0).train()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    optimizer = torch.optim.SGD([module.ratio for module in span_modules(model)], lr=0.01)
    ids = random_ids(2, 9)
    for _ in range(4):
        optimizer.zero_grad()
        compiled(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
    # a step moves a share by 0.01 * 10 * 40 / 4; unclamped, four would have
    assert all(-1.2 < module.ratio.min().item() < -0.8 for module in span_modules(model))
