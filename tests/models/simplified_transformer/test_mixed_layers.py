"""Layers of softmax, of linear attention and with a prior in one model: each equals its dense form, whatever is around.

Causal models go on from a cache of keys and sums, and start as the identity in every layer.
"""

from typing import Any

import pytest
import torch
import transformers
from compressed_cases import compressed
from models.simplified_transformer.dense_blocks import (
    TOKENS,
    check_layers,
    dense_linear,
    dense_softmax,
    masks_with,
    projected,
)
from models.simplified_transformer.dense_reference import reads
from models_cases import TOLERANCE, random_ids
from simplified_cases import simplified
from torch import Tensor

import hf_efficient_attn as hea
from hf_efficient_attn.attention.cache_argument import CACHE_ARGUMENT
from hf_efficient_attn.patterns import Band, BlockTopK, GlobalTokens

PADDED = torch.tensor([[0] * 4 + [1] * 9, [1] * 9 + [0] * 4])
MASKS = masks_with(PADDED)
ORDERS: list[list[str | None]] = [["linear", None, "prior"], [None, "prior", "linear"], ["prior", None, None]]


def build(mechanism: list[str | None], auto_class: str | None = None, **fields: Any) -> Any:
    """Return a tiny model in eval mode whose every parameter is random."""
    return mixed(mechanism, **fields).model(auto_class)


def mixed(mechanism: list[str | None], **fields: Any) -> Any:
    own: dict[str, Any] = {"num_hidden_layers": len(mechanism)}
    own |= {"chunk_tokens": 4} if "linear" in mechanism else {}
    own |= {"prior_width_tokens": 3} if "prior" in mechanism else {}
    return simplified("tiny", **{"mechanism": mechanism, **own, **fields})


def dense(attention: Any, states: Tensor, allowed: Tensor) -> Tensor:
    return (dense_softmax if attention.linear is None else dense_linear)(attention, states, allowed)


def learned(attention: Any) -> list[Tensor]:
    own = [] if attention.prior is None else [attention.prior.prior_weight, attention.prior.prior_bias]
    return [attention.q_proj.weight, attention.k_proj.weight, attention.centering_gain.gain, *own]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("mechanism", ORDERS, ids=str)
def test_outputs_and_gradients_are_those_of_the_dense_forms(
    mechanism: list[str | None], is_causal: bool, mask: str
) -> None:
    """Of all layers of a model, but for padding; means are in float32."""
    model = build(mechanism, "AutoModel", block="sas", is_causal=is_causal).double()
    check_layers(model, MASKS[mask], dense, learned, TOLERANCE, (10 * TOLERANCE, TOLERANCE))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("is_causal", [False, True])
@torch.no_grad()
def test_every_layer_starts_as_the_identity(is_causal: bool, mask: str) -> None:
    torch.manual_seed(0)
    config = mixed(["linear", "linear", None, "prior"], block="sas_p", is_causal=is_causal).config()
    model, seen = hea.SimplifiedTransformerModel(config).eval(), []
    # the paper keeps W^V of the first layer
    for layer in model.layers[1:]:
        layer.self_attn.register_forward_hook(lambda module, given, out: seen.append((given[0], out[0])))
    starts = [(layer.self_attn.q_proj.weight.any(), layer.self_attn.k_proj.weight.any()) for layer in model.layers]
    assert starts == [(True, False)] * 2 + [(False, True)] * 2
    model(random_ids(2, TOKENS), **MASKS[mask])
    real = MASKS[mask].get("attention_mask", torch.ones(2, TOKENS)).bool()
    assert len(seen) == 3
    for given, out in seen:
        torch.testing.assert_close(given[real], out[real], atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("implementation", ["efficient", "sdpa", "eager"])
@pytest.mark.parametrize("positions", ["rope", "alibi"])
@torch.no_grad()
def test_softmax_layers_are_those_of_models_without_a_mechanism(positions: str, implementation: str) -> None:
    """The lowest layer reads the same, so that it must give the same; linear layers have no such positions."""
    found = []
    for mechanism in ([None, "linear"], [None, None]):
        model = build(mechanism, "AutoModel", block="sas", position_embedding_type=positions)
        model.set_attn_implementation(implementation)
        outputs: list[Tensor] = []
        model.layers[0].self_attn.register_forward_hook(lambda module, given, out, kept=outputs: kept.append(out[0]))
        for inputs in MASKS.values():
            model(random_ids(2, TOKENS), **inputs)
        found.append([outputs[0], outputs[1][PADDED.bool()], outputs[2]])
    torch.testing.assert_close(*found, atol=TOLERANCE, rtol=TOLERANCE)


@torch.no_grad()
def test_matrices_are_read_where_no_layer_adds_up_keys() -> None:
    """By softmax with a prior and without, the mean included; sums take a matrix that leaves out padding alone."""
    ids = random_ids(2, TOKENS)
    matrix = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()[None, None].repeat(2, 1, 1, 1)
    for mechanism in ORDERS[::2]:
        model = build(mechanism, block="sas")
        padded = matrix & PADDED.bool()[:, None, None]
        places = (PADDED.cumsum(1) - 1).clamp(min=0)
        expected = model(ids, attention_mask=PADDED, position_ids=places).logits[PADDED.bool()]
        found = model(ids, attention_mask=padded, position_ids=places).logits[PADDED.bool()]
        torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)
    other = matrix.clone()
    other[:, :, 7:, 2] = False
    with pytest.raises(hea.InputError, match="closes or opens other pairs"):
        build(ORDERS[0])(ids, attention_mask=other)
    model = build(ORDERS[2], "AutoModel", block="sas").double()
    attention, seen = model.layers[1].self_attn, []
    attention.register_forward_hook(lambda module, given, out: seen.extend((given[0], out[0])))
    model(ids, attention_mask=other)
    torch.testing.assert_close(seen[1], dense(attention, seen[0], other[:, 0]), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("mechanism", ORDERS, ids=str)
@pytest.mark.parametrize("block", ["sas_p", "pre_ln"])
@torch.no_grad()
def test_caches_go_on(mechanism: list[str | None], block: str) -> None:
    """From keys and a running mean in softmax layers, keys alone with a prior, sums alone in linear attention."""
    model, ids = build(mechanism, block=block), random_ids(2, 20)
    full = model(ids, use_cache=False).logits
    for cache in (None, transformers.StaticCache(config=model.config, max_cache_len=24)):
        parts = []
        for part in ids.split([6, 1, 13], 1):
            out = model(part, **{CACHE_ARGUMENT: cache}, use_cache=True)
            cache, parts = out.past_key_values, [*parts, out.logits]
        torch.testing.assert_close(torch.cat(parts, 1), full, atol=TOLERANCE, rtol=TOLERANCE)
        sizes = [each.keys.numel() + each.values.numel() for each in cache.layers]
        tokens = 24 if isinstance(cache, transformers.StaticCache) else 20
        assert sizes == [2 * model.config.cached_numbers(layer, tokens) for layer in range(len(mechanism))]
        cache.reset()
        again = model(ids, **{CACHE_ARGUMENT: cache}).logits
        torch.testing.assert_close(again, full, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize(
    "case",
    [mixed([None, "linear"]), compressed("cropped", mechanism=["pattern", "linear"], is_causal=True)],
    ids=lambda case: case.name,
)
@torch.no_grad()
def test_caches_of_which_a_part_was_cropped_are_refused(case: Any) -> None:
    """Layers of softmax have forgotten tokens before a linear layer refuses to."""
    model, ids = case.model(), random_ids(2, TOKENS)
    cache = model(ids, use_cache=True).past_key_values
    with pytest.raises(hea.UnsupportedBackendError, match="cannot be cropped"):
        cache.crop(-3)
    with pytest.raises(hea.InputError, match="Layer 0 of this cache holds 10 tokens, and layer 1 sums over 13"):
        model(ids[:, -3:], **{CACHE_ARGUMENT: cache})


PATTERNS: dict[str, tuple[list[str | None], Any, list[Any]]] = {
    "all": (["linear", None, "prior"], Band(3, 2), [None, Band(3, 2), Band(3, 2)]),
    "listed": ([None, "prior", None], [Band(3, 2), Band(2, 4), None], [Band(3, 2), Band(2, 4), None]),
    "prior": (["prior", "prior"], [Band(3, 2), None], [Band(3, 2), None]),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("how", PATTERNS)
def test_layers_of_softmax_follow_patterns(how: str, is_causal: bool, mask: str) -> None:
    """Of which C is, too; without a pattern, and by sums, all is read."""
    mechanism, spec, patterns = PATTERNS[how]
    model = build(mechanism, "AutoModel", block="sas", is_causal=is_causal, attention_pattern=spec).double()

    def followed(attention: Any, states: Tensor, allowed: Tensor) -> Tensor:
        pattern = patterns[attention.layer_idx]
        if pattern is not None:
            query, key, _ = projected(attention, states)
            allowed = allowed & reads(pattern, query[0], key[0], is_causal)[0]
        return dense(attention, states, allowed)

    check_layers(model, MASKS[mask], followed, learned, TOLERANCE, (10 * TOLERANCE, TOLERANCE))


def test_chosen_blocks_are_weighed_by_a_prior() -> None:
    """Of a layer whose queries choose, A and C are over what they have chosen."""
    model = build(["prior", None, "linear"], "AutoModel", block="sas", attention_pattern=BlockTopK(4, 2)).double()

    def followed(attention: Any, states: Tensor, allowed: Tensor) -> Tensor:
        if attention.linear is None:
            query, key, _ = (each.detach() for each in projected(attention, states))
            allowed = torch.stack([reads(BlockTopK(4, 2), *each) for each in zip(query, key, strict=True)])
        return dense(attention, states, allowed)

    check_layers(model, {}, followed, learned, TOLERANCE, (10 * TOLERANCE, TOLERANCE))


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:This PatternCache bounds")
def test_generation_follows_patterns() -> None:
    pattern = Band(3, 0) | GlobalTokens([0])
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    ids, padded = random_ids(2, TOKENS), torch.tensor([[0] * 4 + [1] * 9, [1] * TOKENS])
    for mechanism in (["linear", None, "prior"], [None, "prior", None]):
        spec = [None, pattern, None] if mechanism[0] else [pattern, pattern, None]
        model = build(mechanism, attention_pattern=spec)
        wanted = model.generate(ids, attention_mask=padded, use_cache=False, **options)
        caches: list[dict[str, Any]] = [{}, {"cache_implementation": "static"}]
        if mechanism[0] is None:
            caches.append({CACHE_ARGUMENT: hea.PatternCache(model.config)})
        for cached in caches:
            assert torch.equal(model.generate(ids, attention_mask=padded, **cached, **options), wanted)
    model = build(["linear", None], attention_pattern=pattern)
    with pytest.raises(hea.UnsupportedBackendError, match="Layer 0 keeps sums"):
        model(ids, **{CACHE_ARGUMENT: hea.PatternCache(model.config)})


def test_models_are_sparsified() -> None:
    """As those that are built with a pattern, and back."""
    ids = random_ids(2, TOKENS)
    for mechanism in (["linear", None, "prior"], ["prior", "prior"]):
        model, built = build(mechanism), build(mechanism, attention_pattern=Band(3, 0))
        before = model(ids).logits
        hea.sparsify(model, Band(3, 0))
        torch.testing.assert_close(model(ids).logits, built(ids).logits)
        assert (model(ids).logits - before).abs().max() > 1e-3
        hea.sparsify(model, None)
        torch.testing.assert_close(model(ids).logits, before)
    with pytest.raises(hea.ConfigurationError, match="has a pattern for layer 0, whose mechanism is 'linear'"):
        hea.sparsify(build(["linear", None]), [Band(3, 0), Band(3, 0)])


def test_a_list_of_one_mechanism_is_that_mechanism(tmp_path: Any) -> None:
    """Also in checkpoints, and without any, in models that transformers' functions compute."""
    model = build(["linear", "linear"])
    model.save_pretrained(tmp_path)
    loaded = hea.SimplifiedTransformerForCausalLM.from_pretrained(tmp_path, mechanism="linear")
    ids = random_ids(2, TOKENS)
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    with pytest.raises(hea.CheckpointError, match=r"mechanism='linear', and mechanism=\['linear', None\] is asked for"):
        hea.SimplifiedTransformerForCausalLM.from_pretrained(tmp_path, mechanism=["linear", None])
    assert build([None, None]).config._attn_implementation == "sdpa"


def test_layers_of_softmax_are_explained() -> None:
    model = build(["linear", None, "prior"], attention_pattern=[None, None, Band(3, 0)])
    with pytest.raises(hea.UnsupportedBackendError, match="linear attention computes no scores of pairs"):
        hea.explain(model, 64, layer=0)
    plain, followed = str(hea.explain(model, 64, layer=1)), str(hea.explain(model, 64, layer=2))
    for said in (plain, followed):
        assert "layer 0 asks the engine for nothing" in said
    assert "which costs as much again" not in plain
    assert "which costs as much again" in followed
    assert "attention_pattern" in followed
    with pytest.raises(hea.ConfigurationError, match="layer=3 of SimplifiedTransformerForCausalLM has no attention"):
        hea.explain(model, 64, layer=3)


@torch.no_grad()
def test_features_of_linear_layers_are_redrawn_and_saved(tmp_path: Any) -> None:
    model = build([None, "linear"], feature_map="positive_random", num_features=11)
    ids = random_ids(2, TOKENS)
    before = model(ids).logits
    model.redraw_features(1)
    after = model(ids).logits
    assert (after - before).abs().max() > 1e-4
    model.save_pretrained(tmp_path)
    loaded = hea.SimplifiedTransformerForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.mechanism == [None, "linear"]
    assert torch.equal(loaded(ids).logits, after)
