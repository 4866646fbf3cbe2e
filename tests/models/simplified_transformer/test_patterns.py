"""Shaped attention with an attention_pattern: A and C over the keys that the pattern allows or chooses."""

from typing import Any

import pytest
import torch
from models.simplified_transformer.dense_reference import centring_matrix, reads, softmax_matrix
from models_cases import TINY, random_ids, randomize
from torch import Tensor
from transformers import AutoModelForCausalLM

import hf_efficient_attn as hea
from hf_efficient_attn.integration.forward_context import CACHE_ARGUMENT
from hf_efficient_attn.patterns import Band, BlockTopK, Full, GlobalTokens

TOKENS = 21
PATTERNS = {"blocks": BlockTopK(4, 2), "band": Band(3, 0) | GlobalTokens([0])}


def build(pattern: Any, **fields: Any) -> Any:
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


def dense(attention: Any, x: Tensor, pattern: Any) -> Tensor:
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
    attention = randomize(build(pattern)).double().model.layers[1].self_attn
    found = []
    for computes in (attention_of_model, dense):
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
    model = build(pattern)
    x = torch.randn(1, TOKENS, TINY["hidden_size"], generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(attention_of_model(model.model.layers[1].self_attn, x, pattern), x, atol=2e-6, rtol=0)


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
@torch.no_grad()
def test_padding_packing_caches_and_later_tokens_change_nothing(pattern: Any) -> None:
    model = randomize(build(pattern, position_embedding_type="rope"))
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
    plain = randomize(build(None))(ids, labels=ids)
    for spec in ([None, BlockTopK(4, 6)], [Full(), None]):
        model = randomize(build(spec)).train()
        out = model(ids, labels=ids)
        torch.testing.assert_close(out.logits, plain.logits, atol=1e-5, rtol=1e-4)
        out.loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
