"""Encoder-decoders against torch.nn.Transformer, weights copied; outputs of LED's names. Others: tests/convert."""

from typing import Any

import pytest
import torch
from in_tree_models import in_tree
from models_cases import randomize
from torch import Tensor, nn

import hf_efficient_attn as hea
from hf_efficient_attn.models.parts.embeddings import sinusoids

OURS = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "encoder_layers": 2,
    "decoder_layers": 3,
}


def batch(source_tokens: int = 14, target_tokens: int = 6, source_padding: int = 5) -> dict[str, Tensor]:
    """Return three examples, one with a source and one with a target padded on the right."""
    generator = torch.Generator().manual_seed(3)
    source = torch.randint(3, 61, (3, source_tokens), generator=generator)
    target = torch.randint(3, 61, (3, target_tokens), generator=generator)
    mask, target_mask = torch.ones_like(source), torch.ones_like(target)
    mask[0, source_tokens - source_padding :], target_mask[1, -2:] = 0, 0
    return {
        "input_ids": source,
        "attention_mask": mask,
        "decoder_input_ids": target,
        "decoder_attention_mask": target_mask,
    }


def assert_same(ours: Tensor, theirs: Tensor, real: Tensor, tolerance: float) -> None:
    """Compare where there are tokens: on padding, implementations differ at will."""
    difference = (ours - theirs)[real.bool()].abs().max().item()
    assert difference <= tolerance, difference


def torch_transformer(model: "hea.SparseSeq2SeqModel") -> nn.Transformer:
    """Return `torch.nn.Transformer` with the weights of a post-norm model, without its final norms."""
    config = model.config
    theirs = nn.Transformer(
        config.hidden_size,
        config.num_attention_heads,
        config.encoder_layers,
        config.decoder_layers,
        config.intermediate_size,
        dropout=0.0,
        activation=config.hidden_act,
        layer_norm_eps=config.norm_eps,
        batch_first=True,
        norm_first=False,
    )
    theirs.encoder.norm = theirs.decoder.norm = None
    theirs.encoder.use_nested_tensor = False
    theirs = theirs.to(model.dtype).eval()
    for ours, layer in zip(model.encoder.layers, theirs.encoder.layers, strict=True):
        _copy_attention(ours.self_attn, layer.self_attn)
        _copy_rest(ours, layer, (ours.attention_norm, ours.mlp_norm))
    for ours, layer in zip(model.decoder.layers, theirs.decoder.layers, strict=True):
        _copy_attention(ours.self_attn, layer.self_attn)
        _copy_attention(ours.cross_attn, layer.multihead_attn)
        _copy_rest(ours, layer, (ours.attention_norm, ours.cross_norm, ours.mlp_norm))
    return theirs


def _copy_attention(ours: nn.Module, theirs: nn.MultiheadAttention) -> None:
    projections = (ours.q_proj, ours.k_proj, ours.v_proj)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([projection.weight for projection in projections]))
        theirs.in_proj_bias.copy_(torch.cat([projection.bias for projection in projections]))
    theirs.out_proj.load_state_dict(ours.o_proj.state_dict())


def _copy_rest(ours: nn.Module, theirs: nn.Module, norms: tuple[nn.Module, ...]) -> None:
    theirs.linear1.load_state_dict(ours.mlp.up_proj.state_dict())
    theirs.linear2.load_state_dict(ours.mlp.down_proj.state_dict())
    for number, norm in enumerate(norms, 1):
        getattr(theirs, f"norm{number}").load_state_dict(norm.state_dict())


def vanilla(**fields: Any) -> Any:
    model = hea.SparseSeq2SeqModel(hea.SparseSeq2SeqConfig.vanilla(**{**OURS, **fields}))
    return randomize(model).double().eval()


@pytest.mark.parametrize("kernel", ["efficient", "eager", "sdpa"])
def test_vanilla_is_torch_transformer(kernel: str) -> None:
    model = vanilla()
    # the formula's softmax is in float32, whatever the dtype
    model.set_attn_implementation(kernel)
    theirs, inputs = torch_transformer(model), batch()
    pad, target_pad = inputs["attention_mask"] == 0, inputs["decoder_attention_mask"] == 0
    amplified = [model.embed(inputs[name]) * 32**0.5 for name in ("input_ids", "decoder_input_ids")]
    source, target = (states + sinusoids(torch.arange(states.shape[1]), 32) for states in amplified)
    causal = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1)
    with torch.no_grad():
        expected = theirs(
            source,
            target,
            tgt_mask=causal,
            src_key_padding_mask=pad,
            tgt_key_padding_mask=target_pad,
            memory_key_padding_mask=pad,
        )
        actual = model(**inputs).last_hidden_state
    assert_same(actual, expected, ~target_pad, 1e-12)


def longformer_weights(
    weights: torch.Tensor, window: int, is_global: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dense weights [B, H, T, T] in the shapes of LongformerBaseModelOutput's attentions, global_attentions."""
    index = torch.argsort(~is_global, dim=1, stable=True)[:, : int(is_global.sum(1).max())]
    is_there = is_global.gather(1, index)[:, None, None]

    def of_globals(scores: torch.Tensor) -> torch.Tensor:
        return scores.gather(3, index[:, None, None].expand(*scores.shape[:3], -1)) * is_there

    side, tokens = window // 2, weights.shape[2]
    keys = torch.arange(tokens)[:, None] + torch.arange(-side, side + 1)
    inside, keys = (keys >= 0) & (keys < tokens), keys.clamp(0, tokens - 1)
    near = weights.gather(3, keys.expand(*weights.shape[:3], -1)) * (inside & ~is_global[:, keys])[:, None]
    local = torch.cat((of_globals(weights), near), -1)
    return local.masked_fill(is_global[:, None, :, None], 0), of_globals(weights.transpose(2, 3))


@pytest.mark.filterwarnings("ignore:output_attentions=True", "ignore:Even with parity")
def test_outputs_have_the_names_shapes_and_numbers_of_led() -> None:
    """But for encoder attentions, which are one matrix over all pairs here, and windows plus globals there."""
    theirs = in_tree("led", "AutoModelForSeq2SeqLM")
    ours, inputs = hea.convert(theirs, parity=True), batch(21)
    first = torch.zeros_like(inputs["input_ids"]).index_fill_(1, torch.tensor(0), 1)
    options = {"global_attention_mask": first, "output_attentions": True, "output_hidden_states": True}
    with torch.no_grad():
        actual, expected = (each(**inputs, **options) for each in (ours, theirs))
    for name in ("decoder_hidden_states", "encoder_hidden_states"):
        assert [each.shape for each in actual[name]] == [each.shape for each in expected[name]], name
    for name in ("decoder_attentions", "cross_attentions"):
        for own, other in zip(actual[name], expected[name], strict=True):
            assert_same(own.transpose(1, 2), other.transpose(1, 2), inputs["decoder_attention_mask"], 1e-6)
    assert [each.shape for each in actual.encoder_attentions] == [(3, 4, 21, 21)] * 2
    for layer, window in enumerate((8, 4)):
        local, of_globals = longformer_weights(actual.encoder_attentions[layer], window, first.bool())
        other = expected.encoder_attentions[layer]
        assert_same(local.transpose(1, 2), other.transpose(1, 2), inputs["attention_mask"], 1e-6)
        other = expected.encoder_global_attentions[layer][:, :, :21]
        torch.testing.assert_close(of_globals, other, atol=1e-6, rtol=0)
