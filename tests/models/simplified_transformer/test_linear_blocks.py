"""Linear attention as the A of shaped attention equals its dense form, starts as the identity, and keeps sums alone."""

from typing import Any

import pytest
import torch
from models.simplified_transformer.dense_blocks import TOKENS, check_layers, dense_linear, masks_with
from models_cases import TOLERANCE, random_ids
from simplified_cases import simplified
from torch import Tensor

import hf_efficient_attn as hea
from hf_efficient_attn.attention.cache_argument import CACHE_ARGUMENT
from hf_efficient_attn.patterns import Band

MAPS: dict[str, dict[str, Any]] = {
    "elu": {},
    "positive_random": {"feature_map": "positive_random", "num_features": 11},
}
PADDED = torch.tensor([[0] * 4 + [1] * 9, [1] * 6 + [0] * 2 + [1] * 5])
MASKS = masks_with(PADDED)


def build(auto_class: str | None = None, **fields: Any) -> Any:
    """Return a tiny model in eval mode whose every parameter is random."""
    return simplified("tiny", **{"mechanism": "linear", "chunk_tokens": 4, **fields}).model(auto_class)


def learned(attention: Any) -> list[Tensor]:
    return [attention.q_proj.weight, attention.k_proj.weight, attention.centering_gain.gain]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("how", MAPS)
def test_outputs_and_gradients_are_those_of_the_dense_form(how: str, is_causal: bool, mask: str) -> None:
    """Of all layers of a model, but for padding; means are in float32."""
    model = build("AutoModel", block="sas", is_causal=is_causal, **MAPS[how]).double()
    check_layers(model, MASKS[mask], dense_linear, learned, TOLERANCE, (10 * TOLERANCE, TOLERANCE))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("how", MAPS)
@torch.no_grad()
def test_attention_starts_as_the_identity(how: str, is_causal: bool) -> None:
    """W^K is 0 there, where with softmax W^Q is."""
    torch.manual_seed(0)
    config = simplified("tiny", mechanism="linear", block="sas_p", is_causal=is_causal, **MAPS[how]).config()
    model, seen = hea.SimplifiedTransformerModel(config).eval(), []
    attention = model.layers[1].self_attn
    assert attention.q_proj.weight.any()
    assert not attention.k_proj.weight.any()
    attention.register_forward_hook(lambda module, given, out: seen.extend((given[0], out[0])))
    model(random_ids(2, TOKENS), attention_mask=PADDED)
    torch.testing.assert_close(seen[0][PADDED.bool()], seen[1][PADDED.bool()], atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.filterwarnings("ignore:output_attentions=True")
@torch.no_grad()
def test_weights_are_those_of_the_sums() -> None:
    model = build("AutoModel", block="sas")
    weights = model(random_ids(2, TOKENS), attention_mask=PADDED, output_attentions=True).attentions[0]
    real = PADDED.bool()
    assert weights[real[:, None, None].expand_as(weights).logical_not()].count_nonzero() == 0
    sums = weights.sum(-1).transpose(1, 2)[real]
    torch.testing.assert_close(sums, torch.ones_like(sums), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("block", ["sas_p", "pre_ln"])
@pytest.mark.parametrize("how", MAPS)
@torch.no_grad()
def test_caches_keep_sums_alone_and_go_on(how: str, block: str) -> None:
    """After any number of tokens as many numbers; C adds one for each of the hidden size."""
    model, ids, sizes, parts, cache = build(block=block, **MAPS[how]), random_ids(2, 20), [], [], None
    full = model(ids, use_cache=False).logits
    for part in ids.split([6, 1, 13], 1):
        out = model(part, **{CACHE_ARGUMENT: cache}, use_cache=True)
        cache, parts = out.past_key_values, [*parts, out.logits]
        sizes.append(sum(each.keys.numel() + each.values.numel() for each in cache.layers))
    torch.testing.assert_close(torch.cat(parts, 1), full, atol=TOLERANCE, rtol=TOLERANCE)
    assert sizes == [2 * 2 * 4 * model.config.state_of_head] * 3
    if block == "sas_p":
        assert {each.value_sum.shape for each in cache.layers} == {(2, 1, 32)}
    with pytest.raises(hea.UnsupportedBackendError, match="cannot be cropped"):
        cache.crop(-3)
    cache.reset()
    torch.testing.assert_close(model(ids, **{CACHE_ARGUMENT: cache}).logits, full, atol=TOLERANCE, rtol=TOLERANCE)


@torch.no_grad()
def test_features_are_redrawn() -> None:
    model = build("AutoModel", **MAPS["positive_random"])
    before = model.layers[0].self_attn.linear.features.vectors.clone()
    model.redraw_features(1)
    assert not torch.equal(model.layers[0].self_attn.linear.features.vectors, before)


def test_what_is_computed_is_explained() -> None:
    with pytest.raises(hea.UnsupportedBackendError, match="linear attention computes no scores of pairs"):
        hea.explain(build(), 64)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"mechanism": "linformer"}, "at the start is no mean of tokens"),
    ({"mechanism": "talking_heads"}, "start as the identity with 'talking_heads', too, but it is not built here"),
    ({"mechanism": "linaer"}, "is unknown here: these blocks have softmax attention .None., .*Did you mean 'linear'"),
    ({"mechanism": None, "feature_map": "positive_random"}, "is of linear attention, but mechanism is None"),
    ({"feature_map": "constant"}, "shaped attention takes the same mean away"),
    ({"feature_map": "relu"}, "feature_map"),
    ({"num_features": 3}, "num_features=3, but feature_map='elu'"),
    ({"position_embedding_type": "rope"}, "no function of distances"),
    ({"position_embedding_type": "alibi"}, "no scores to add to"),
    ({"span": "adaptive"}, "cannot weigh each by its distance"),
    ({"attention_pattern": Band(3, 0)}, "is read whole by all queries behind it"),
    ({"block": "pre_ln", "num_key_value_heads": 2}, "each head of linear attention adds up keys"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=[str(fields) for fields, _ in REFUSED])
def test_what_no_block_can_have_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(hea.ConfigurationError, match=message):
        simplified("tiny", **{"mechanism": "linear", **fields}).config()


def test_weights_of_another_attention_and_softmax_kernels_are_refused(tmp_path: Any) -> None:
    model = build(chunk_tokens=128)
    model.save_pretrained(tmp_path)
    with pytest.raises(hea.CheckpointError, match="was saved with mechanism='linear', and mechanism=None"):
        hea.SimplifiedTransformerForCausalLM.from_pretrained(tmp_path, mechanism=None)
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(hea.UnsupportedBackendError, match="computes softmax attention, and not that of mechanism"):
        model(random_ids(1, 5))
