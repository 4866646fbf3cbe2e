"""Where others replace what computes attention before the first forward pass, a model is refused."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.models.llama import modeling_llama

import hf_efficient_attn as hea
from hf_efficient_attn.patterns import Band

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
IDS = torch.arange(1, 25)[None]


def dense_attention(
    self: Any, hidden_states: torch.Tensor, position_embeddings: Any = None, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    """Compute full causal attention past the interface, as libraries with fused kernels do."""
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    query, key, value = (
        projection(hidden_states).view(shape).transpose(1, 2) for projection in (self.q_proj, self.k_proj, self.v_proj)
    )
    query, key = modeling_llama.apply_rotary_pos_emb(query, key, *position_embeddings)
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    return self.o_proj(out.transpose(1, 2).flatten(2)), None


def dense_layer(self: Any, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
    """Compute a layer without calling the module of its attention."""
    attended = dense_attention(self.self_attn, self.input_layernorm(hidden_states), options["position_embeddings"])[0]
    hidden_states = hidden_states + attended
    return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


def build(is_sparse: bool = True) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, pad_token_id=0, initializer_range=0.3)
    model = transformers.LlamaForCausalLM(config).eval()
    return hea.sparsify(model, Band(3, 0)) if is_sparse else model


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(IDS, use_cache=False).logits


def of_class(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(modeling_llama.LlamaAttention, "forward", dense_attention)


def of_layer_class(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(modeling_llama.LlamaDecoderLayer, "forward", dense_layer)


def of_one_module(model: Any, patch: pytest.MonkeyPatch) -> None:
    module = model.model.layers[1].self_attn
    module.forward = dense_attention.__get__(module)


def whole_modules(model: Any, patch: pytest.MonkeyPatch) -> None:
    dense = type("DenseAttention", (modeling_llama.LlamaAttention,), {"forward": dense_attention})
    for layer in model.model.layers:
        replaced, layer.self_attn = layer.self_attn, dense(model.config, layer.self_attn.layer_idx)
        layer.self_attn.load_state_dict(replaced.state_dict())


def configs_of_layers(model: Any, patch: pytest.MonkeyPatch) -> None:
    for layer in model.model.layers:
        layer.self_attn.config = copy.deepcopy(model.config)
        del layer.self_attn.config.attention_pattern


def registered_functions(model: Any, patch: pytest.MonkeyPatch) -> None:
    for interface in (AttentionInterface, AttentionMaskInterface):
        patch.setitem(interface._global_mapping, "efficient", interface._global_mapping["sdpa"])


WAYS = (of_class, of_layer_class, of_one_module, whole_modules, configs_of_layers, registered_functions)


@pytest.mark.parametrize("replace", WAYS)
def test_replaced_after_sparsify_is_refused(replace: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first forward pass after that, of the whole model and of that below its head; later ones, too."""
    model = build()
    replace(model, monkeypatch)
    for called in (model, model.model, model):
        with pytest.raises(hea.UnsupportedBackendError, match="has computed without its attention_pattern"):
            called(IDS, use_cache=False)
    monkeypatch.undo()
    if replace in (of_class, of_layer_class, registered_functions):
        assert torch.equal(logits(model), logits(build()))


def test_compiling_and_exporting_what_was_replaced_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    model = build()
    of_class(model, monkeypatch)
    with pytest.raises(Exception, match="has computed without its attention_pattern"):
        logits(torch.compile(model, backend="eager"))
    with pytest.raises(hea.UnsupportedBackendError, match="has computed without its attention_pattern"):
        torch.export.export(model, (IDS,), {"use_cache": False})


def test_what_still_calls_the_interface_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Methods that are wrapped, of classes and of modules, layers that are checkpointed, adapters."""
    model, expected = build(), logits(build())
    assert torch.equal(logits(model), expected)
    plain = modeling_llama.LlamaAttention.forward
    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", lambda *args, **options: plain(*args, **options))
    for layer in model.model.layers:
        layer.forward = layer.forward
    model.model.layers[0] = torch.nn.Sequential(model.model.layers[0])
    model.model.layers[0].forward = model.model.layers[0][0].forward
    for _ in range(2):
        assert torch.equal(logits(model), expected)


def test_layers_that_are_dropped_at_random_are_not_refused() -> None:
    torch.manual_seed(0)
    sizes = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_layers": 2, "decoder_layers": 1}
    config = transformers.BartConfig(vocab_size=64, d_model=16, **sizes, encoder_layerdrop=0.9)
    model = hea.sparsify(transformers.BartForConditionalGeneration(config), Band(2, 2)).train()
    for _ in range(4):
        model(IDS, decoder_input_ids=IDS)
    model.eval()(IDS, decoder_input_ids=IDS)


def saved(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": saved,
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_follow_the_pattern(name: str) -> None:
    """In half precision as well, and on another implementation not at all."""
    model, expected = build(), logits(build())
    logits(model)
    copied = COPIES[name](model)
    assert torch.equal(logits(copied), expected)
    assert (logits(COPIES[name](model).half()) - expected).abs().max() < 0.1 * (
        expected - logits(build(False))
    ).abs().max()
    copied.set_attn_implementation("sdpa")
    with pytest.raises(hea.UnsupportedBackendError, match="attn_implementation is 'sdpa'"):
        copied(IDS)
