"""Shaped attention within spans: the identity at the start, the dense formula after, and what spans bring along."""

from pathlib import Path
from typing import Any

import pytest
import torch
from models.adaptive_span.dense_spans import dense_weights
from models_cases import TINY, randomize
from torch import Tensor

import hf_efficient_attn as hea
from hf_efficient_attn.models.inputs import key_masks
from hf_efficient_attn.models.simplified_transformer.modeling_simplified_transformer import (
    SimplifiedTransformerAttention,
)
from hf_efficient_attn.models.spans.attention import SpanInputs
from hf_efficient_attn.models.spans.config import span_window
from hf_efficient_attn.models.spans.memory import SpanCache
from hf_efficient_attn.models.spans.module import span_modules

TOKENS = 70
SPANS = [[0.25, 3.5, 12.75, 40.0], [0.0, 0.0, 1.25, 33.5]]
KINDS: dict[str, dict[str, Any]] = {
    "adaptive": {"span": "adaptive"},
    "dynamic": {"span": "dynamic"},
    "fixed": {"span": "fixed"},
    "frozen": {"span": "adaptive", "frozen_spans": SPANS, "span_penalty": 0.0},
}
PADDING = {
    "none": None,
    "left": torch.tensor([[0] * 9 + [1] * 61, [1] * 70]),
    "right": torch.tensor([[1] * 60 + [0] * 10, [1] * 69 + [0]]),
}


def config(block: str = "sas", **fields: Any) -> hea.SimplifiedTransformerConfig:
    shape = {**TINY, "span_limit": 40, "span_ramp": 4, "position_embedding_type": "none", "max_position_embeddings": 96}
    return hea.SimplifiedTransformerConfig(block=block, **{**shape, **fields})


def set_spans(model: Any) -> Any:
    """Give the spans of a model, as initialised, values: adaptive ones `SPANS`, dynamic ones by random weights."""
    for module in span_modules(model):
        if module.kind == "adaptive":
            module.ratio.data.copy_(torch.tensor(SPANS[module.layer_idx]) / 40)
        elif module.kind == "dynamic":
            module.weight.data.normal_()
    return model


def build(head: str = "ForCausalLM", block: str = "sas", is_random: bool = True, **fields: Any) -> Any:
    torch.manual_seed(0)
    model = getattr(hea, f"SimplifiedTransformer{head}")(config(block, **fields)).eval()
    return set_spans(randomize(model) if is_random else model)


def inputs(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, TOKENS, TINY["hidden_size"], generator=torch.Generator().manual_seed(3), dtype=dtype)


def random_ids(rows: int, tokens: int) -> Tensor:
    return torch.randint(3, TINY["vocab_size"], (rows, tokens), generator=torch.Generator().manual_seed(1))


def run(attention: SimplifiedTransformerAttention, x: Tensor, padding: Tensor | None) -> Tensor:
    """Run the module as its model would."""
    masks = key_masks(attention.config, x, padding, None, None, attention.config.is_causal)
    return attention(x, inputs=SpanInputs(masks.token_mask, masks.query_offset, masks.matrix))[0]


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_identity_at_initialisation_for_every_span(kind: dict[str, Any], is_causal: bool) -> None:
    """W^Q = 0 makes A what the soft mask leaves of equal logits, which is C; β = γ leaves the values."""
    model, x = build("Model", is_random=False, is_causal=is_causal, **kind), inputs()
    for padding in PADDING.values():
        real = torch.ones(2, TOKENS) if padding is None else padding
        actual = run(model.layers[1].self_attn, x, padding)
        torch.testing.assert_close(actual[real.bool()], x[real.bool()], atol=2e-6, rtol=0)


def dense(attention: SimplifiedTransformerAttention, x: Tensor, real: Tensor) -> Tensor:
    """Return α·V + β·A·V − γ·C·V by all pairs; C are the weights at equal logits."""
    query, key = (
        projection(x).unflatten(-1, (4, 8)).transpose(1, 2) for projection in (attention.q_proj, attention.k_proj)
    )
    value = (x if attention.v_proj is None else attention.v_proj(x)).unflatten(-1, (4, 8)).transpose(1, 2)
    spans = attention.spanned.spans(x)
    spans = torch.full((1, 4, 1), 40.0, dtype=x.dtype) if spans is None else spans
    allowed = real[:, None, None] & real[:, None, :, None]
    window = span_window(attention.config)
    softmax, centre = (
        dense_weights(each, key, spans, window, attention.scaling, allowed=allowed)
        for each in (query, torch.zeros_like(query))
    )
    alpha, beta, gamma = (
        gain.gain.view(1, -1, 1, 1)
        for gain in (attention.identity_gain, attention.softmax_gain, attention.centering_gain)
    )
    out = alpha * value + (beta * softmax - gamma * centre) @ value
    out = out.transpose(1, 2).flatten(2)
    return out if attention.o_proj is None else attention.o_proj(out)


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("block", ["v_skipinit", "sas_p"])
@pytest.mark.parametrize("kind", ["adaptive", "dynamic", "fixed"])
def test_equals_the_dense_form_in_float64(kind: str, block: str, is_causal: bool, padding: str) -> None:
    """Outputs and every gradient, that of the spans through A and through C included."""
    attention = build("Model", block, is_causal=is_causal, span=kind).double().layers[0].self_attn
    real = torch.ones(2, TOKENS, dtype=torch.bool) if padding == "none" else PADDING["left"].bool()
    found = []
    for is_dense in (True, False):
        x = inputs(torch.float64).requires_grad_()
        out = dense(attention, x, real) if is_dense else run(attention, x, real.long())
        out = out[real]
        gradients = torch.autograd.grad(out.square().sum(), [x, *attention.parameters()])
        found.append([out, gradients[0][real], *gradients[1:]])
    names = ["output", "input", *(name for name, _ in attention.named_parameters())]
    for name, expected, actual in zip(names, *found, strict=True):
        # the looked-up mask is computed in float64, the gains of heads are summed over all tokens
        scale = max(1.0, float(expected.detach().abs().max()))
        message = f"{name}: {(actual - expected).abs().max()}"
        assert torch.allclose(actual, expected, atol=1e-9 * scale, rtol=1e-9), message


def test_frozen_spans_compute_what_they_computed() -> None:
    model, ids = build(span="adaptive"), random_ids(2, 60)
    with torch.no_grad():
        expected = model(ids).logits
        hea.freeze_spans(model)
        for kernel in ("efficient", "eager"):
            model.set_attn_implementation(kernel)
            torch.testing.assert_close(model(ids).logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(("block", "options"), [("pre_ln", {}), ("sas", {"num_beams": 3})], ids=["greedy", "beams"])
def test_generation_holds_what_spans_can_read(block: str, kind: dict[str, Any], options: dict[str, Any]) -> None:
    """C, too, is computed from these keys, and not from a running mean."""
    model, ids = build(block=block, **kind, position_embedding_type="rope"), random_ids(2, 50)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    options = {**options, "attention_mask": mask, "max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    generated = model.generate(ids, return_dict_in_generate=True, **options)
    assert isinstance(generated.past_key_values, SpanCache)
    held = [layer.keys.shape[2] for layer in generated.past_key_values.layers]
    # without the token itself; the longest spans are 40 and 33.5, with a ramp of 4
    assert held == ([39, 37] if "adaptive" in kind.values() else [39, 39])
    assert torch.equal(generated.sequences, model.generate(ids, use_cache=False, **options))


def test_penalty() -> None:
    """λ · Σ over layers of the mean span, in training only."""
    model, ids = build(span="adaptive", span_penalty=0.01), random_ids(2, 20)
    plain = model(ids, labels=ids).loss
    penalty = 0.01 * sum(sum(tokens) / 4 for tokens in SPANS)
    torch.testing.assert_close(model.train()(ids, labels=ids).loss, plain + penalty)


def test_checkpoints_with_other_spans(tmp_path: Path) -> None:
    build(span="adaptive").save_pretrained(tmp_path)
    for changed in ({"span": "dynamic"}, {"span": None}, {"frozen_spans": SPANS, "span_penalty": 0.0}):
        with pytest.raises(hea.CheckpointError, match="was saved with (span='adaptive'|frozen_spans=None), but"):
            hea.SimplifiedTransformerForCausalLM.from_pretrained(tmp_path, **changed)
    state = build(span="adaptive").state_dict()
    state["model.layers.1.self_attn.spanned.spans.ratio"] = torch.tensor([0.0, 2.0, 0.0, 0.0])
    build(span="adaptive").save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(hea.CheckpointError, match="Layer 1 has span ratios"):
        hea.SimplifiedTransformerForCausalLM.from_pretrained(tmp_path)
