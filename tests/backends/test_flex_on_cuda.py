"""Flex on a GPU, right to the last digits of its dtype: compiled models, one program without breaks; dropout; choices.

Collected only where a GPU is: `pytest -m gpu`.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from backends.chosen_cases import special_cases, varied_cases
from backends_cases import Case
from backends_contract import check
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import hf_efficient_attn as hea
from hf_efficient_attn.backends.flex import backend as flex
from hf_efficient_attn.backends.flex.mods import Dropout
from hf_efficient_attn.backends.gathered import backend as gathered
from hf_efficient_attn.backends.protocol import Backend
from hf_efficient_attn.layout.top_k import choose_blocks

pytestmark = pytest.mark.gpu
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 60,
}
CHOSEN = [*varied_cases(), *special_cases()]
# the first is compiled for itself, the others share a program
LENGTHS = (300, 700, 1000)


def llama() -> PreTrainedModel:
    config = LlamaConfig(num_key_value_heads=2, max_position_embeddings=1024, **SIZES)
    return hea.sparsify(LlamaForCausalLM(config), hea.patterns.Band(64, 0))


def longformer() -> PreTrainedModel:
    no_dropout = dict.fromkeys(("embedding_dropout", "hidden_dropout", "attention_dropout"), 0.0)
    config = hea.SparseTransformerConfig.longformer(
        attention_window=64, is_causal=True, global_tokens="first", max_position_embeddings=1024, **SIZES, **no_dropout
    )
    return hea.SparseTransformerForCausalLM(config)


def inputs_of(num_tokens: int, device: str) -> dict[str, Tensor]:
    ids = torch.randint(3, 60, (2, num_tokens), generator=torch.Generator().manual_seed(num_tokens))
    mask = torch.arange(num_tokens).expand(2, -1) < torch.tensor([[num_tokens], [num_tokens - 70]])
    labels = ids.masked_fill(~mask, -100)
    return {name: x.to(device) for name, x in (("input_ids", ids), ("attention_mask", mask.long()), ("labels", labels))}


def step(model: PreTrainedModel, forward: Callable, num_tokens: int, device: str = "cuda") -> list[Tensor]:
    """Return the loss and the gradients, in float64 on the CPU."""
    loss = forward(**inputs_of(num_tokens, device), use_cache=False).loss
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(loss, parameters)
    return [each.detach().cpu().double() for each in (loss, *gradients)]


@pytest.mark.parametrize("build", [llama, longformer])
def test_a_compiled_model_computes_with_flex(build: Callable[[], PreTrainedModel]) -> None:
    torch.manual_seed(0)
    exact = build().double()
    model = copy.deepcopy(exact).float().cuda()
    compiled = torch.compile(model, fullgraph=True)
    for num_tokens in LENGTHS:
        with hea.use_backend("reference"):
            expected = step(exact, exact, num_tokens, "cpu")
            rounded = step(model, model, num_tokens)
        found = step(model, compiled, num_tokens)
        for correct, typical, own in zip(expected, rounded, found, strict=True):
            last_digit = torch.finfo(torch.float32).eps * correct.abs().max()
            assert (own - correct).abs().max() <= 8 * ((typical - correct).abs().max() + last_digit)


@pytest.mark.parametrize("build", [llama, longformer])
def test_the_program_has_no_breaks_and_holds_flex(build: Callable[[], PreTrainedModel]) -> None:
    model = build().cuda()
    explanation = torch._dynamo.explain(model)(**inputs_of(300, "cuda"), use_cache=False)
    code = "".join(program.code for program in explanation.graphs)
    assert explanation.graph_break_count == 0
    assert "flex_attention" in code
    assert "hf_efficient_attn.attention" not in code
    assert "allowed_pairs" not in code


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("has_sinks", [False, True])
def test_dropout_drops_the_weights_that_its_hash_names(
    has_sinks: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed, dropout, pattern = torch.tensor(7, dtype=torch.int32, device="cuda"), 0.3, hea.patterns.Band(40, 10)
    monkeypatch.setattr(flex, "draw_seed", lambda device: seed)
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 300, 32), (2, 2, 300, 32), (2, 2, 300, 32), (2, 4, 300, 32))
    *leaves, grad = (torch.randn(shape, generator=generator).to("cuda", dtype) for shape in shapes)
    leaves += [torch.randn(4, generator=generator).to("cuda", dtype)] if has_sinks else []
    key_mask = torch.arange(300, device="cuda").expand(2, -1) >= torch.tensor([[0], [50]], device="cuda")

    def gradients(given: list[Tensor], attend: Callable[..., Tensor]) -> list[Tensor]:
        own = [each.detach().requires_grad_() for each in given]
        out = attend(*own)
        return [each.detach().double() for each in (out, *torch.autograd.grad(out, own, grad.to(out.dtype)))]

    def dense(q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> Tensor:
        index = [torch.arange(size, device="cuda") for size in (2, 4, 300, 300)]
        places = [each.reshape(-1, *[1] * (3 - dim)) for dim, each in enumerate(index)]
        k, v = (each.repeat_interleave(2, 1) for each in (k, v))
        allowed = pattern.allowed(*places[2:]) & key_mask[:, None, None]
        scores = (q @ k.transpose(2, 3) * 32**-0.5).masked_fill(~allowed, torch.finfo(q.dtype).min)
        extra = sinks[0].view(4, 1, 1).expand(2, 4, 300, 1) if sinks else scores.new_full((2, 4, 300, 1), -torch.inf)
        weights = torch.softmax(torch.cat([scores, extra], -1), -1)[..., :-1]
        kept = Dropout(dropout, seed).is_kept(*places)
        return ((weights * kept / (1 - dropout)) @ v).masked_fill(~key_mask[:, None, :, None], 0)

    def ours(q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> Tensor:
        options = {"sinks": sinks[0] if sinks else None, "key_mask": key_mask, "dropout": dropout}
        return hea.attention(q, k, v, pattern, backend="flex", **options)

    exact = gradients([each.double() for each in leaves], dense)
    for found, typical, correct in zip(gradients(leaves, ours), gradients(leaves, dense), exact, strict=True):
        last_digit = torch.finfo(dtype).eps * correct.abs().max()
        assert (found - correct).abs().max() <= 8 * ((typical - correct).abs().max() + last_digit)


def test_auto_is_flex_for_long_inputs() -> None:
    assert hea.explain(hea.patterns.Band(64, 0), 32_768, device="cuda", training=True).backend == "flex"


@pytest.mark.parametrize("case", CHOSEN if torch.cuda.is_available() else [], ids=str)
@pytest.mark.parametrize("backend", [flex, gathered], ids=["flex", "gathered"])
def test_contract_of_chosen_keys(backend: Backend, case: Case) -> None:
    reason = backend.why_not(case.call("cuda"))
    if reason is not None:
        pytest.skip(reason)
    check(case, backend, "cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_block_top_k_trains_with_flex(num_tokens: int, dtype: torch.dtype) -> None:
    """Packed, at lengths that share a kernel, by itself and within a program; against the same blocks in float64."""
    generator = torch.Generator().manual_seed(num_tokens)
    shapes = ((2, 4, num_tokens, 64), (2, 2, num_tokens, 64), (2, 2, num_tokens, 64), (2, 4, num_tokens, 64))
    *leaves, grad = (torch.randn(shape, generator=generator).to("cuda", dtype) for shape in shapes)
    segment_ids = (torch.arange(num_tokens, device="cuda") // 210).expand(2, -1).contiguous()
    blocks = choose_blocks(*leaves[:2], [None, segment_ids, None, None, None], 32, 3, 0, None)
    own = {"chosen": hea.ChosenBlocks(blocks, 32), "segment_ids": segment_ids}
    choosing = partial(hea.attention, pattern=hea.patterns.BlockTopK(32, 3), segment_ids=segment_ids)
    given = partial(hea.attention, pattern=hea.patterns.Causal(), backend="reference", **own)

    def gradients(attend: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        states = [each.detach().to(dtype).requires_grad_() for each in leaves]
        out = attend(*states)
        return [each.detach().double() for each in (out, *torch.autograd.grad(out, states, grad.to(dtype)))]

    exact, rounded = (gradients(given, each) for each in (torch.float64, dtype))
    by_itself = partial(choosing, backend="flex")
    for attend in (by_itself, torch.compile(by_itself, fullgraph=True)):
        for found, typical, correct in zip(gradients(attend, dtype), rounded, exact, strict=True):
            last_digit = torch.finfo(dtype).eps * correct.abs().max()
            assert (found - correct).abs().max() <= 8 * ((typical - correct).abs().max() + last_digit)


def test_dropout_of_chosen_blocks_is_the_same_backward() -> None:
    """The output is linear in v, so that the gradient of v must give back the output of the same draw."""
    q, k, v = (torch.randn(2, 4, 300, 32, device="cuda", requires_grad=True) for _ in range(3))
    chosen = hea.ChosenBlocks(torch.randint(0, 5, (1, 4, 300, 2), device="cuda"), 64)
    attend = partial(hea.attention, q, k, v, hea.patterns.Causal(), chosen=chosen, backend="flex")
    out, plain = attend(dropout=0.4), attend()
    assert not torch.allclose(out, plain, atol=0.1)
    weight = torch.randn_like(out)
    (gradient,) = torch.autograd.grad((out * weight).sum(), v)
    torch.testing.assert_close((gradient * v).sum(), (out * weight).sum(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("block_tokens", [64, 128, 200])
def test_the_kernel_leaves_out_nothing_of_many_blocks(block_tokens: int) -> None:
    """Of more blocks of scores than a row of them holds in the contract, some of them full."""
    case = Case("causal", 2000, "documents", heads=(4, 2))
    blocks = torch.randint(-1, 2000 // block_tokens + 1, (2, 2, 2000, 4), generator=torch.Generator().manual_seed(3))
    chosen = hea.ChosenBlocks(blocks.cuda(), block_tokens)
    call = case.call("cuda")
    q, k, v = (torch.randn(2, heads, 2000, 16, device="cuda") for heads in (4, 2, 2))
    for changed in (chosen, replace(chosen, blocks=chosen.blocks[:, :, ::250], queries_per_choice=250)):
        own = replace(call, chosen=changed, inputs=replace(call.inputs, needs_grad=False))
        (out, lse), (expected, expected_lse) = (each.attend(q, k, v, own) for each in (flex, gathered))
        torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(lse, expected_lse, rtol=1e-2, atol=1e-2)
