"""Closed forms 1, 2, 8 and 11: what each block computes at initialisation, and what its first steps train."""

import inspect
from typing import Any

import pytest
import torch
from models_cases import TINY, head_inputs, randomize

import hf_efficient_attn as hea
from hf_efficient_attn.models.prologue import prepare_call
from hf_efficient_attn.models.simplified_transformer.centering import block_masks
from hf_efficient_attn.models.simplified_transformer.gains import BLOCK_STYLES
from hf_efficient_attn.models.simplified_transformer.modeling_simplified_transformer import (
    SimplifiedTransformerModel,
)


def backbone(block: str, **fields: Any) -> SimplifiedTransformerModel:
    torch.manual_seed(0)
    return SimplifiedTransformerModel(hea.SimplifiedTransformerConfig(block=block, **{**TINY, **fields})).eval()


def run_layer(model: SimplifiedTransformerModel, x: torch.Tensor, index: int) -> torch.Tensor:
    masks = block_masks(model.config, prepare_call(model.config, x, None, None, None, {}))
    return model.layers[index](x, **masks)[0]


def hidden(seed: int = 1) -> torch.Tensor:
    return torch.randn(2, 9, TINY["hidden_size"], generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("index", [0, 1])
def test_sas_at_initialisation(index: int) -> None:
    """Closed form 1: Y = U + β_FF·MLP(N2(U)) with U = N1(X)."""
    model = backbone("sas", position_embedding_type="none")
    layer, x = model.layers[index], hidden()
    u = layer.input_layernorm(x)
    expected = u + layer.mlp_gain(layer.mlp(layer.post_attention_layernorm(u)))
    torch.testing.assert_close(run_layer(model, x, index), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("block", ["sas_p", "sas_p_no_norm"])
@pytest.mark.parametrize("index", [0, 1])
def test_sas_p_at_initialisation(block: str, index: int) -> None:
    """Closed form 1: Y = U + β_FF·MLP(U), with U = N(X), and U = X in norm-free layers after the first."""
    model = backbone(block, position_embedding_type="none")
    layer, x = model.layers[index], hidden()
    u = layer.input_layernorm(x)
    assert torch.equal(u, x) == (block == "sas_p_no_norm" and index > 0)
    torch.testing.assert_close(run_layer(model, x, index), u + layer.mlp_gain(layer.mlp(u)), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("norm_type", ["rmsnorm", "layernorm"])
def test_sas_equals_sas_p_at_initialisation(norm_type: str) -> None:
    """Closed form 2: N2(U) = U when U is normalised and the norm scales are one."""
    models = [backbone(block, norm_type=norm_type, norm_eps=1e-12) for block in ("sas", "sas_p")]
    for first, second in zip(models[0].layers, models[1].layers, strict=True):
        second.mlp.load_state_dict(first.mlp.state_dict())
    models[1].embed_tokens.load_state_dict(models[0].embed_tokens.state_dict())
    ids = torch.arange(3, 13)[None]
    with torch.no_grad():
        outputs = [model(ids).last_hidden_state for model in models]
    torch.testing.assert_close(outputs[0], outputs[1], atol=1e-5, rtol=1e-5)


def test_v_skipinit_has_no_attention_skip() -> None:
    """Z = SMHA(N1 X) alone: with α = β = γ·0 the block sees its input only through attention."""
    model = backbone("v_skipinit")
    layer = model.layers[1]
    assert layer.attention_skip_gain.is_zero
    assert not layer.mlp_skip_gain.is_zero
    weight = layer.self_attn.v_proj.weight
    torch.testing.assert_close(weight @ weight.T, torch.eye(TINY["hidden_size"]), atol=1e-5, rtol=0)


def test_pre_ln_is_the_textbook_block() -> None:
    model = randomize(backbone("pre_ln", position_embedding_type="none"))
    layer, x = model.layers[0], hidden()
    attention = layer.self_attn
    normed = layer.input_layernorm(x)
    heads = (2, 9, TINY["num_attention_heads"], -1)
    q, k, v = (
        proj(normed).view(heads).transpose(1, 2) for proj in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    z = x + attention.o_proj(mixed)
    expected = z + layer.mlp(layer.post_attention_layernorm(z))
    torch.testing.assert_close(run_layer(model, x, 0), expected, atol=1e-5, rtol=1e-5)


def test_parallel_is_the_gpt_j_layout() -> None:
    """Closed form 11: one norm feeds attention and MLP, one skip: transformers' own GPTJBlock, weights copied over."""
    from transformers import GPTJConfig
    from transformers.models.gptj.modeling_gptj import GPTJBlock

    size, heads = TINY["hidden_size"], TINY["num_attention_heads"]
    model = backbone(
        "parallel", norm_type="layernorm", attention_bias="none", mlp_bias=True, position_embedding_type="none"
    )
    layer = randomize(model.layers[0])
    gptj = GPTJBlock(
        GPTJConfig(
            n_embd=size, n_head=heads, n_inner=TINY["intermediate_size"], rotary_dim=0, activation_function="relu",
            attn_implementation="eager",
        ),
        layer_idx=0,
    ).eval()  # fmt: skip
    gptj.ln_1.load_state_dict(layer.input_layernorm.state_dict())
    for theirs, ours in (("q_proj", "q_proj"), ("k_proj", "k_proj"), ("v_proj", "v_proj"), ("out_proj", "o_proj")):
        getattr(gptj.attn, theirs).load_state_dict(getattr(layer.self_attn, ours).state_dict())
    gptj.mlp.fc_in.load_state_dict(layer.mlp.up_proj.state_dict())
    gptj.mlp.fc_out.load_state_dict(layer.mlp.down_proj.state_dict())
    gptj.attn.rotary_dim = None
    # rotations by nothing, which attention looks up itself before transformers 5.24
    sines, cosines = torch.zeros(64, size // heads // 2), torch.ones(64, size // heads // 2)
    gptj.attn.embed_positions = torch.cat([sines, cosines], 1)
    where = {"position_ids": torch.arange(9)[None], "position_embeddings": (sines[None, :9], cosines[None, :9])}
    known = inspect.signature(gptj.forward).parameters
    x = hidden()
    causal = torch.full((9, 9), torch.finfo(torch.float32).min).triu(1)[None, None]
    expected = gptj(x, attention_mask=causal, **{name: each for name, each in where.items() if name in known})
    expected = expected[0] if isinstance(expected, tuple) else expected
    torch.testing.assert_close(run_layer(model, x, 0), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("block", ["sas", "sas_p"])
def test_gradients_of_the_first_steps(block: str) -> None:
    """Closed form 8: at step 0 W^K and b_V get zero, β and γ opposite gradients; at step 1 W^K moves."""
    torch.manual_seed(0)
    model = hea.SimplifiedTransformerForCausalLM(hea.SimplifiedTransformerConfig(block=block, **TINY))
    inputs = head_inputs("AutoModelForCausalLM")
    optimizer = torch.optim.AdamW(hea.optimizer_groups(model, 0.0), lr=1e-2)
    model(**inputs).loss.backward()
    attention = model.model.layers[0].self_attn
    assert attention.k_proj.weight.grad.abs().max() == 0
    assert attention.v_proj.update_gain.gain.grad.abs().max() == 0
    assert attention.q_proj.weight.grad.abs().max() > 0
    torch.testing.assert_close(
        attention.softmax_gain.gain.grad, -attention.centering_gain.gain.grad, atol=1e-6, rtol=1e-3
    )
    optimizer.step()
    optimizer.zero_grad()
    model(**inputs).loss.backward()
    unused = [name for name, parameter in model.named_parameters() if parameter.grad.abs().max() == 0]
    assert [name for name in unused if not name.endswith("bias")] == []


@pytest.mark.parametrize("block", BLOCK_STYLES)
def test_start_values_are_the_papers(block: str) -> None:
    config = hea.SimplifiedTransformerConfig(block=block, **{**TINY, "hidden_size": 256, "intermediate_size": 1024})
    torch.manual_seed(0)
    attention = hea.SimplifiedTransformerModel(config).layers[1].self_attn
    assert attention.q_proj.weight.std().item() == pytest.approx(0.0 if config.is_shaped else 0.02, rel=0.05)
    assert attention.k_proj.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert (attention.v_proj is None) == (block in ("sas", "sas_p", "sas_p_no_norm"))
    assert (attention.o_proj is None) == (block in ("sas", "sas_p", "sas_p_no_norm"))
    if config.is_shaped:
        for gain in (attention.identity_gain, attention.softmax_gain, attention.centering_gain):
            assert gain.gain.tolist() == [1.0] * TINY["num_attention_heads"]


@pytest.mark.parametrize("block", ["pre_ln", "parallel"])
def test_softmax_gain_of_plain_blocks(block: str) -> None:
    """β scales attention in every block, as a constant or trained."""
    torch.manual_seed(0)
    halved = hea.SimplifiedTransformerModel(hea.SimplifiedTransformerConfig(block=block, softmax_gain=0.5, **TINY))
    torch.manual_seed(0)
    trained = hea.SimplifiedTransformerModel(
        hea.SimplifiedTransformerConfig(block=block, softmax_gain=0.5, trainable_gains=["softmax_gain"], **TINY)
    )
    plain = backbone(block)
    ids = torch.arange(3, 13)[None]
    assert not torch.allclose(halved(ids).last_hidden_state, plain(ids).last_hidden_state, atol=1e-4)
    torch.testing.assert_close(halved(ids).last_hidden_state, trained(ids).last_hidden_state)
    assert trained.layers[0].self_attn.softmax_gain.gain.tolist() == [0.5] * TINY["num_attention_heads"]


def test_start_deviations_are_fields() -> None:
    fields = {"query_init_std": 0.1, "key_init_std": 0.2, "matrix_init_std": 0.3, "mlp_output_init_std": 0.4}
    layer = backbone("pre_ln", hidden_size=128, intermediate_size=512, **fields).layers[0]
    attention = layer.self_attn
    matrices = [attention.q_proj, attention.k_proj, attention.v_proj, layer.mlp.down_proj, layer.mlp.up_proj]
    for matrix, std in zip(matrices, [0.1, 0.2, 0.3, 0.4, 0.02], strict=True):
        assert matrix.weight.std().item() == pytest.approx(std, rel=0.05)


def test_dropout_acts_in_training_only() -> None:
    fields = {"embedding_dropout": 0.5, "hidden_dropout": 0.5, "attention_dropout": 0.5, "query_init_std": 1.0}
    model = backbone("sas", **fields)
    ids = torch.arange(3, 13)[None]
    torch.testing.assert_close(model(ids).last_hidden_state, model(ids).last_hidden_state)
    model.train()
    assert not torch.allclose(model(ids).last_hidden_state, model(ids).last_hidden_state)


@pytest.mark.parametrize(
    "fields",
    [
        {"hidden_act": "leaky_relu", "leaky_relu_slope": 0.8},
        {"hidden_act": "gelu", "gated_mlp": True, "mlp_bias": True},
        {"norm_type": "layernorm", "final_norm_type": "rmsnorm"},
        {"per_head_gains": False},
        {"centering_gain": 0.0, "softmax_gain": 0.0},
        {
            "block": "pre_ln",
            "reparameterized": True,
            "matrix_init": "identity",
            "value_gain": 0.2,
            "projection_gain": 0.2,
        },
        {"block": "sas", "value_gain": 0.2, "first_value_gain": 0.2, "projection_gain": 0.2},
        {"block": "sas", "matrix_init": "orthogonal", "matrix_init_tie": "last_layer", "last_projection_gain": 0.5},
        {"block": "sas", "trainable_gains": ["mlp_gain"]},
        {"attention_bias": "all"},
        {"tie_word_embeddings": False},
    ],
    ids=str,
)
def test_every_option_trains(fields: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = hea.SimplifiedTransformerForCausalLM(hea.SimplifiedTransformerConfig(**{**TINY, **fields}))
    loss = model(**head_inputs("AutoModelForCausalLM")).loss
    loss.backward()
    assert torch.isfinite(loss)
    assert all(parameter.grad is not None for parameter in model.parameters())
