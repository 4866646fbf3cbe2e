"""Longformer and its relative positions against dense definitions in float64; BigBird as transformers evaluates it."""

from typing import Any

import pytest
import torch
from families import BY_NAME
from in_tree_models import in_tree
from in_tree_models import inputs_of as in_tree_inputs
from models_cases import TINY, randomize
from torch import Tensor

import hf_efficient_attn as hea
from hf_efficient_attn.layout.score_terms import Distance
from hf_efficient_attn.models.parts.embeddings import sinusoids
from hf_efficient_attn.models.parts.relative_positions import within
from hf_efficient_attn.patterns import Band, Dilated, Pattern, PerHead


def dense_longformer(
    attention: torch.nn.Module, hidden: Tensor, side: int, is_token: Tensor, is_global: Tensor, step: int = 1
) -> Tensor:
    """Return a `SparseAttention`'s output [B, T, hidden_size] by loops over examples and queries.

    A query that is not global reads the tokens within `side` steps and all global ones by the local projections; a
    global one reads every token by its own (Beltagy et al., section 3.1). Rows of padding are the output bias.
    """
    other = attention.global_attention
    out = torch.zeros_like(hidden)
    for row, states in enumerate(hidden):
        local = [heads(p(states), attention.num_heads) for p in (attention.q_proj, attention.k_proj, attention.v_proj)]
        chosen = [heads(p(states), attention.num_heads) for p in (other.q_proj, other.k_proj, other.v_proj)]
        for query in range(len(states)):
            if not is_token[row, query]:
                continue
            q, k, v = chosen if is_global[row, query] else local
            keys = [
                key
                for key in range(len(states))
                if is_token[row, key]
                and (is_global[row, query] or is_global[row, key] or reads(query, key, side, step))
            ]
            scores = torch.einsum("hd,hkd->hk", q[:, query], k[:, keys]) * attention.head_dim**-0.5
            weighted = torch.einsum("hk,hkd->hd", torch.softmax(scores, -1), v[:, keys])
            out[row, query] = weighted.flatten()
    return attention.o_proj(out)


def reads(query: int, key: int, side: int, step: int) -> bool:
    """Return whether a window of `side` keys on each side, `step` tokens apart, has the key."""
    return (key - query) % step == 0 and abs(key - query) <= side * step


def heads(states: Tensor, num_heads: int) -> Tensor:
    """Return [T, hidden_size] as [H, T, D]."""
    return states.unflatten(-1, (num_heads, -1)).transpose(0, 1)


Config = hea.SparseTransformerConfig
TOKENS = 19


def model_of(**fields: Any) -> Any:
    torch.manual_seed(0)
    config = Config.longformer(**{**TINY, "attention_window": 6, "num_hidden_layers": 1, "pad_token_id": 0, **fields})
    return randomize(hea.SparseTransformerModel(config).eval()).double()


def inputs_of(hidden_size: int = TINY["hidden_size"]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(3, TOKENS, hidden_size, dtype=torch.float64, generator=generator)
    is_token = torch.ones(3, TOKENS, dtype=torch.bool)
    is_token[0, 15:] = is_token[1, :4] = False
    is_global = torch.zeros_like(is_token)
    is_global[0, [0, 9]] = is_global[1, 4] = is_global[2, [1, 2, 7, 16]] = True
    return hidden, is_token, is_global


def attended(model: Any, hidden: torch.Tensor, is_token: torch.Tensor, is_global: torch.Tensor) -> torch.Tensor:
    """Return what the only layer's attention gives for these hidden states, as the model calls it."""
    seen = {}

    def take(module: Any, args: Any, kwargs: Any) -> None:
        seen.update(kwargs)

    handle = model.layers[0].self_attn.register_forward_pre_hook(take, with_kwargs=True)
    model(inputs_embeds=hidden, attention_mask=is_token.long(), global_attention_mask=is_global.long())
    handle.remove()
    return model.layers[0].self_attn(hidden, **seen)[0]


# 4 heads of 8: with 16 heads of 2 the keys of all tokens are made, with 1 head of 32 they are not
@pytest.mark.parametrize("num_heads", [1, 4, 16])
@pytest.mark.parametrize("step", [1, 2])
def test_equals_the_definition(num_heads: int, step: int) -> None:
    model = model_of(num_attention_heads=num_heads, attention_dilation=step)
    attention = model.layers[0].self_attn
    hidden, is_token, is_global = inputs_of()
    expected = dense_longformer(attention, hidden.requires_grad_(), 3, is_token, is_global, step)
    direction = torch.randn(expected.shape, dtype=torch.float64) * is_token[..., None]
    parameters = [hidden, *attention.parameters()]
    expected_gradients = torch.autograd.grad((expected * direction).sum(), parameters)
    actual = attended(model, hidden, is_token, is_global)
    torch.testing.assert_close(actual[is_token], expected[is_token], atol=1e-10, rtol=1e-10)
    for actual_gradient, expected_gradient in zip(
        torch.autograd.grad((actual * direction).sum(), parameters), expected_gradients, strict=True
    ):
        torch.testing.assert_close(actual_gradient, expected_gradient, atol=1e-9, rtol=1e-9)


def test_projections_start_as_copies_and_can_be_copied_again() -> None:
    model = hea.SparseTransformerModel(Config.longformer(**{**TINY, "attention_window": 6}))
    for layer in model.layers:
        attention = layer.self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            local, copied = getattr(attention, name), getattr(attention.global_attention, name)
            assert torch.equal(local.weight, copied.weight)
            assert local.weight.data_ptr() != copied.weight.data_ptr()
            with torch.no_grad():
                local.weight.add_(1.0)
            assert not torch.equal(local.weight, copied.weight)
    model.copy_local_to_global()
    attention = model.layers[1].self_attn
    assert torch.equal(attention.k_proj.weight, attention.global_attention.k_proj.weight)


def test_checkpoint_without_global_projections_gets_copies(tmp_path: Any) -> None:
    fields = {**TINY, "attention_window": 6}
    without = randomize(hea.SparseTransformerModel(Config.longformer(**fields, global_projections=False)))
    without.save_pretrained(tmp_path)
    model = hea.SparseTransformerModel.from_pretrained(tmp_path, global_projections=True)
    attention = model.layers[0].self_attn
    assert torch.equal(attention.global_attention.v_proj.weight, without.layers[0].self_attn.v_proj.weight)
    assert torch.equal(attention.global_attention.v_proj.bias, attention.v_proj.bias)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_adapters_on_global_projections_are_used() -> None:
    """A wrapped projection is called, not bypassed by the short cut for few global tokens."""
    peft = pytest.importorskip("peft")
    model = model_of(num_attention_heads=1).float()
    ids = torch.randint(3, 60, (2, 12))
    globals_ = torch.zeros_like(ids)
    globals_[:, 0] = 1
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=r".*global_attention\.[kv]_proj"))
    before = adapted(ids, global_attention_mask=globals_).last_hidden_state
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    after = adapted(ids, global_attention_mask=globals_).last_hidden_state
    assert not torch.allclose(before, after, atol=1e-3)
    after.sum().backward()
    assert all(p.grad is not None for n, p in adapted.named_parameters() if "lora_" in n)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_projections_are_copied_behind_adapters() -> None:
    peft = pytest.importorskip("peft")
    model = hea.SparseTransformerModel(Config.longformer(**{**TINY, "attention_window": 6}))
    with torch.no_grad():
        for layer in model.layers:
            layer.self_attn.k_proj.weight.normal_()
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "k_proj"]))
    adapted.base_model.model.copy_local_to_global()
    attention = adapted.base_model.model.layers[0].self_attn
    copied = attention.global_attention.k_proj.base_layer.weight
    assert torch.equal(copied, attention.k_proj.base_layer.weight)


class OnlyLinear(torch.Tensor):
    """A weight that can do nothing but map, as quantised ones."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.nn.functional.linear:
            plain = [each.as_subclass(torch.Tensor) if isinstance(each, cls) else each for each in args]
            return function(*plain, **(kwargs or {}))
        if getattr(function, "__name__", "") in ("__get__", "requires_grad_", "detach", "__repr__"):
            return super().__torch_function__(function, types, args, kwargs or {})
        raise NotImplementedError(f"{function} of a quantised weight")


def test_special_weights_are_asked_for_nothing_but_their_map() -> None:
    """Quantised by torchao, the module stays what it was, and its weight is of another type."""
    model: Any = BY_NAME["sparse-longformer-first"].model()
    ids = torch.arange(3, 43)[None]
    with torch.no_grad():
        expected = model(ids).logits
        for layer in model.model.layers:
            for projection in (layer.self_attn.global_attention.k_proj, layer.self_attn.global_attention.v_proj):
                projection.weight = torch.nn.Parameter(projection.weight.data.as_subclass(OnlyLinear), False)
                assert type(projection.weight) is OnlyLinear
        torch.testing.assert_close(model(ids).logits, expected, atol=1e-5, rtol=1e-5)


def test_equals_the_formula() -> None:
    pattern = PerHead([Band(3, 0)] * 3 + [Dilated(6, 0, 2)])
    config = hea.SparseTransformerConfig.longformer_char_lm(
        **{**TINY, "num_hidden_layers": 1, "attention_pattern": pattern, "attention_dropout": 0.0}
    )
    model = randomize(hea.SparseTransformerModel(config).eval()).double()
    attention = model.layers[0].self_attn
    hidden = torch.randn(2, 13, TINY["hidden_size"], dtype=torch.float64, requires_grad=True)
    q, k, v = (
        p(hidden).unflatten(-1, (4, 8)).transpose(1, 2) for p in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    index = torch.arange(13)
    distance = index[:, None] - index
    relative = attention.relative
    rows = relative.r_proj(sinusoids(distance, TINY["hidden_size"]).double()).unflatten(-1, (4, 8))
    scores = (q + relative.content_bias) @ k.transpose(2, 3)
    scores = scores + torch.einsum("bhid,ijhd->bhij", q + relative.position_bias, rows)
    allowed = torch.stack([head.causal().allowed(index[:, None], index) for head in pattern.heads(4)])
    weights = torch.softmax((scores * 8**-0.5).masked_fill(~allowed, -torch.inf), -1)
    expected = attention.o_proj((weights @ v).transpose(1, 2).flatten(2))
    actual = attention(hidden)[0]
    torch.testing.assert_close(actual, expected, atol=1e-10, rtol=1e-10)
    parameters = [hidden, *attention.parameters()]
    direction = torch.randn_like(expected)
    for ours, theirs in zip(
        torch.autograd.grad((actual * direction).sum(), parameters),
        torch.autograd.grad((expected * direction).sum(), parameters),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-9)


def test_no_global_tokens_by_a_call() -> None:
    model = hea.SparseTransformerModel(hea.SparseTransformerConfig.longformer_char_lm(**TINY))
    ids = torch.randint(3, 60, (1, 9))
    with pytest.raises(hea.InputError, match="global_attention_mask"):
        model(ids, global_attention_mask=torch.ones_like(ids))


def distances_made(pattern: Pattern, tokens: int, **fields: Any) -> list[tuple[int, ...]]:
    """Return the shapes of all scores of distances that one layer makes, [B, H, T, distances]."""
    config = hea.SparseTransformerConfig.longformer_char_lm(
        **{**TINY, "num_hidden_layers": 1, "attention_pattern": pattern, **fields}
    )
    attention = hea.SparseTransformerModel(config).eval().layers[0].self_attn
    shapes = []
    attention.relative.register_forward_hook(lambda *call: shapes.extend(term.values.shape for term in call[-1][1]))
    attention(torch.randn(2, tokens, TINY["hidden_size"]))
    return [tuple(shape) for shape in shapes]


def test_no_more_distances_than_there_are_keys() -> None:
    assert distances_made(Band(60, 0), 5) == [(2, 4, 5, 5)]
    assert distances_made(Band(60, 60), 5, is_causal=False) == [(2, 4, 5, 9)]
    assert distances_made(Band(3, 0), 20) == [(2, 4, 20, 4)]
    assert distances_made(Band(3, 0), 1) == [(2, 4, 1, 1)]


def test_no_head_makes_the_distances_of_another() -> None:
    assert distances_made(PerHead([Band(3, 0)] * 3 + [Dilated(12, 0, 4)]), 20) == [(2, 3, 20, 4), (2, 1, 20, 13)]


@pytest.mark.parametrize(
    ("reach", "num_keys", "expected"),
    [((-9, 9), 4, (-3, 3)), ((5, 9), 4, (5, 5)), ((-9, -5), 4, (-5, -5)), ((0, 9), 100, (0, 9)), ((0, 9), 1, (0, 0))],
)
def test_reach_within_the_keys(reach: tuple[int, int], num_keys: int, expected: tuple[int, int]) -> None:
    assert within(Distance(*reach), num_keys) == Distance(*expected)


SHAPE = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LENGTHS = (33, 60)


def build(**fields: Any) -> Any:
    config = Config.bigbird_itc(block_tokens=4, **{**SHAPE, "random_blocks_in_eval": "transformers", **fields})
    return randomize(hea.SparseTransformerModel(config).eval())


def packed() -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Return two documents, and the inputs of both in one row."""
    documents = [torch.randint(1, 50, (1, tokens)) for tokens in LENGTHS]
    positions = torch.cat([torch.arange(tokens) for tokens in LENGTHS])[None]
    return documents, {"input_ids": torch.cat(documents, 1), "position_ids": positions}


@pytest.mark.parametrize("padding", [(0, 0), (3, 5)])
def test_packed_documents_are_evaluated_as_if_alone(padding: tuple[int, int]) -> None:
    model, (documents, inputs) = build(), packed()
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs = {name: torch.nn.functional.pad(tensor, padding) for name, tensor in inputs.items()}
    with torch.no_grad():
        together = model(**inputs).last_hidden_state[:, padding[0] : padding[0] + sum(LENGTHS)]
        alone = torch.cat([model(document).last_hidden_state for document in documents], 1)
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)


def test_full_attention_of_short_inputs_cannot_be_packed_into_long_ones() -> None:
    model, (documents, inputs) = build(full_attention_up_to=40), packed()
    with pytest.raises(hea.InputError, match="full_attention_up_to=40"):
        model(**inputs)
    model.config.full_attention_up_to = 93
    with torch.no_grad():
        together = model(**inputs).last_hidden_state
        alone = torch.cat([model(document).last_hidden_state for document in documents], 1)
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)


def test_compiles_and_refuses_the_same() -> None:
    model, (_, inputs) = build(full_attention_up_to=40), packed()
    ids = inputs["input_ids"]
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        found = compiled(input_ids=ids, position_ids=torch.arange(93)[None]).last_hidden_state
        torch.testing.assert_close(found, model(ids).last_hidden_state, atol=1e-5, rtol=1e-5)
        with pytest.raises(RuntimeError, match="full_attention_up_to=40"):
            compiled(**inputs)


@pytest.mark.filterwarnings("ignore:Left out", "ignore:Even with parity", "ignore:output_attentions")
@pytest.mark.parametrize("tokens", [64, 61])
def test_bigbird_in_training_mode(tokens: int) -> None:
    """In eval mode theirs do not sum to 1: of the copies of block 0 they show one."""
    theirs = in_tree("big_bird", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    ours = hea.convert(theirs, parity=True)
    inputs = in_tree_inputs("big_bird", "AutoModel", tokens)
    with torch.no_grad():
        found, expected = (each.train()(**inputs, output_attentions=True).attentions for each in (ours, theirs))
    assert [each.shape for each in found] == [(3, 4, tokens, tokens)] * 2
    for actual, other in zip(found, expected, strict=True):
        # theirs has the padding to blocks
        torch.testing.assert_close(actual, other[:, :, :tokens, :tokens], atol=1e-6, rtol=0)
