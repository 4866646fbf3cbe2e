"""Indexers in models of transformers and of ours: what is read and learns, decoding, saving, wrapped forwards."""

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MethodType
from typing import Any

import peft
import pytest
import torch
import transformers as tr
from accelerate import Accelerator, dispatch_model
from accelerate.hooks import remove_hook_from_module
from accelerate.state import AcceleratorState
from attention_models import DECODER, build, padding, token_ids
from datasets import Dataset
from models.shared_checks import decode
from models_cases import trainer_arguments
from torch import Tensor

import hf_efficient_attn as hea
from hf_efficient_attn.errors import ConfigurationError, InputError, UnsupportedBackendError
from hf_efficient_attn.integration.forward_context import CACHE_ARGUMENT
from hf_efficient_attn.integration.indexer import indexers_of
from hf_efficient_attn.models.parts.embeddings import rotate
from hf_efficient_attn.patterns import Band

SIZES: dict[str, int] = {"top_k": 4, "num_heads": 2}


def llama(stage: str = "sparse", **options: Any) -> Any:
    return hea.index_stage(hea.index(build("llama"), **{**SIZES, **options}).eval(), stage)


def names_with_gradients(model: Any) -> set[str]:
    return {name for name, each in model.named_parameters() if each.grad is not None and bool(each.grad.any())}


@torch.no_grad()
def test_every_key_is_read_in_warmup_and_where_there_are_few() -> None:
    plain, ids = build("llama"), token_ids(2, 20)
    expected = plain(ids).logits
    for model in (llama("dense"), llama("warmup"), llama(top_k=20)):
        torch.testing.assert_close(model(ids).logits, expected, atol=1e-5, rtol=1e-4)
    found = llama()(ids).logits
    torch.testing.assert_close(found[:, :4], expected[:, :4], atol=1e-5, rtol=1e-4)
    assert not torch.allclose(found, expected, atol=1e-3)


@pytest.mark.parametrize("shifted", [False, True], ids=["labels", "shifted labels"])
def test_shares_of_the_loss_of_indexers_add_up_to_one_over_the_batches_of_a_step(shifted: bool) -> None:
    """As Trainer counts labels: a decoder predicts no first token."""
    model, ids = llama("sparse").train(), token_ids(2, 20)
    given = {"input_ids": ids, "labels": ids}
    if shifted:
        given["shift_labels"] = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    rows = [{name: each[row : row + 1] for name, each in given.items()} for row in (0, 1)]
    parts = [model(**row, num_items_in_batch=38).loss for row in rows]
    torch.testing.assert_close(sum(parts), model(**given).loss)


def test_only_indexers_learn_in_warmup_and_each_from_its_own_loss_when_sparse() -> None:
    ids = token_ids(2, 20)
    model = llama("warmup").train()
    own = {name for name, _ in model.named_parameters() if ".indexer." in name}
    assert {name for name, each in model.named_parameters() if each.requires_grad} == own
    # even if somebody thaws the rest
    model.requires_grad_(True)
    out = model(ids, labels=ids)
    out.loss.backward()
    assert names_with_gradients(model) == own
    plain = build("llama")(ids, labels=ids).loss
    torch.testing.assert_close(out.loss, plain + out.auxiliary_loss)

    model = llama("sparse").train()
    out = model(ids, labels=ids)
    rest = {name for name, _ in model.named_parameters()} - own
    (out.loss - out.auxiliary_loss).backward(retain_graph=True)
    assert names_with_gradients(model) == rest
    model.zero_grad()
    out.auxiliary_loss.backward()
    assert names_with_gradients(model) == own
    assert not hasattr(model.eval()(ids, labels=ids), "auxiliary_loss")


def test_checkpointed_layers_learn_the_same() -> None:
    ids, model = token_ids(1, 12), llama().train()
    slopes = []
    for checkpointing in (False, True):
        if checkpointing:
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        slopes.append([each.grad.clone() for each in model.parameters()])
    for one, other in zip(*slopes, strict=True):
        torch.testing.assert_close(one, other)
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)({"use_reentrant": True})
    with pytest.raises(UnsupportedBackendError, match="use_reentrant"):
        model(ids, labels=ids)


@torch.no_grad()
@pytest.mark.parametrize("side", ["none", "left"])
def test_decoding_is_the_whole_text(side: str) -> None:
    model, ids = llama(), token_ids(2, 20)
    mask = padding(ids, side)
    whole, real = model(ids, attention_mask=mask, use_cache=False).logits, mask.bool()
    found, _ = decode(model, ids, [9, 3, *[1] * 8], tr.DynamicCache(), mask)
    torch.testing.assert_close(found[real], whole[real], atol=1e-5, rtol=1e-4)
    options = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    expected = model.generate(ids, use_cache=False, **options)
    for cached in ({}, {"cache_implementation": "static", "disable_compile": True}, {"num_beams": 2}):
        wanted = model.generate(ids, use_cache=False, num_beams=2, **options) if "num_beams" in cached else expected
        assert torch.equal(model.generate(ids, **cached, **options), wanted)


@pytest.mark.parametrize("stage", ["warmup", "sparse"])
def test_a_saved_model_is_the_same(tmp_path: Path, stage: str) -> None:
    model, ids = llama(stage), token_ids(1, 20)
    model.save_pretrained(tmp_path)
    loaded = tr.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config._attn_implementation == "efficient"
    assert (tmp_path / "modeling_hf_efficient_attn.py").is_file()
    assert "HfEfficientAttnLlamaForCausalLM" in (tmp_path / "config.json").read_text()
    for each in (loaded, copy.deepcopy(model)):
        assert torch.equal(each.eval()(ids).logits, model(ids).logits)
        learning = {name for name, parameter in each.named_parameters() if parameter.requires_grad}
        assert learning == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        assert each.train()(ids, labels=ids).auxiliary_loss > 0


def test_trainer_raises_the_recall(tmp_path: Path) -> None:
    model, ids = llama("sparse", num_heads=4), token_ids(8, 24)
    before = hea.index_recall(model, input_ids=ids).mean()
    args = trainer_arguments(
        tmp_path, max_steps=30, learning_rate=1e-2, per_device_train_batch_size=4, gradient_accumulation_steps=2
    )
    data = Dataset.from_dict({"input_ids": ids.tolist(), "labels": ids.tolist()})
    tr.Trainer(model, args, train_dataset=data).train()
    assert hea.index_recall(model, input_ids=ids).mean() > before + 0.03


# peft asks by a name that transformers 5.23 has given up
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_adapters_learn_beside_indexers() -> None:
    model, ids = llama(), token_ids(1, 20)
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(target_modules=["v_proj"], modules_to_save=["indexer"], init_lora_weights=False)
    )
    with pytest.raises(ConfigurationError, match="it would train frozen weights"):
        hea.index_stage(adapted, "sparse")
    out = adapted.train()(input_ids=ids, labels=ids)
    out.loss.backward()
    learnt = names_with_gradients(adapted)
    assert any("lora_B" in name for name in learnt)
    assert any("indexer" in name for name in learnt)


def test_refusals() -> None:
    model, ids = llama(), token_ids(1, 20)
    with pytest.raises(ConfigurationError, match="already has indexers"):
        hea.index(model, **SIZES)
    with pytest.raises(ConfigurationError, match="has no indexers"):
        hea.index_stage(build("llama"), "sparse")
    with pytest.raises(ConfigurationError, match="stage='late'"):
        hea.index_stage(model, "late")
    with pytest.raises(ConfigurationError, match="LlamaConfig"):
        hea.PatternCache(model.config)
    with pytest.raises(ConfigurationError, match="top_k=0 must be"):
        hea.index(build("llama"), top_k=0)
    with pytest.raises(ConfigurationError, match="head_dim=4"):
        hea.index(build("llama"), head_dim=4, **SIZES)
    with pytest.raises(UnsupportedBackendError, match="needs a decoder with rotary positions"):
        hea.index(build("gpt2"), **SIZES)
    with pytest.raises(UnsupportedBackendError, match="do not attend to all earlier tokens"):
        hea.index(build("gemma3"), **SIZES)
    with pytest.raises(UnsupportedBackendError, match="rotates neighbouring dimensions"):
        hea.index(tr.CohereForCausalLM(tr.CohereConfig(**DECODER)), **SIZES)
    cache = hea.index_stage(model, "dense")(ids, use_cache=True).past_key_values
    hea.index_stage(model, "sparse")
    with pytest.raises(InputError, match="The indexer knows only 20 of"):
        model(ids, **{CACHE_ARGUMENT: cache})
    model.set_attn_implementation("sdpa")
    with pytest.raises(UnsupportedBackendError, match="would attend to all keys"):
        model(ids)


@pytest.mark.parametrize("name", ["qwen3", "mistral"])
def test_other_decoders(name: str) -> None:
    model, ids = hea.index(build(name), **SIZES).train(), token_ids(1, 20)
    assert len(indexers_of(model)) == 2
    hea.index_stage(model, "sparse")(ids, labels=ids).loss.backward()
    assert all(each.grad is not None for each in model.parameters())


OWN_SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
OWN_SIZES |= {"num_attention_heads": 4, "initializer_range": 0.2, "pad_token_id": 0, "position_embedding_type": "rope"}
INDEXER: dict[str, int] = {"top_k": 4, "num_heads": 2}
BLOCKS = ("pre_ln", "sas", "sas_p")


def plain(family: str, **fields: Any) -> Any:
    torch.manual_seed(0)
    if family == "sparse":
        return hea.SparseTransformerForCausalLM(
            hea.SparseTransformerConfig(**{**OWN_SIZES, "is_causal": True, **fields})
        ).eval()
    config = hea.SimplifiedTransformerConfig(**{**OWN_SIZES, "block": family, "query_init_std": 0.2, **fields})
    return hea.SimplifiedTransformerForCausalLM(config).eval()


def indexed(family: str, stage: str = "sparse", **fields: Any) -> Any:
    return hea.index_stage(hea.index(plain(family, **fields), **INDEXER).eval(), stage)


def selected_pairs(attention: Any, states: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
    """Return which pairs a layer's indexer leaves, by the definition: [B, queries, keys]."""
    queries, keys, weights = attention.indexer(states, *rotation)
    scores = torch.einsum("bth,bths->bts", weights, torch.einsum("bthd,bsd->bths", queries, keys).relu())
    is_open = torch.ones_like(scores, dtype=torch.bool).tril() & mask[:, None].bool() & mask[:, :, None].bool()
    # of equal scores the first
    order = scores.masked_fill(~is_open, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    best = order[..., : INDEXER["top_k"]]
    return torch.zeros_like(is_open).scatter(2, best, True) & is_open


def by_formula(attention: Any, states: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
    """Return a layer's attention over all pairs, with the mean C of shaped attention over what is read."""
    pairs = selected_pairs(attention, states, rotation, mask)[:, None]
    maps = (attention.q_proj, attention.k_proj, attention.v_proj or torch.nn.Identity())
    query, key, value = (each(states).unflatten(-1, (4, 8)).transpose(1, 2) for each in maps)
    scores = rotate(query, *rotation) @ rotate(key, *rotation).transpose(2, 3) * 8**-0.5
    read = scores.masked_fill(~pairs, -torch.inf).softmax(-1).nan_to_num(0) @ value
    read, value = read.transpose(1, 2), value.transpose(1, 2)
    if getattr(attention, "has_head_gains", False):
        mean = pairs.to(states.dtype) / pairs.sum(-1, keepdim=True).clamp(min=1)
        centre = (mean @ value.transpose(1, 2)).transpose(1, 2)
        read = attention.identity_gain(value) + attention.softmax_gain(read) - attention.centering_gain(centre)
    return (attention.o_proj or torch.nn.Identity())(read.flatten(2))


@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("family", ["sparse", *BLOCKS])
def test_a_layer_is_the_dense_formula(family: str, side: str) -> None:
    model, ids = indexed(family).double(), token_ids(2, 20)
    mask = torch.ones_like(ids) if side == "none" else padding(ids, side)
    attention, seen = model.model.layers[1].self_attn, {}

    def note(_: Any, inputs: Any, options: Any, output: Any) -> None:
        seen.update(states=inputs[0], rotation=options["position_embeddings"], out=output[0])

    attention.register_forward_hook(note, with_kwargs=True)
    model(ids, attention_mask=mask)
    real, states = mask.bool(), seen["states"]
    expected = by_formula(attention, states, seen["rotation"], mask)
    torch.testing.assert_close(seen["out"][real], expected[real])
    weights = torch.randn_like(expected)[real]
    learning = [states, *(each for name, each in attention.named_parameters() if "indexer" not in name)]
    found, wanted = (torch.autograd.grad((each[real] * weights).sum(), learning) for each in (seen["out"], expected))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


@torch.no_grad()
@pytest.mark.parametrize(("family", "side"), [("sparse", "left"), ("sas", "none")])
def test_decoding_of_families_is_the_whole_text(family: str, side: str) -> None:
    model, ids = indexed(family), token_ids(2, 20)
    mask = padding(ids, side)
    whole, real = model(ids, attention_mask=mask, use_cache=False).logits, mask.bool()
    found, _ = decode(model, ids, [9, 3, *[1] * 8], tr.DynamicCache(), mask)
    torch.testing.assert_close(found[real], whole[real], atol=1e-5, rtol=1e-4)
    options = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    expected = model.generate(ids, use_cache=False, **options)
    for cached in ({}, {"cache_implementation": "static", "disable_compile": True}):
        assert torch.equal(model.generate(ids, **cached, **options), expected)


@torch.no_grad()
def test_packed_documents_are_read_apart_and_every_implementation_reads_the_same() -> None:
    model, ids = indexed("sparse"), token_ids(1, 20)
    positions = torch.cat((torch.arange(8), torch.arange(12)))[None]
    expected = torch.cat((model(ids[:, :8]).logits, model(ids[:, 8:]).logits), 1)
    for implementation in ("efficient", "sdpa", "eager"):
        model.set_attn_implementation(implementation)
        found = model(ids, position_ids=positions).logits
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_families_that_refuse() -> None:
    for message, fields in {
        "position_embedding_type=.learned., but an indexer": {"position_embedding_type": "learned"},
        "rope_theta_per_layer": {"rope_theta_per_layer": [1e4, 1e3]},
        "has global_tokens=.first.": {"global_tokens": "first"},
    }.items():
        with pytest.raises(UnsupportedBackendError, match=message):
            indexed("sparse", **fields)
    with pytest.raises(UnsupportedBackendError, match="has span='adaptive'"):
        indexed("pre_ln", span="adaptive", span_limit=8)
    with pytest.raises(ConfigurationError, match="has an attention_pattern"):
        indexed("sparse", attention_pattern=Band(4, 0))
    encoder = hea.SparseTransformerForMaskedLM(hea.SparseTransformerConfig(**OWN_SIZES))
    with pytest.raises(UnsupportedBackendError, match="has is_causal=False"):
        hea.index(encoder, **INDEXER)
    reformer = hea.EfficientReformerConfig(**{**OWN_SIZES, "is_causal": True, "max_position_embeddings": 64})
    with pytest.raises(UnsupportedBackendError, match="by their own mechanism"):
        hea.index(hea.EfficientReformerForCausalLM(reformer), **INDEXER)
    model, ids = indexed("sparse"), token_ids(1, 20)
    with pytest.raises(UnsupportedBackendError, match="does not work with global tokens"):
        model(ids, global_attention_mask=(ids == ids[0, 0]).long())
    hea.sparsify(model, Band(4, 0))
    with pytest.raises(UnsupportedBackendError, match="attention_pattern"):
        model(ids)


@pytest.mark.parametrize("name", ["sparse", "llama"])
def test_a_model_without_a_head_has_the_loss_of_its_indexers(name: str) -> None:
    """A head around it, of whatever class, adds the loss of the base to its own."""
    sizes = {key: OWN_SIZES[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    llama = tr.LlamaModel(tr.LlamaConfig(**sizes, num_attention_heads=4))
    base = hea.index(plain("sparse").model if name == "sparse" else llama, **INDEXER).train()
    ids = token_ids(2, 20)
    out = base(ids)
    out.auxiliary_loss.backward()
    assert all(each.grad is not None for module in indexers_of(base) for each in module.parameters())
    assert getattr(base.eval()(ids), "auxiliary_loss", None) is None
    head = indexed("sparse", "warmup").train()
    torch.testing.assert_close(head.model(ids).auxiliary_loss, head(ids).auxiliary_loss)


def sparse_stage(model: Any) -> Any:
    return hea.index_stage(hea.index(model, **SIZES), "sparse").train()


def hooked(model: Any) -> Any:
    return dispatch_model(model, {"": "cpu"}, force_hooks=True)


@pytest.fixture(autouse=True)
def _no_other_accelerator() -> Iterator[None]:
    """The settings of the first `Accelerator` of a process, as of a test that trains before, hold for all others."""
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


def prepared(model: Any) -> Any:
    return Accelerator(mixed_precision="bf16", cpu=True).prepare(model)


def unwrapped(model: Any) -> Any:
    return Accelerator(cpu=True).unwrap_model(model, keep_fp32_wrapper=False)


def in_a_file(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


def steps(*functions: Callable[[Any], Any]) -> Any:
    """Return what a model becomes by these in turn."""
    model = build("llama")
    for function in functions:
        model = function(model)
    return model


WRAPPED = {
    "hooks before": (hooked, sparse_stage),
    "hooks after": (sparse_stage, hooked),
    "hooks after, and taken away": (sparse_stage, hooked, lambda model: remove_hook_from_module(model, recurse=True)),
    "autocast before": (prepared, sparse_stage),
    "autocast after": (sparse_stage, prepared),
    "autocast after, and taken away": (sparse_stage, prepared, unwrapped),
    "a file of a copy, with hooks": (sparse_stage, copy.deepcopy, in_a_file, hooked),
}


def learnt(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of the indexers, and the gradients of all parameters."""
    ids = token_ids(2, 20)
    model.zero_grad()
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    gradients = {name: each.grad for name, each in model.named_parameters()}
    assert None not in gradients.values()
    return out.auxiliary_loss.detach(), gradients


@pytest.mark.parametrize("name", WRAPPED)
def test_the_loss_of_indexers_arrives(name: str) -> None:
    torch.manual_seed(1)
    expected = steps(sparse_stage)
    model = steps(*WRAPPED[name])
    # indexers are drawn anew
    model.load_state_dict(expected.state_dict())
    is_narrow = name in ("autocast before", "autocast after")
    tolerances: dict[str, float] = {"rtol": 0.2, "atol": 0.01} if is_narrow else {}
    torch.testing.assert_close(learnt(model)[0], learnt(expected)[0], **tolerances)
    if not is_narrow:
        torch.testing.assert_close(learnt(model)[1], learnt(expected)[1])


def test_a_replica_computes_with_its_own_parameters() -> None:
    """As those that DataParallel makes."""
    model = steps(sparse_stage)
    replicas = {module: module._replicate_for_data_parallel() for module in model.modules()}
    copies = {name: each.detach().clone().requires_grad_() for name, each in model.named_parameters()}
    for prefix, module in model.named_modules():
        for name, child in module._modules.items():
            setattr(replicas[module], name, replicas[child])
        for name, parameter in module._parameters.items():
            setattr(replicas[module], name, None if parameter is None else copies[f"{prefix}.{name}"])
    ids = token_ids(2, 20)
    out = replicas[model](input_ids=ids, labels=ids)
    out.loss.backward()
    loss, gradients = learnt(model)
    torch.testing.assert_close(out.auxiliary_loss, loss)
    torch.testing.assert_close({name: each.grad for name, each in copies.items()}, gradients)


def test_a_model_of_the_same_class_without_indexers_is_as_before() -> None:
    plain = tr.LlamaForCausalLM
    model, ids = steps(sparse_stage), token_ids(1, 12)
    assert type(build("llama")) is plain
    assert type(model).__name__ == plain.__name__
    assert isinstance(model, plain)
    other = type(model)(tr.LlamaConfig(**DECODER)).train()
    assert not hasattr(other(ids, labels=ids), "auxiliary_loss")


@pytest.mark.parametrize("name", ["StableLm", "Nemotron"])
def test_layers_that_pass_no_arguments_on_are_refused(name: str) -> None:
    model = getattr(tr, f"{name}ForCausalLM")(getattr(tr, f"{name}Config")(**DECODER))
    with pytest.raises(UnsupportedBackendError, match=f"layers of {name}ForCausalLM do not pass keyword arguments on"):
        hea.index(model, **SIZES)
    assert not hasattr(model.config, "attention_indexer")


def without_options(layer: Any) -> None:
    forward = layer.forward

    def passing_nothing_on(self: Any, *inputs: Any, **options: Any) -> Any:
        return forward(*inputs, **{name: each for name, each in options.items() if not name.startswith("index_")})

    layer.forward = MethodType(passing_nothing_on, layer)


class Skipped(torch.nn.Module):
    def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:
        return hidden_states


def test_a_loss_that_does_not_arrive_is_said() -> None:
    model, ids = steps(sparse_stage), token_ids(1, 20)
    without_options(model.model.layers[1])
    with pytest.raises(UnsupportedBackendError, match="has an indexer .* its loss would be lost"):
        model(ids, labels=ids)
    with pytest.raises(UnsupportedBackendError, match="LlamaForCausalLM"):
        hea.index_recall(model, input_ids=ids)
    model = steps(sparse_stage)
    model.model.layers[1] = Skipped()
    with pytest.raises(UnsupportedBackendError, match="LlamaForCausalLM"):
        model(ids, labels=ids)
