"""Families whose layers can have indexers: what is read, against the dense formula, decoding, saving, and refusals."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tr
from attention_models import padding, token_ids
from torch import Tensor

import hf_efficient_attn as hea
from hf_efficient_attn.errors import ConfigurationError, UnsupportedBackendError
from hf_efficient_attn.integration.forward_context import CACHE_ARGUMENT
from hf_efficient_attn.integration.indexer import indexers_of
from hf_efficient_attn.models.parts.embeddings import rotate
from hf_efficient_attn.patterns import Band, Full

SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "initializer_range": 0.2, "pad_token_id": 0, "position_embedding_type": "rope"}
INDEXER: dict[str, int] = {"top_k": 4, "num_heads": 2}
BLOCKS = ("pre_ln", "sas", "sas_p")


def plain(family: str, **fields: Any) -> Any:
    torch.manual_seed(0)
    if family == "sparse":
        return hea.SparseTransformerForCausalLM(
            hea.SparseTransformerConfig(**{**SIZES, "is_causal": True, **fields})
        ).eval()
    config = hea.SimplifiedTransformerConfig(**{**SIZES, "block": family, "query_init_std": 0.2, **fields})
    return hea.SimplifiedTransformerForCausalLM(config).eval()


def indexed(family: str, stage: str = "sparse", **fields: Any) -> Any:
    return hea.index_stage(hea.index(plain(family, **fields), **INDEXER).eval(), stage)


def chosen_pairs(attention: Any, states: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
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
    pairs = chosen_pairs(attention, states, rotation, mask)[:, None]
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
@pytest.mark.parametrize("family", ["sparse", *BLOCKS])
def test_every_key_is_read_in_warmup_and_where_there_are_few(family: str) -> None:
    ids = token_ids(2, 20)
    expected = plain(family)(ids).logits
    short = hea.index_stage(hea.index(plain(family), top_k=20, num_heads=2), "sparse").eval()
    for model in (indexed(family, "dense"), indexed(family, "warmup"), short):
        torch.testing.assert_close(model(ids).logits, expected, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(indexed(family)(ids).logits, expected, atol=1e-3)


@pytest.mark.parametrize("family", ["sparse", "sas"])
def test_indexers_and_model_learn_each_from_its_own_loss(family: str) -> None:
    model, ids = indexed(family, "warmup").train(), token_ids(2, 20)
    own = {name for name, _ in model.named_parameters() if ".indexer." in name}
    assert {name for name, each in model.named_parameters() if each.requires_grad} == own
    model = hea.index_stage(model, "sparse")
    other = copy.deepcopy(model)
    # transformers 5.24 has renamed it
    getattr(other, "activation_checkpointing_enable", other.gradient_checkpointing_enable)()
    other(ids, labels=ids).loss.backward()
    checkpointed = {name: each.grad for name, each in other.named_parameters()}
    for loss, names in (("loss", set(checkpointed) - own), ("auxiliary_loss", own)):
        model.zero_grad()
        out = model(ids, labels=ids)
        (out.loss - out.auxiliary_loss if loss == "loss" else out.auxiliary_loss).backward()
        for name, each in model.named_parameters():
            if name not in names:
                assert each.grad is None or not each.grad.any(), name
            else:
                torch.testing.assert_close(each.grad, checkpointed[name])


@torch.no_grad()
@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("family", ["sparse", "pre_ln", "sas"])
def test_decoding_is_the_whole_text(family: str, side: str) -> None:
    model, ids = indexed(family), token_ids(2, 20)
    mask = padding(ids, side)
    whole, cache, found = model(ids, attention_mask=mask, use_cache=False).logits, tr.DynamicCache(), []
    for start, stop in ((0, 9), (9, 12), *((place, place + 1) for place in range(12, 20))):
        step = model(ids[:, start:stop], attention_mask=mask[:, :stop], **{CACHE_ARGUMENT: cache}, use_cache=True)
        found.append(step.logits)
    torch.testing.assert_close(torch.cat(found, 1)[mask.bool()], whole[mask.bool()], atol=1e-5, rtol=1e-4)
    options = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    expected = model.generate(ids, use_cache=False, **options)
    for cached in ({}, {"cache_implementation": "static", "disable_compile": True}):
        assert torch.equal(model.generate(ids, **cached, **options), expected)


@pytest.mark.parametrize("family", ["sparse", "sas"])
def test_a_saved_model_is_the_same(family: str, tmp_path: Path) -> None:
    model, ids = indexed(family), token_ids(1, 20)
    model.save_pretrained(tmp_path)
    loaded = tr.AutoModelForCausalLM.from_pretrained(tmp_path)
    for each in (loaded, copy.deepcopy(model)):
        assert torch.equal(each.eval()(ids).logits, model(ids).logits)
        assert each.train()(ids, labels=ids).auxiliary_loss > 0
    assert "An indexer of 2 heads" in str(hea.explain(model, 4096))


@torch.no_grad()
def test_packed_documents_are_read_apart_and_every_implementation_reads_the_same() -> None:
    model, ids = indexed("sparse"), token_ids(1, 20)
    positions = torch.cat((torch.arange(8), torch.arange(12)))[None]
    expected = torch.cat((model(ids[:, :8]).logits, model(ids[:, 8:]).logits), 1)
    for implementation in ("efficient", "sdpa", "eager"):
        model.set_attn_implementation(implementation)
        found = model(ids, position_ids=positions).logits
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_full_attention_may_have_a_name() -> None:
    ids = token_ids(1, 20)
    found = indexed("sparse", attention_pattern=Full())(ids).logits
    assert torch.equal(found, indexed("sparse")(ids).logits)


def test_refusals() -> None:
    for message, fields in {
        "position_embedding_type=.learned., and an indexer": {"position_embedding_type": "learned"},
        "rope_theta_per_layer": {"rope_theta_per_layer": [1e4, 1e3]},
        "has global_tokens=.first.": {"global_tokens": "first"},
    }.items():
        with pytest.raises(UnsupportedBackendError, match=message):
            indexed("sparse", **fields)
    with pytest.raises(UnsupportedBackendError, match="has span='adaptive'"):
        indexed("pre_ln", span="adaptive", span_limit=8)
    with pytest.raises(ConfigurationError, match="has an attention_pattern"):
        indexed("sparse", attention_pattern=Band(4, 0))
    encoder = hea.SparseTransformerForMaskedLM(hea.SparseTransformerConfig(**SIZES))
    with pytest.raises(UnsupportedBackendError, match="has is_causal=False"):
        hea.index(encoder, **INDEXER)
    reformer = hea.EfficientReformerConfig(**{**SIZES, "is_causal": True, "max_position_embeddings": 64})
    with pytest.raises(UnsupportedBackendError, match="follows from their own mechanism"):
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
    sizes = {key: SIZES[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    llama = tr.LlamaModel(tr.LlamaConfig(**sizes, num_attention_heads=4))
    base = hea.index(plain("sparse").model if name == "sparse" else llama, **INDEXER).train()
    ids = token_ids(2, 20)
    out = base(ids)
    out.auxiliary_loss.backward()
    assert all(each.grad is not None for module in indexers_of(base) for each in module.parameters())
    assert getattr(base.eval()(ids), "auxiliary_loss", None) is None
    head = indexed("sparse", "warmup").train()
    torch.testing.assert_close(head.model(ids).auxiliary_loss, head(ids).auxiliary_loss)
