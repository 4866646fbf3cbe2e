"""The formula of memory against what is held: tensors that autograd keeps, bytes that the profiler counts."""

from functools import partial
from typing import Any

import pytest
import torch
import transformers
from models_cases import checkpoint_activations, switch_off_dropout
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile
from training.tiny_models import sparse_llama

import hf_efficient_attn as hea
from hf_efficient_attn.patterns import Band

SIZES = {"vocab_size": 61, "hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4}
TOKENS = 768


def simplified(block: str, **fields: Any) -> Any:
    config = hea.SimplifiedTransformerConfig(block=block, position_embedding_type="rope", **{**SIZES, **fields})
    return hea.SimplifiedTransformerModel(config)


def sparse(preset: str, **fields: Any) -> Any:
    build = getattr(hea.SparseTransformerConfig, preset)
    return hea.SparseTransformerModel(build(**{**SIZES, "max_position_embeddings": 1024, **fields}))


def spans(**fields: Any) -> Any:
    options = {"span_limit": 64, "span_init": 0.5, **fields}
    return hea.AdaptiveSpanModel(hea.AdaptiveSpanConfig.modern(**{**SIZES, **options}))


def llama(model_type: str, **fields: Any) -> Any:
    config = transformers.AutoConfig.for_model(model_type, num_key_value_heads=2, pad_token_id=0, **{**SIZES, **fields})
    return hea.sparsify(transformers.AutoModel.from_config(config), Band(64, 0))


MODELS = {
    "llama": partial(llama, "llama"),
    "mistral": partial(llama, "mistral", sliding_window=None),
    "qwen2": partial(llama, "qwen2"),
    # heads that together are narrower and wider than the hidden size
    **{
        f"{name}, heads of {width}": partial(llama, name, head_dim=width, **fields)
        for name, fields in (("llama", {}), ("mistral", {"sliding_window": None}), ("qwen2", {}))
        for width in (8, 32)
    },
    "sliding": partial(sparse, "sliding", left=64),
    "sliding, pre-norm": partial(
        sparse, "sliding", left=64, norm_position="pre", is_causal=True, num_key_value_heads=2
    ),
    "sliding, rmsnorm": partial(sparse, "sliding", left=64, norm_type="rmsnorm", gated_mlp=True),
    "strided": partial(sparse, "strided", stride=32),
    "spans": spans,
    "dynamic spans": partial(spans, span="dynamic"),
    **{block: partial(simplified, block) for block in ("pre_ln", "parallel", "v_skipinit", "sas_p", "sas_p_no_norm")},
    "sas": partial(simplified, "sas", gated_mlp=True),
}


def bytes_kept(model: Any, tokens: int) -> int:
    """Return the bytes of all tensors that autograd keeps, parameters and buffers aside."""
    own = {each.untyped_storage()._cdata for each in [*model.parameters(), *model.buffers()]}
    kept: dict[int, torch.UntypedStorage] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept.setdefault(storage._cdata, storage)
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        model(torch.arange(tokens)[None] % 50 + 3, use_cache=False)
    return sum(storage.nbytes() for number, storage in kept.items() if number not in own)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_token_keeps_in_a_layer_what_the_formula_says(name: str, dtype: torch.dtype) -> None:
    """What a layer more and a token more change, so that nothing else is counted."""
    changes, expected = [], []
    for layers in (1, 2):
        model = MODELS[name](num_hidden_layers=layers).to(dtype).train()
        switch_off_dropout(model)
        changes.append(bytes_kept(model, TOKENS + 256) - bytes_kept(model, TOKENS))
        of_tokens = [hea.training_memory(model, tokens).activations for tokens in (TOKENS, TOKENS + 256)]
        expected.append(of_tokens[1] - of_tokens[0])
    assert changes[1] - changes[0] == expected[1] - expected[0]


def bytes_alive(model: Any) -> int:
    """Return the bytes that are allocated in a forward pass and still held when the backward pass begins."""
    ids = torch.arange(TOKENS)[None] % 50 + 3
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        loss = model(ids, labels=ids, use_cache=False).loss
    alive = sum(event.self_cpu_memory_usage for event in run.events())
    assert loss.requires_grad
    return alive


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_a_forward_pass_holds_what_the_formula_says(is_checkpointed: bool) -> None:
    config = {"hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 6, "vocab_size": 512}
    model = hea.AdaptiveSpanForCausalLM(hea.AdaptiveSpanConfig.modern(num_attention_heads=4, span_limit=64, **config))
    switch_off_dropout(model.train())
    if is_checkpointed:
        checkpoint_activations(model)
    said = hea.training_memory(model, TOKENS, activation_checkpointing=is_checkpointed)
    bytes_alive(model)
    assert bytes_alive(model) == pytest.approx(said.activations + said.head, rel=0.05)


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, partial(torch.optim.SGD, momentum=0.9)])
def test_states_are_those_of_the_optimizer(optimizer_class: Any) -> None:
    model = sparse_llama().train()
    optimizer = optimizer_class(model.parameters(), lr=0.1)
    ids = torch.arange(32)[None]
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values()]
    held = sum(each.nbytes for each in states if isinstance(each, torch.Tensor) and each.ndim)
    count = 2 if optimizer_class is torch.optim.AdamW else 1
    said = hea.training_memory(model, 32, optimizer_states=count)
    assert said.optimizer == held
    assert said.weights == said.gradients == sum(each.nbytes for each in model.parameters())
    shared = hea.training_memory(model, 32, optimizer_states=count, processes=2)
    assert (shared.weights, shared.optimizer) == (said.weights // 2, said.optimizer // 2)
    assert said.total == sum(vars(said).values()) - said.per_token
    assert said.per_token == round((said.activations + said.head) / 32)


@pytest.mark.parametrize(
    "build",
    [
        lambda: transformers.BertModel(transformers.BertConfig(**SIZES, num_hidden_layers=1)),
        partial(sparse, "longformer", attention_window=4, num_hidden_layers=1, global_projections=True),
        partial(simplified, "sas", num_hidden_layers=1, span="adaptive"),
        lambda: hea.EfficientReformerModel(hea.EfficientReformerConfig(**SIZES, num_hidden_layers=2)),
        lambda: hea.RoutingTransformerModel(
            hea.RoutingTransformerConfig(**SIZES, num_hidden_layers=1, position_embedding_type="rope")
        ),
    ],
)
def test_blocks_that_are_not_known_are_refused(build: Any) -> None:
    with pytest.raises(hea.ConfigurationError, match="keeps for the backward pass is not known"):
        hea.training_memory(build(), 32)


@pytest.mark.parametrize("what", [transformers.LlamaConfig(**SIZES), torch.nn.Linear(2, 2), "llama"])
def test_what_is_no_model_of_transformers_is_refused(what: Any) -> None:
    with pytest.raises(hea.ConfigurationError, match=rf"not {type(what).__name__}\. .*from_config"):
        hea.training_memory(what, 32)


@pytest.mark.parametrize("name", ["tokens", "processes"])
def test_numbers_are_positive(name: str) -> None:
    with pytest.raises(hea.InputError, match=f"{name} is 0"):
        hea.training_memory(sparse_llama(), **{"tokens": 8, name: 0})
