"""Softmax with a prior by distance as the A of shaped attention: equal to its dense form, C with the same prior."""

from typing import Any

import pytest
import torch
from models.simplified_transformer.dense_blocks import TOKENS, check_layers, dense_softmax, masks_with
from models_cases import TOLERANCE, random_ids
from simplified_cases import simplified
from torch import Tensor

import hf_efficient_attn as hea
from hf_efficient_attn.attention.cache_argument import CACHE_ARGUMENT

PADDED = torch.tensor([[0] * 4 + [1] * 9, [1] * 9 + [0] * 4])
MASKS = masks_with(PADDED)


def build(auto_class: str | None = None, **fields: Any) -> Any:
    """Return a tiny model in eval mode whose every parameter is random."""
    return simplified("tiny", **{"mechanism": "prior", "prior_width_tokens": 3, **fields}).model(auto_class)


def learned(attention: Any) -> list[Tensor]:
    return [attention.q_proj.weight, attention.prior.prior_weight, attention.prior.prior_bias]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_outputs_and_gradients_are_those_of_the_dense_form(is_causal: bool, mask: str) -> None:
    """Of all layers of a model, but for padding; gradients of the prior by A and by C."""
    model = build("AutoModel", block="sas", is_causal=is_causal).double()
    check_layers(model, MASKS[mask], dense_softmax, learned, 1e-11, (1e-9, 1e-9))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("is_trained", [False, True])
@torch.no_grad()
def test_attention_starts_as_the_identity(is_trained: bool, is_causal: bool) -> None:
    torch.manual_seed(0)
    fields = {"prior_is_trained": is_trained, "prior_width_tokens": 3, "is_causal": is_causal}
    model = hea.SimplifiedTransformerModel(simplified("tiny", mechanism="prior", block="sas_p", **fields).config())
    attention, seen = model.eval().layers[1].self_attn, []
    assert not attention.q_proj.weight.any()
    if is_trained:
        torch.testing.assert_close(attention.prior.prior_weight, torch.full((4,), 1 / 18))
    attention.register_forward_hook(lambda module, given, out: seen.extend((given[0], out[0])))
    model(random_ids(2, TOKENS), attention_mask=PADDED)
    torch.testing.assert_close(seen[0][PADDED.bool()], seen[1][PADDED.bool()], atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("block", ["sas_p", "pre_ln"])
@torch.no_grad()
def test_caches_go_on_and_can_be_cropped(block: str) -> None:
    """C has no running sum: it is computed of the keys and values that are cached anyway."""
    model, ids, parts, cache = build(block=block), random_ids(2, 20), [], None
    full = model(ids, use_cache=False).logits
    for part in ids.split([6, 1, 13], 1):
        out = model(part, **{CACHE_ARGUMENT: cache}, use_cache=True)
        cache, parts = out.past_key_values, [*parts, out.logits]
    torch.testing.assert_close(torch.cat(parts, 1), full, atol=TOLERANCE, rtol=TOLERANCE)
    cache.crop(-3)
    again = model(ids[:, 17:], **{CACHE_ARGUMENT: cache}).logits
    torch.testing.assert_close(again, full[:, 17:], atol=TOLERANCE, rtol=TOLERANCE)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"prior_width_tokens": 0}, "must be at least 1"),
    ({"mechanism": None, "prior_width_tokens": 3}, "is of attention with a prior, but mechanism is None"),
    ({"mechanism": "linear", "prior_is_trained": False}, "is of attention with a prior, but mechanism is .linear"),
    ({"chunk_tokens": 4}, "is of linear attention, but mechanism is .prior"),
    ({"position_embedding_type": "alibi"}, "ALiBi is another prior by distance"),
    ({"span": "adaptive"}, "a span weighs keys by their distance already"),
    ({"mechanism": "memory_compressed"}, "at the start is no mean of tokens"),
    ({"mechanism": "nystrom"}, "is singular where W.Q starts at 0, and it is not built here: .*'prior' and 'linear'"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=[str(fields) for fields, _ in REFUSED])
def test_what_no_block_can_have_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(hea.ConfigurationError, match=message):
        simplified("tiny", **{"mechanism": "prior", **fields}).config()


def test_kernels_without_a_prior_are_refused() -> None:
    model = build()
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(hea.UnsupportedBackendError, match="computes softmax attention, and not that of mechanism"):
        model(random_ids(1, 5))
