"""The spans of a layer: the soft mask in closed forms, bounds, precision, files, freezing and other limits."""

import copy
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from models.adaptive_span.tiny_models import SPANS, random_ids, set_spans, tiny
from models_cases import TINY

import hf_efficient_attn as hea
from hf_efficient_attn.models.spans.module import Spans, log_soft_mask, span_modules
from hf_efficient_attn.models.spans.training import average_span, max_span


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


def test_compiled_training_keeps_within_the_bounds() -> None:
    model = tiny(num_hidden_layers=1, spans=SPANS[:1]).train()
    ids = random_ids(2, 12)
    inside = model(ids, labels=ids, use_cache=False).loss
    bounded = set_spans(model, [[-900.0, 3.5, 12.0, 55.0]])
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


@pytest.mark.parametrize("span", ["adaptive", "dynamic"])
def test_spans_are_never_rounded(span: str) -> None:
    """The spec's test 11: in bfloat16 a span of 8,192 tokens moves by 32."""
    model = tiny(span=span, span_limit=8192)
    before = [parameter.clone() for module in span_modules(model) for parameter in module.parameters()]
    to_bfloat16 = partial(model.to, torch.bfloat16)
    for cast in (model.double, to_bfloat16, model.half, model.bfloat16, model.float):
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


def span_parameters(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter for name, parameter in model.named_parameters() if ".spans." in name}


def test_training_in_bfloat16_moves_spans_by_less_than_a_token() -> None:
    model = tiny(span_limit=8192, spans=[[4096.0] * 4] * 2).to(torch.bfloat16).train()
    ids = random_ids(2, 20)
    model(ids, labels=ids).loss.backward()
    torch.optim.SGD(model.parameters(), lr=1e-7 / float(span_modules(model)[0].ratio.grad.abs().max())).step()
    moved = 4096.0 - span_modules(model)[0].head_spans()
    assert 0 < float(moved.abs().max()) < 1


def test_config_of_a_frozen_model(tmp_path: Path) -> None:
    model = hea.freeze_spans(tiny(spans=[[0.1, 3.3, 12.7, 40.0], [1 / 3, 0.0, 1.25, 7.0]]))
    model.save_pretrained(tmp_path)
    again = hea.AdaptiveSpanForCausalLM.from_pretrained(tmp_path)
    assert again.config.frozen_spans == model.config.frozen_spans
    assert again.config.span_penalty == 0.0
    assert span_parameters(again) == {}
    ids = random_ids(2, 50)
    assert torch.equal(again.eval()(ids).logits, model(ids).logits)


# one rounding of S · share away from the whole numbers at which the number of keys changes
ODD = [[0.1, 3.3, 12.7, 40.0], [0.6, 1.4, 1.25, 7.9]]


def logits(model: Any, ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, **inputs).logits


@pytest.mark.parametrize(
    ("preset", "kernel"), [("modern", "efficient"), ("enwik8_demo", "eager"), ("enwik8_demo", "sdpa")]
)
def test_frozen_spans_compute_what_they_computed(preset: str, kernel: str) -> None:
    """Whole texts; that padding, packing and caches change nothing, the contract says of both kinds."""
    compare_frozen(tiny(preset=preset, spans=ODD), kernel)


# flex is compiled in the contracts
@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:flex_attention called without:UserWarning")
def test_frozen_spans_compute_the_same_under_flex() -> None:
    model = tiny(preset="modern", num_hidden_layers=1, spans=[[0.1, 3.3, 12.7, 20.0]])
    with torch.compiler.set_stance("force_eager"):
        compare_frozen(model, "flex_attention")


def compare_frozen(model: Any, kernel: str) -> None:
    """Compare the logits before and after a model is frozen and moved to a kernel."""
    ids = random_ids(2, 60)
    expected = logits(model, ids)
    assert hea.freeze_spans(model) is model
    model.set_attn_implementation(kernel)
    assert model.config._attn_implementation == kernel
    torch.testing.assert_close(logits(model, ids), expected, atol=1e-5, rtol=1e-5)


def test_spans_that_left_their_bounds_are_frozen_within() -> None:
    model = tiny(spans=[[-3.0, 3.5, 12.0, 55.0], SPANS[1]])
    expected = logits(model, random_ids(2, 50))
    hea.freeze_spans(model)
    assert model.config.frozen_spans[0] == [0.0, 3.5, 12.0, 40.0]
    torch.testing.assert_close(logits(model, random_ids(2, 50)), expected)


def test_models_without_numbers_to_keep() -> None:
    with pytest.raises(hea.InputError, match="span='dynamic'"):
        hea.freeze_spans(tiny(span="dynamic"))
    with pytest.raises(hea.InputError, match="span='fixed'"):
        hea.freeze_spans(tiny(span="fixed"))
    plain = hea.SparseTransformerForCausalLM(hea.SparseTransformerConfig.sliding(**TINY, is_causal=True))
    for function in (hea.freeze_spans, lambda model: hea.set_span_limit(model, 8)):
        with pytest.raises(hea.InputError, match="SparseTransformerForCausalLM"):
            function(plain)


@pytest.mark.parametrize("preset", ["enwik8_demo", "modern"])
@pytest.mark.parametrize("limit", [17, 300])
def test_another_limit_computes_the_same_where_spans_fit(preset: str, limit: int) -> None:
    """Spans of at most 12 tokens, with their ramp of 4, fit into 17."""
    model, ids = tiny(preset=preset, spans=[[0.1, 3.5, 12.0, 11.9], SPANS[1]]), random_ids(2, 50)
    expected, before = logits(model, ids), [module.head_spans() for module in span_modules(model)]
    assert hea.set_span_limit(model, limit) is model
    torch.testing.assert_close(logits(model, ids), expected, atol=2e-5, rtol=1e-5)
    for module, spans in zip(span_modules(model), before, strict=True):
        torch.testing.assert_close(module.head_spans(), spans)
        assert module.limit == model.config.span_limit == limit
    if preset == "enwik8_demo":
        assert model.model.distances.weight.shape == (limit, 8)
    loss = model.train()(ids, labels=ids).loss
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_spans_beyond_a_new_limit_become_the_limit() -> None:
    model = hea.set_span_limit(tiny(), 10)
    assert [module.head_spans().tolist() for module in span_modules(model)] == [
        pytest.approx([0.0, 3.5, 10.0, 10.0]),
        pytest.approx([0.0, 0.0, 1.25, 7.0]),
    ]


def test_new_distances_start_as_the_table_does() -> None:
    model = tiny()
    old = model.model.distances.weight.clone()
    torch.manual_seed(0)
    hea.set_span_limit(model, 2000)
    table = model.model.distances.weight
    assert torch.equal(table[:40], old)
    assert table[40:].std().item() == pytest.approx(1.0, abs=0.05)


def test_shares_of_fixed_and_dynamic_spans_stay() -> None:
    assert span_modules(hea.set_span_limit(tiny(span="fixed"), 8))[0].head_spans().tolist() == [8.0] * 4
    model = tiny(span="dynamic")
    before = span_modules(model)[0].head_spans()
    torch.testing.assert_close(span_modules(hea.set_span_limit(model, 80))[0].head_spans(), 2 * before)


def test_limits_that_cannot_be() -> None:
    model, ids = hea.freeze_spans(tiny()), random_ids(1, 50)
    expected = logits(model, ids)
    for limit, message in (
        (0, "span_limit=0 must be at least 1"),
        (11, r"frozen_spans holds \[12\.0.*\]; spans are 0 to"),
    ):
        with pytest.raises(hea.ConfigurationError, match=message):
            hea.set_span_limit(model, limit)
        assert model.config.span_limit == 40
        assert torch.equal(logits(model, ids), expected)


SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
IDS = torch.arange(60).view(2, 30) % 32


def build(span: str = "adaptive", **fields: Any) -> hea.AdaptiveSpanForCausalLM:
    torch.manual_seed(0)
    config = hea.AdaptiveSpanConfig(**{**SIZES, "span": span, "span_limit": 24, "span_ramp": 4, **fields})
    model = hea.AdaptiveSpanForCausalLM(config).eval()
    for spans in span_modules(model):
        if span == "adaptive":
            spans.ratio.data.copy_(torch.tensor([0.0, 0.1, 0.4, 0.9]))
    return model


@pytest.mark.parametrize("span", ["fixed", "adaptive", "dynamic"])
def test_models_can_be_pickled(span: str) -> None:
    model = build(span)
    again = pickle.loads(pickle.dumps(model))
    assert torch.equal(again(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize(
    "change", [hea.freeze_spans, lambda model: hea.set_span_limit(model, 48), average_span, max_span]
)
def test_offloaded_spans_are_refused(change: Any) -> None:
    model = build()
    expected = model(IDS).logits
    cpu_offload(model)
    with pytest.raises(hea.InputError, match=r"layers \[0, 1\] are offloaded"):
        change(model)
    torch.testing.assert_close(model(IDS).logits, expected)
    assert model.config.frozen_spans is None
    assert model.config.span_limit == 24


def test_a_refused_freeze_changes_nothing() -> None:
    model = build()
    before = copy.deepcopy(model.config)
    span_modules(model)[1].ratio.data[2] = torch.nan
    with pytest.raises(hea.InputError, match=r"spans of layer 1 are \[.*nan"):
        hea.freeze_spans(model)
    assert model.config.to_dict() == before.to_dict()
    assert [spans.kind for spans in span_modules(model)] == ["adaptive", "adaptive"]


@pytest.mark.parametrize(
    "changes",
    [{"span": "fixed"}, {"span": "dynamic"}, {"span_ramp": 8}, {"frozen_spans": [[1.0] * 4] * 2, "span_penalty": 0.0}],
)
def test_learned_spans_are_not_loaded_as_others(changes: dict[str, Any], tmp_path: Path) -> None:
    model = build()
    model.save_pretrained(tmp_path)
    name = next(iter(changes))
    with pytest.raises(hea.CheckpointError, match=f"saved with {name}=.*{name}=.* was requested"):
        hea.AdaptiveSpanForCausalLM.from_pretrained(tmp_path, **changes)


def test_fixed_spans_may_become_adaptive(tmp_path: Path) -> None:
    build("fixed").save_pretrained(tmp_path)
    assert span_modules(hea.AdaptiveSpanForCausalLM.from_pretrained(tmp_path, span="adaptive"))[0].kind == "adaptive"


def test_longest_dynamic_span_is_that_of_a_token() -> None:
    model = build("dynamic")
    for spans in span_modules(model):
        torch.nn.init.normal_(spans.weight, std=2.0)
    model(IDS)
    spans = span_modules(model)
    assert max_span(model) == min(24, -(-max(float(each.seen_longest.max()) for each in spans) // 1) + 4)
    assert max_span(model) > max(float(each.head_spans().max()) for each in spans) + 4


@pytest.mark.filterwarnings("ignore:output_attentions=True")
@pytest.mark.parametrize("num_heads", [1, 4])
def test_a_matrix_per_head_reaches_its_heads(num_heads: int) -> None:
    model = build()
    generator = torch.Generator().manual_seed(1)
    mask = torch.rand(1, num_heads, 30, 30, generator=generator) < 0.7
    mask = (mask | torch.eye(30, dtype=torch.bool)).tril()
    expected = model(IDS, attention_mask=mask).logits
    with_weights = model(IDS, attention_mask=mask, output_attentions=True)
    torch.testing.assert_close(with_weights.logits, expected, atol=1e-5, rtol=1e-4)
    assert not any(weights.masked_select(~mask).any() for weights in with_weights.attentions)


def test_a_matrix_for_other_heads_is_refused() -> None:
    with pytest.raises(hea.InputError, match="attention_mask"):
        build()(IDS, attention_mask=torch.ones(1, 2, 30, 30, dtype=torch.bool))


def test_a_span_within_the_inner_keys_is_refused() -> None:
    q, k, v = (torch.randn(1, 2, 40, 8) for _ in range(3))
    term = hea.Term(torch.full((1, 2, 1, 1), 5.0), hea.SoftSpan(8, num_inner=30))
    with pytest.raises(hea.InputError, match="30 keys are within every span .* 5 tokens, which contains 6"):
        hea.attention(q, k, v, hea.patterns.Causal(), terms=[term])
