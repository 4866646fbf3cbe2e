"""What each block computes at initialisation and trains first, its matrices, its sizes, and what is refused."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models_cases import TINY, head_inputs, randomize

import hf_efficient_attn as hea
from hf_efficient_attn.integration.forward_context import CACHE_ARGUMENT
from hf_efficient_attn.models.prologue import prepare_call
from hf_efficient_attn.models.simplified_transformer.centering import block_masks
from hf_efficient_attn.models.simplified_transformer.gains import BLOCK_STYLES
from hf_efficient_attn.models.simplified_transformer.modeling_simplified_transformer import (
    ReparameterizedLinear,
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
            n_embd=size, n_head=heads, n_inner=TINY["intermediate_size"], rotary_dim=0, activation_function="gelu",
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
    for own, projection_std in (({}, 0.3), ({"projection_init_std": 0.5}, 0.5)):
        layer = backbone("pre_ln", hidden_size=128, intermediate_size=512, **fields, **own).layers[0]
        attention = layer.self_attn
        matrices = [attention.q_proj, attention.k_proj, attention.v_proj, layer.mlp.down_proj, layer.mlp.up_proj]
        for matrix, std in zip([*matrices, attention.o_proj], [0.1, 0.2, 0.3, 0.4, 0.02, projection_std], strict=True):
            assert matrix.weight.std().item() == pytest.approx(std, rel=0.05)


@pytest.mark.parametrize(
    "fields",
    [
        {
            "hidden_act": "leaky_relu",
            "leaky_relu_slope": 0.8,
            "norm_type": "layernorm",
            "final_norm_type": "rmsnorm",
            "per_head_gains": False,
            "attention_bias": "all",
        },
        {
            "hidden_act": "gelu",
            "gated_mlp": True,
            "mlp_bias": True,
            "centering_gain": 0.0,
            "softmax_gain": 0.0,
            "tie_word_embeddings": False,
        },
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


Config = hea.SimplifiedTransformerConfig


def sizes(config: Config) -> tuple[float, float]:
    """Return millions of parameters, and of numbers in weight matrices other than the position table."""
    model_class = hea.SimplifiedTransformerForCausalLM if config.is_causal else hea.SimplifiedTransformerForMaskedLM
    with torch.device("meta"):
        model = model_class(config)
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "positions" not in name)
    return model.num_parameters() / 1e6, matrices / 1e6


@pytest.mark.parametrize(("block", "millions"), [("pre_ln", 166.74), ("sas", 146.07)])
def test_gpt_18_has_the_papers_size(block: str, millions: float) -> None:
    assert round(sizes(Config.codeparrot_gpt(block))[0], 2) == millions


@pytest.mark.parametrize(("block", "millions"), [("pre_ln", 119.54), ("sas", 101.25)])
def test_bert_16_has_the_papers_size(block: str, millions: float) -> None:
    """The paper's figure counts weight matrices."""
    assert round(sizes(Config.crammed_bert(block))[1], 2) == millions


@pytest.mark.parametrize(("block", "millions"), [("pre_ln", 378.1), ("sas", 293.8)])
def test_depth_72_has_the_papers_size(block: str, millions: float) -> None:
    """The paper's figure counts weight matrices."""
    config = Config.codeparrot_gpt(block, num_hidden_layers=72, intermediate_size=1536)
    assert round(sizes(config)[1], 1) == millions


def test_papers_values_of_the_mlp_gain() -> None:
    assert Config.codeparrot_gpt("sas").gain("mlp_gain") == pytest.approx(0.1)
    assert Config.codeparrot_gpt("sas", intermediate_size=1536).gain("mlp_gain") == pytest.approx(0.2)
    deep = Config.codeparrot_gpt("sas", num_hidden_layers=72, intermediate_size=1536)
    assert deep.gain("mlp_gain") == pytest.approx(0.1)
    assert Config.crammed_bert("sas").gain("mlp_gain") == 0.05
    assert Config.codeparrot_gpt("pre_ln").gain("mlp_gain") == 1.0


def test_only_first_layer_keeps_its_value_matrix() -> None:
    config = Config(block="sas")
    assert [config.gain("value_gain", layer) for layer in range(3)] == [1.0, 0.0, 0.0]
    assert Config(block="sas", value_gain=0.2).gain("value_gain", 0) == 0.2
    assert Config(block="sas", first_value_gain=0.0).gain("value_gain", 0) == 0.0


def test_whole_numbers_are_numbers() -> None:
    config = Config(mlp_gain=1, attention_dropout=0, query_init_std=0, trainable_gains=("mlp_gain",))
    assert config.gain("mlp_gain") == 1
    model = hea.SimplifiedTransformerModel(Config(mlp_gain=1, softmax_gain=1, **TINY))
    assert model.layers[0].mlp_gain.gain.tolist() == [1.0]


def test_heads_can_be_overridden_after_construction() -> None:
    config = Config()
    config.update_from_string("num_attention_heads=8")
    config.check()
    assert config.key_value_heads == 8


def config_of(**fields: object) -> hea.SimplifiedTransformerConfig:
    return hea.SimplifiedTransformerConfig(**{**TINY, "block": "sas", "num_hidden_layers": 3, **fields})


def effective(module: torch.nn.Module | None) -> torch.Tensor:
    return torch.eye(TINY["hidden_size"]) if module is None else module.effective_weight().detach()


@pytest.mark.parametrize("matrix_init", ["identity", "orthogonal"])
def test_weight_is_a_times_start_plus_b_times_update(matrix_init: str) -> None:
    linear = ReparameterizedLinear(
        config_of(matrix_init=matrix_init, value_gain=0.3, first_value_gain=0.3, value_skip_gain=0.7), 0, "value"
    )
    linear.initialize()
    start = torch.eye(TINY["hidden_size"]) if matrix_init == "identity" else linear.initial_weight
    torch.testing.assert_close(linear.effective_weight(), 0.7 * start)
    with torch.no_grad():
        linear.weight.normal_()
    torch.testing.assert_close(linear.effective_weight(), 0.7 * start + 0.3 * linear.weight)
    x = torch.randn(2, 5, TINY["hidden_size"])
    torch.testing.assert_close(linear(x), x @ linear.effective_weight().T, atol=1e-5, rtol=1e-4)


def test_one_sgd_step_moves_the_weight_by_lr_b_squared() -> None:
    """Closed form 6: training ΔW at rate η moves W by η·b²·∂L/∂W."""
    fields = {"value_gain": 0.3, "first_value_gain": 0.3, "trainable_gains": []}
    linear = ReparameterizedLinear(config_of(**fields), 0, "value")
    x = torch.randn(4, TINY["hidden_size"])
    before = linear.effective_weight().detach()
    plain = before.clone().requires_grad_()
    (x @ plain.T).square().sum().backward()
    linear(x).square().sum().backward()
    torch.optim.SGD([linear.weight], lr=0.01).step()
    torch.testing.assert_close(linear.effective_weight().detach() - before, -0.01 * 0.3**2 * plain.grad)


@pytest.mark.parametrize("tie", ["last_layer", "all_layers"])
def test_tied_products_are_the_identity(tie: str) -> None:
    """Closed form 6, to 1e-4."""
    model = hea.SimplifiedTransformerModel(
        config_of(matrix_init="orthogonal", matrix_init_tie=tie, first_value_gain=0.0)
    )
    product = torch.eye(TINY["hidden_size"])
    for layer in model.layers:
        value, projection = effective(layer.self_attn.v_proj), effective(layer.self_attn.o_proj)
        torch.testing.assert_close(value @ value.T, torch.eye(len(value)), atol=1e-5, rtol=0)
        product = projection @ value @ product
        if tie == "all_layers":
            torch.testing.assert_close(product, torch.eye(len(product)), atol=1e-4, rtol=0)
    torch.testing.assert_close(product, torch.eye(len(product)), atol=1e-4, rtol=0)


def test_layers_and_seeds_draw_different_matrices() -> None:
    models = [
        hea.SimplifiedTransformerModel(config_of(matrix_init="orthogonal", matrix_seed=seed)) for seed in (0, 0, 1)
    ]
    first, again, other = ([layer.self_attn.o_proj.initial_weight for layer in model.layers] for model in models)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.allclose(a, b) for a, b in zip(first, other, strict=True))
    assert not torch.allclose(first[0], first[1])


def test_drawing_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    ReparameterizedLinear(config_of(matrix_init="orthogonal"), 0, "value").initialize()
    assert torch.equal(torch.rand(3), expected)


def test_loading_keeps_query_and_orthogonal_starts(tmp_path: Path) -> None:
    """Closed form 9: from_pretrained keeps a trained W^Q (not its zero start) and the saved orthogonal W_init."""
    model = hea.SimplifiedTransformerForCausalLM(config_of(matrix_init="orthogonal"))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.normal_()
            layer.self_attn.o_proj.initial_weight.mul_(-1)
    model.save_pretrained(tmp_path)
    again = hea.SimplifiedTransformerForCausalLM.from_pretrained(tmp_path)
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[key]), key


def test_checkpoint_of_another_block(tmp_path: Path) -> None:
    hea.SimplifiedTransformerForCausalLM(Config(block="sas", **TINY)).save_pretrained(tmp_path)
    message = "was saved with block='sas', but block='pre_ln' was requested: the weights would not fit"
    with pytest.raises(hea.CheckpointError, match=message):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, block="pre_ln")
    with pytest.raises(hea.CheckpointError, match=message):
        hea.SimplifiedTransformerForCausalLM.from_pretrained(tmp_path, config=Config(block="pre_ln", **TINY))
    assert hea.SimplifiedTransformerForCausalLM.from_pretrained(tmp_path, block="sas").config.block == "sas"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reparameterized": False, "matrix_init": "normal"}, "reparameterized=True, .*reparameterized=False"),
        ({"matrix_init": "orthogonal"}, "matrix_init='identity', .*matrix_init='orthogonal'"),
        ({"attention_bias": "all"}, "attention_bias='query_key', .*attention_bias='all'"),
        ({"gated_mlp": True}, "gated_mlp=False, .*gated_mlp=True"),
        ({"trainable_gains": ["mlp_gain"]}, "trainable_gains="),
        ({"block": "sasp"}, "block='sasp'; it must be .*Did you mean 'sas_p'"),
    ],
    ids=str,
)
def test_checkpoint_of_another_structure(changes: dict, message: str, tmp_path: Path) -> None:
    """Where weights would be missing, and so random, loading is refused and names the field."""
    hea.SimplifiedTransformerForCausalLM(Config(block="sas", **TINY)).save_pretrained(tmp_path)
    with pytest.raises(hea.EfficientAttentionError, match=message):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, **changes)


def test_options_of_loading_are_no_fields(tmp_path: Path) -> None:
    hea.SimplifiedTransformerForCausalLM(Config(block="sas", **TINY)).save_pretrained(tmp_path)
    for options in ({"dtype": "auto"}, {"torch_dtype": "auto"}, {"dtype": torch.bfloat16}, {"low_cpu_mem_usage": True}):
        assert hea.SimplifiedTransformerForCausalLM.from_pretrained(tmp_path, **options)


def test_mask_of_the_new_tokens_alone() -> None:
    model = hea.SimplifiedTransformerForCausalLM(Config(**TINY)).eval()
    ids = torch.ones(1, 4, dtype=torch.long)
    cache = model(ids, use_cache=True).past_key_values
    with pytest.raises(
        hea.InputError,
        match="covers 4 tokens, but 4 are cached and 4 are new. Pass a mask of 8 .*another text, pass an empty cache",
    ):
        model(ids, attention_mask=torch.ones_like(ids), **{CACHE_ARGUMENT: cache})


def test_sequence_past_the_learned_table() -> None:
    model = hea.SimplifiedTransformerForCausalLM(Config(position_embedding_type="learned", **TINY)).eval()
    ids = torch.ones(1, 64, dtype=torch.long)
    cache = model(ids, use_cache=True).past_key_values
    with pytest.raises(hea.InputError, match="reaches position 64, but .* max_position_embeddings=64"):
        model(ids[:, :1], **{CACHE_ARGUMENT: cache})
    with pytest.raises(hea.InputError, match="Truncate to 64 tokens"):
        model(torch.ones(1, 65, dtype=torch.long))
    with pytest.raises(hea.InputError, match="reaches position 64"):
        model(ids[:, :4], position_ids=torch.arange(61, 65)[None])
    with pytest.raises(hea.InputError, match="reaches position 64"):
        model.generate(ids, max_new_tokens=4, min_new_tokens=4, cache_implementation="static")
    # packed documents may be longer together than the table
    positions = torch.arange(100)[None] % 50
    assert model(torch.ones(1, 100, dtype=torch.long), position_ids=positions).logits.shape[1] == 100


@pytest.mark.parametrize("kind", ["sinusoidal", "scaled_sinusoidal", "rope", "alibi", "none"])
def test_other_positions_have_no_longest_sequence(kind: str) -> None:
    model = hea.SimplifiedTransformerForCausalLM(Config(position_embedding_type=kind, **TINY)).eval()
    assert torch.isfinite(model(torch.ones(1, 150, dtype=torch.long)).logits).all()


@pytest.mark.parametrize("mechanism", ["linear", [None, "prior"]], ids=str)
def test_mechanisms_of_other_families_are_refused(mechanism: Any) -> None:
    with pytest.raises(hea.ConfigurationError, match="mechanism=.* is not a field of SimplifiedT"):
        hea.SimplifiedTransformerConfig(mechanism=mechanism)
