"""Models of transformers that choose keys by an indexer: outputs, gradients and decoding are those of eager code."""

from typing import Any

import pytest
import torch
import transformers as tr
from attention_models import token_ids
from sweep.tiny import build, tiny_config
from torch import Tensor, nn

import hf_efficient_attn as hea
from hf_efficient_attn.errors import UnsupportedBackendError
from hf_efficient_attn.integration import interface

NUM_TOKENS = 30
# an indexer in every layer; one that layers share; one with sinks; blocks of keys
CLASSES = {
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "hy_v4": "HYV4ForCausalLM",
    "minimax_m3": "MiniMaxM3VLForCausalLM",
}
pytestmark = pytest.mark.skipif(
    not all(hasattr(tr, each) for each in CLASSES.values()),
    reason="in older versions of transformers indexers read masks in another way, and their models are refused",
)


def tiny(name: str) -> Any:
    model_class = getattr(tr, CLASSES[name])
    heads = {} if name == "minimax_m3" else {"num_key_value_heads": 4}
    return build(model_class, tiny_config(model_class.config_class, "causal", **heads))


def trained(model: Any, ids: Tensor, mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    out = model(ids, attention_mask=mask).logits[mask.bool()]
    out.square().mean().backward()
    return out.detach(), {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("side", [pytest.param("none", marks=pytest.mark.thorough), "left", "right"])
@pytest.mark.parametrize("name", CLASSES)
def test_outputs_and_gradients_are_those_of_eager(name: str, side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids, mask = tiny(name), token_ids(2, NUM_TOKENS), torch.ones(2, NUM_TOKENS, dtype=torch.long)
    if (name, side) == ("minimax_m3", "left"):
        pytest.skip("refused, see below")
    if side != "none":
        mask[1, slice(0, 9) if side == "left" else slice(-9, None)] = 0
    expected, gradients = trained(model, ids, mask)
    chosen, attend = [], interface.attend_layer

    def watched(*states: Any, **options: Any) -> Any:
        chosen.append(options["chosen"])
        return attend(*states, **options)

    monkeypatch.setattr(interface, "attend_layer", watched)
    model.set_attn_implementation("efficient")
    found, own = trained(model, ids, mask)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert own.keys() == gradients.keys()
    for key, gradient in gradients.items():
        torch.testing.assert_close(own[key], gradient, atol=1e-5, rtol=1e-3, msg=lambda text, key=key: f"{key}: {text}")
    # some layers of MiniMax-M3 read everything
    wanted = {hea.ChosenBlocks, type(None)} if name == "minimax_m3" else {hea.ChosenTokens}
    assert {type(each) for each in chosen} == wanted


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["deepseek_v32", "minimax_m3"])
def test_generating_is_that_of_eager(name: str, cache: str) -> None:
    model, ids = tiny(name), token_ids(2, 20)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "disable_compile": True}
    options |= {"cache_implementation": cache, "attention_mask": torch.ones_like(ids)}
    expected = model.generate(ids, **options, eos_token_id=-1)
    model.set_attn_implementation("efficient")
    assert torch.equal(model.generate(ids, **options, eos_token_id=-1), expected)


def test_padding_from_which_blocks_would_be_counted_is_refused() -> None:
    model, ids, mask = tiny("minimax_m3"), token_ids(2, 12), torch.ones(2, 12, dtype=torch.long)
    mask[1, :3] = 0
    model.set_attn_implementation("efficient")
    with pytest.raises(UnsupportedBackendError, match="Pad on the right"):
        model(ids, attention_mask=mask)


def test_packed_documents_from_which_blocks_are_not_counted_are_refused() -> None:
    """By positions that begin again, where transformers' own code lets documents choose for one another."""
    model, ids = tiny("minimax_m3"), token_ids(2, 12)
    positions = torch.arange(12).expand(2, -1).clone()
    model.set_attn_implementation("efficient")
    found = model(ids, position_ids=positions).logits
    assert torch.isfinite(found).all()
    positions[1, 5:] -= 5
    with pytest.raises(UnsupportedBackendError, match="Put each document into its own row"):
        model(ids, position_ids=positions, use_cache=False)


def test_blocks_of_unknown_length_are_refused() -> None:
    module, states = nn.Module(), torch.zeros(1, 1, 4, 8)
    module.config, module.is_causal, module.layer_idx = tr.LlamaConfig(), True, 0  # type: ignore[assignment]
    with pytest.raises(UnsupportedBackendError, match="no index_block_size"):
        interface.efficient_attention_forward(
            module, states, states, states, None, block_indices=torch.zeros(1, 1, 4, 1, dtype=torch.long)
        )
