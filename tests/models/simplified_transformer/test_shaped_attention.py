"""Shaped attention, dense and cheap, gradients included, with patterns; and its running mean."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models.simplified_transformer.dense_reference import (
    allowed_pairs,
    centring_matrix,
    dense_shaped_attention,
    in_float64,
    reads,
    softmax_matrix,
)
from models_cases import TINY, random_ids, randomize
from torch import Tensor
from transformers import AutoModelForCausalLM

import hf_efficient_attn as hea
from hf_efficient_attn.integration.forward_context import CACHE_ARGUMENT
from hf_efficient_attn.models.simplified_transformer.centering import attention_allowed, build_centering
from hf_efficient_attn.models.simplified_transformer.modeling_simplified_transformer import (
    SimplifiedTransformerAttention,
    SimplifiedTransformerModel,
)
from hf_efficient_attn.patterns import Band, BlockTopK, Full, GlobalTokens

TOKENS = 21
MASKS = {
    "none": {},
    "left": {"padding": torch.tensor([[0] * 5 + [1] * 16, [1] * 21])},
    "right": {"padding": torch.tensor([[1] * 15 + [0] * 6, [1] * 20 + [0]])},
    "packed": {"documents": torch.tensor([[0] * 4 + [1] + [2] * 16, [0] * 20 + [1]])},
}


def build(block: str = "sas", layer_idx: int = 1, **fields: object) -> SimplifiedTransformerAttention:
    """Return one attention module of a tiny model, as initialised."""
    torch.manual_seed(0)
    fields = {"position_embedding_type": "none", **fields}
    return (
        SimplifiedTransformerModel(hea.SimplifiedTransformerConfig(block=block, **{**TINY, **fields}))
        .layers[layer_idx]
        .self_attn.eval()
    )


def run(
    attention: SimplifiedTransformerAttention, x: torch.Tensor, mask: dict[str, torch.Tensor], is_causal: bool
) -> torch.Tensor:
    """Run the module as its model would, under one of `MASKS`."""
    padding, documents = mask.get("padding"), mask.get("documents")
    allowed = attention_allowed(attention.config, x, padding, None, documents)
    centering = build_centering(x.shape[1], 0, padding, documents, is_causal, x.device)
    return attention(x, attention_mask=allowed, centering=centering)[0]


def inputs(dtype: torch.dtype = torch.float32, requires_grad: bool = False) -> torch.Tensor:
    x = torch.randn(2, TOKENS, TINY["hidden_size"], generator=torch.Generator().manual_seed(3), dtype=dtype)
    return x.requires_grad_(requires_grad)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("is_causal", [True, False])
def test_identity_at_initialisation_under_any_mask(mask: dict, is_causal: bool) -> None:
    """Closed form 1: W^Q = 0 makes A = C, and β = γ leaves α·I = I, in layer 1 too since W^V starts as I."""
    x, real = inputs(), mask.get("padding", torch.ones(2, TOKENS)).bool()
    for layer_idx in (0, 1):
        attention = build(layer_idx=layer_idx, is_causal=is_causal)
        torch.testing.assert_close(run(attention, x, mask, is_causal)[real], x[real], atol=2e-6, rtol=0)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("block", ["v_skipinit", "sas"])
def test_cheap_form_equals_dense_form_in_float64(mask: dict, is_causal: bool, block: str) -> None:
    """Closed form 3, outputs and every gradient."""
    attention = in_float64(randomize(build(block, layer_idx=0, is_causal=is_causal)))
    real = mask.get("padding", torch.ones(2, TOKENS)).bool()
    outputs, gradients = [], []
    for dense in (False, True):
        attention.zero_grad()
        x = inputs(torch.float64, requires_grad=True)
        if dense:
            out = dense_shaped_attention(attention, x, allowed_pairs(TOKENS, is_causal, **mask))
        else:
            out = run(attention, x, mask, is_causal)
        out[real].square().sum().backward()
        outputs.append(out[real])
        gradients.append([x.grad[real], *(parameter.grad for parameter in attention.parameters())])
    # the running mean is computed in float32 whatever the input
    torch.testing.assert_close(outputs[0], outputs[1], atol=1e-5, rtol=1e-5)
    for cheap, dense in zip(*gradients, strict=True):
        torch.testing.assert_close(cheap, dense, atol=2e-4, rtol=1e-5)


def test_identity_alone_mixes_no_tokens() -> None:
    """Closed form 12: with β out of the way and γ = 0, changing a token changes that token alone."""
    config = {**TINY, "block": "sas", "softmax_gain": 0.0, "centering_gain": 0.0, "position_embedding_type": "none"}
    torch.manual_seed(0)
    model = hea.SimplifiedTransformerModel(hea.SimplifiedTransformerConfig(**config)).eval()
    ids = torch.arange(3, 13)[None]
    changed = ids.clone()
    changed[0, 4] = 40
    with torch.no_grad():
        before, after = model(ids).last_hidden_state, model(changed).last_hidden_state
    others = torch.arange(10) != 4
    assert torch.equal(before[:, others], after[:, others])
    assert not torch.equal(before[:, 4], after[:, 4])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_identity_at_initialisation_in_low_precision(dtype: torch.dtype) -> None:
    """Rounding A·V and C·V leaves no more than one rounding of a mean of unit normals."""
    attention = build().to(dtype)
    x = inputs(dtype)
    error = (run(attention, x, {}, True).float() - x.float()).abs().max()
    assert error <= 4 * torch.finfo(dtype).eps


def test_attention_weights_are_those_of_the_softmax() -> None:
    """`output_attentions` returns A, whose rows sum to one, not the shaped matrix."""
    config = hea.SimplifiedTransformerConfig(block="sas", **TINY)
    model = randomize(hea.SimplifiedTransformerModel._from_config(config, attn_implementation="eager")).eval()
    weights = model(torch.arange(3, 12)[None], output_attentions=True).attentions
    assert len(weights) == TINY["num_hidden_layers"]
    assert weights[0].shape == (1, TINY["num_attention_heads"], 9, 9)
    torch.testing.assert_close(weights[0].sum(-1), torch.ones(1, TINY["num_attention_heads"], 9))


def test_mask_per_head_is_refused() -> None:
    model = hea.SimplifiedTransformerModel(hea.SimplifiedTransformerConfig(block="sas", **TINY))
    with pytest.raises(hea.InputError, match="one mask per head"):
        model(torch.ones(1, 4, dtype=torch.long), attention_mask=torch.ones(1, 4, 4, 4, dtype=torch.bool))


PATTERNS = {"blocks": BlockTopK(4, 2), "band": Band(3, 0) | GlobalTokens([0])}


def build_with(pattern: Any, **fields: Any) -> Any:
    torch.manual_seed(0)
    options = {"block": "sas", "position_embedding_type": "none", **TINY, **fields}
    config = hea.SimplifiedTransformerConfig(**options, attention_pattern=pattern)
    return hea.SimplifiedTransformerForCausalLM._from_config(config, attn_implementation="efficient").eval()


def test_a_pattern_in_the_config_is_followed_by_default() -> None:
    options = {"block": "sas", "position_embedding_type": "none", **TINY}
    config = hea.SimplifiedTransformerConfig(**options, attention_pattern=BlockTopK(4, 2))
    model = AutoModelForCausalLM.from_config(config)
    assert model.config._attn_implementation == "efficient"
    model(random_ids(1, TOKENS)).logits.sum().backward()
    plain = AutoModelForCausalLM.from_config(hea.SimplifiedTransformerConfig(**options))
    assert plain.config._attn_implementation == "sdpa"


def dense_with(attention: Any, x: Tensor, pattern: Any) -> Tensor:
    """Return α·V + β·A·V - γ·C·V of a float64 module, by matrices of all pairs."""
    split = [
        each(x).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2) for each in (attention.q_proj, attention.k_proj)
    ]
    query, key = split
    allowed = torch.stack([reads(pattern, *each) for each in zip(query.detach(), key.detach(), strict=True)])
    value = x.unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
    softmax = softmax_matrix(query @ key.transpose(2, 3) * attention.scaling, allowed)
    alpha, beta, gamma = (
        each.gain.view(1, -1, 1, 1)
        for each in (attention.identity_gain, attention.softmax_gain, attention.centering_gain)
    )
    out = alpha * value + (beta * softmax - gamma * centring_matrix(allowed)) @ value
    return out.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_dense_form_in_float64(pattern: Any) -> None:
    """Outputs and every gradient."""
    attention = randomize(build_with(pattern)).double().model.layers[1].self_attn
    found = []
    for computes in (attention_of_model, dense_with):
        x = torch.randn(2, TOKENS, TINY["hidden_size"], generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        attention.zero_grad()
        out = computes(attention, x.requires_grad_(), pattern)
        out.square().sum().backward()
        found.append([out, x.grad, *(parameter.grad for parameter in attention.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-9)


def attention_of_model(attention: Any, x: Tensor, pattern: Any) -> Tensor:
    """Return what the module gives in its model, which has a centring term."""
    from hf_efficient_attn.models.simplified_transformer.centering import build_centering

    return attention(x, centering=build_centering(x.shape[1], 0, None, None, True, x.device))[0]


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_blocks_start_as_the_identity(pattern: Any) -> None:
    """W^Q = 0 gives all blocks the same score, and A = C."""
    model = build_with(pattern)
    x = torch.randn(1, TOKENS, TINY["hidden_size"], generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(attention_of_model(model.model.layers[1].self_attn, x, pattern), x, atol=2e-6, rtol=0)


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
@torch.no_grad()
def test_padding_packing_caches_and_later_tokens_change_nothing(pattern: Any) -> None:
    model = randomize(build_with(pattern, position_embedding_type="rope"))
    ids = random_ids(1, TOKENS)
    whole = model(ids).logits
    # later tokens
    torch.testing.assert_close(model(ids[:, :13]).logits, whole[:, :13], atol=1e-5, rtol=1e-4)
    # padding on the left, and a document before
    mask = torch.cat([torch.zeros(1, 5), torch.ones(1, TOKENS)], 1).long()
    padded = model(torch.cat([ids[:, :5], ids], 1), attention_mask=mask).logits[:, 5:]
    places = torch.cat([torch.arange(5), torch.arange(TOKENS)])[None]
    packed = model(torch.cat([ids[:, :5], ids], 1), position_ids=places, use_cache=False).logits[:, 5:]
    for found in (padded, packed):
        torch.testing.assert_close(found, whole, atol=1e-5, rtol=1e-4)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = model.generate(ids, use_cache=False, **options)
    caches: list[dict[str, Any]] = [{}, {"num_beams": 2}, {"cache_implementation": "static", "disable_compile": True}]
    caches.append({CACHE_ARGUMENT: hea.PatternCache(model.config)})
    for cached in caches:
        wanted = model.generate(ids, use_cache=False, num_beams=2, **options) if "num_beams" in cached else expected
        assert torch.equal(model.generate(ids, **cached, **options), wanted)


def test_layers_without_a_pattern_average_all_tokens() -> None:
    """And a pattern that allows all of them changes nothing."""
    ids = random_ids(2, TOKENS)
    plain = randomize(build_with(None))(ids, labels=ids)
    for spec in ([None, BlockTopK(4, 6)], [Full(), None]):
        model = randomize(build_with(spec)).train()
        out = model(ids, labels=ids)
        torch.testing.assert_close(out.logits, plain.logits, atol=1e-5, rtol=1e-4)
        out.loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())


lengths = st.integers(1, 40)
seeds = st.integers(0, 2**16)


def values(rows: int, tokens: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, tokens, 6, generator=torch.Generator().manual_seed(seed))


@given(tokens=lengths, seed=seeds, is_causal=st.booleans(), kind=st.sampled_from(["none", "padding", "documents"]))
@settings(deadline=None, max_examples=150)
def test_mean_over_allowed_keys(tokens: int, seed: int, is_causal: bool, kind: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = values(2, tokens, seed)
    padding = (torch.rand(2, tokens, generator=generator) < 0.7).long() if kind == "padding" else None
    documents = torch.randint(0, 2, (2, tokens), generator=generator).cumsum(1) if kind == "documents" else None
    expected = centring_matrix(allowed_pairs(tokens, is_causal, padding, documents)) @ x.double()
    actual = build_centering(tokens, 0, padding, documents, is_causal, x.device).mean(x)
    torch.testing.assert_close(actual.double().expand_as(x), expected, atol=1e-5, rtol=1e-5)


@given(tokens=st.integers(2, 40), split=st.floats(0, 1), seed=seeds, padded=st.booleans())
@settings(deadline=None)
def test_split_at_a_cache(tokens: int, split: float, seed: int, padded: bool) -> None:
    past = min(int(split * tokens), tokens - 1)
    x = values(2, tokens, seed)
    padding = torch.ones(2, tokens, dtype=torch.long)
    if padded:
        padding[0, : tokens // 2] = 0
    whole = build_centering(tokens, 0, padding, None, True, x.device).mean(x)
    part = build_centering(tokens - past, past, padding, None, True, x.device)
    continued = part.mean(x[:, past:], part.sum_past(x[:, :past]))
    torch.testing.assert_close(continued, whole[:, past:], atol=1e-5, rtol=1e-5)


def test_values_of_padding_never_enter() -> None:
    x = values(1, 6, 0)
    x[0, :2] = torch.nan
    mask = torch.tensor([[0, 0, 1, 1, 1, 1]])
    for is_causal in (True, False):
        mean = build_centering(6, 0, mask, None, is_causal, x.device).mean(x)
        assert torch.isfinite(mean).all()


def test_document_sums_stay_exact_far_from_the_start() -> None:
    """A difference of float32 prefix sums would lose three digits here."""
    x = values(1, 8192, 0) + 5
    documents = torch.arange(8192)[None] // 7
    mean = build_centering(8192, 0, None, documents, True, x.device).mean(x)
    last = x[0, 8190:].double()
    torch.testing.assert_close(mean[0, 8190:].double(), torch.stack([last[0], last.mean(0)]), atol=1e-6, rtol=1e-6)


def test_autocast_does_not_round_the_sums() -> None:
    x = values(1, 2000, 0) + 5
    expected = x.double().cumsum(1) / torch.arange(1, 2001).view(1, -1, 1)
    with torch.autocast("cpu", torch.bfloat16):
        mean = build_centering(2000, 0, None, None, True, x.device).mean(x)
    torch.testing.assert_close(mean.double(), expected, atol=1e-5, rtol=1e-6)
