"""Flex within a torch.compile of the caller's, on a CPU that says it is a GPU: the program, its numbers and gradients.

No code is generated: torch computes the operators of a program, flex by its formula. GPUs: test_flex_on_cuda.py.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from transformers import LlamaConfig, LlamaForCausalLM

import hf_efficient_attn as hea
from hf_efficient_attn.attention import build_call as call_module
from hf_efficient_attn.attention.functional import attention
from hf_efficient_attn.backends.flex import backend as flex
from hf_efficient_attn.backends.flex.mods import Dropout, draw_seed
from hf_efficient_attn.layout.call import Inputs, inputs_of
from hf_efficient_attn.layout.listed_keys import ChosenBlocks
from hf_efficient_attn.layout.score_terms import Distance, Label, Slope, Term
from hf_efficient_attn.patterns.algebra import PerHead
from hf_efficient_attn.patterns.bands import Band, Causal
from hf_efficient_attn.patterns.big_bird import bigbird
from hf_efficient_attn.patterns.global_tokens import GlobalTokens
from hf_efficient_attn.patterns.pattern import Pattern
from hf_efficient_attn.patterns.tables import KeyTable

SCALE = 0.25
NAMES = {"flex": "flex_attention", "blocked": "hf_efficient_attn.attention", "dense": "allowed_pairs"}


@pytest.fixture(autouse=True)
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def inputs_on_gpu(*tensors: Tensor) -> Inputs:
        return replace(inputs_of(*tensors), device="cuda")

    monkeypatch.setattr(call_module, "inputs_of", inputs_on_gpu)
    monkeypatch.setattr(flex, "_found_compiler", lambda device: ("triton", True))
    # flex would refuse gradients on a CPU
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *tensors: None)
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Programs:
    """A compiler that keeps what it is given, forward and backward passes, and has torch compute it."""

    def __init__(self) -> None:
        self.code: list[str] = []
        self.compile = aot_autograd(fw_compiler=self._keep, bw_compiler=self._keep)

    def _keep(self, program: torch.fx.GraphModule, example: Any) -> Callable[..., Any]:
        self.code.append(str(program.graph))
        return make_boxed_func(program)

    def of(self) -> set[str]:
        """Return which kinds of attention the programs hold."""
        return {kind for kind, name in NAMES.items() if any(name in code for code in self.code)}


@dataclass(frozen=True)
class Case:
    pattern: Pattern
    masks: tuple[str, ...] = ()
    has_terms: bool = False
    lengths: tuple[int, ...] = (140,)

    def arguments(self, num_tokens: int) -> dict[str, Any]:
        index = torch.arange(num_tokens).expand(2, -1)
        masks = {
            "key_mask": index >= torch.tensor([[0], [7]]),
            "segment_ids": index // 60,
            "global_mask": index % 50 == 3,
        }
        return {name: masks[name] for name in self.masks}


CASES = {
    "masks": Case(Band(9, 2) | GlobalTokens([0, 5]), ("key_mask", "segment_ids", "global_mask"), lengths=(140, 200)),
    "terms": Case(Band(9, 2), ("key_mask",), has_terms=True),
    "per head": Case(
        PerHead([bigbird(16, 1, causal=True) & Causal(), KeyTable([[query, query // 2] for query in range(300)])]),
        ("key_mask",),
        has_terms=True,
    ),
}


def leaves_of(case: Case, num_tokens: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, num_tokens, 16) for heads in (4, 2, 2)] + [(1, 4, 1, 8), (4,)][: 2 * case.has_terms]
    return [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]


def with_gradients(forward: Callable[..., Tensor], leaves: list[Tensor]) -> list[Tensor]:
    out = forward(*leaves)
    return [each.detach().double() for each in (out, *torch.autograd.grad(out.square().sum(), leaves))]


@pytest.mark.parametrize("name", ["masks", "terms", pytest.param("per head", marks=pytest.mark.thorough)])
def test_one_program_holds_flex_and_its_gradients(name: str) -> None:
    case, programs = CASES[name], Programs()

    def compute(q: Tensor, k: Tensor, v: Tensor, *learned: Tensor, backend: str = "auto", **masks: Tensor) -> Tensor:
        options: dict[str, Any] = dict(masks)
        if learned:
            options.update(terms=(Term(learned[0], Distance(-2, 5)),), sinks=learned[1], softcap=2.0)
        return attention(q, k, v, case.pattern, scale=SCALE, backend=backend, **options)

    compiled = torch.compile(compute, fullgraph=True, backend=programs.compile, dynamic=len(case.lengths) > 1)
    for num_tokens in case.lengths:
        leaves, masks = leaves_of(case, num_tokens), case.arguments(num_tokens)
        found, rounded, exact = (
            with_gradients(forward, [leaf.detach().to(dtype).requires_grad_() for leaf in leaves])
            for forward, dtype in (
                (partial(compiled, **masks), torch.float32),
                (partial(compute, backend="reference", **masks), torch.float32),
                (partial(compute, backend="reference", **masks), torch.float64),
            )
        )
        # numbers of this size cancel in the gradient of a score
        cancelling = SCALE * 2 * exact[0].abs().amax((0, 1, 2)) @ leaves[2].abs().amax((0, 1, 2)).double()
        for own, typical, correct in zip(found, rounded, exact, strict=True):
            last_digit = torch.finfo(torch.float32).eps * torch.maximum(correct.abs().max(), cancelling)
            assert (own - correct).abs().max() <= 4 * ((typical - correct).abs().max() + last_digit)
    assert programs.of() == {"flex"}
    # a forward and a backward pass serve all lengths
    assert len(programs.code) == 2


def test_dropout_is_part_of_the_program() -> None:
    """And drops what its hash says of the seed that every call draws."""
    programs, pattern = Programs(), Band(9, 2)
    leaves = leaves_of(Case(pattern), 140)
    index = [torch.arange(size).reshape(-1, *[1] * (3 - dim)) for dim, size in enumerate((2, 4, 140, 140))]
    torch.manual_seed(0)
    seeds = [draw_seed(torch.device("cpu")) for _ in range(2)]

    def formula(q: Tensor, k: Tensor, v: Tensor, seed: Tensor) -> Tensor:
        k, v = (each.repeat_interleave(2, 1) for each in (k, v))
        scores = (SCALE * q @ k.transpose(2, 3)).masked_fill(~pattern.allowed(*index[2:]), -torch.inf)
        return (torch.softmax(scores, -1) * Dropout(0.3, seed).is_kept(*index) / 0.7) @ v

    compiled = torch.compile(attention, fullgraph=True, backend=programs.compile)
    torch.manual_seed(0)
    for seed in seeds:
        found = with_gradients(partial(compiled, pattern=pattern, scale=SCALE, dropout=0.3), leaves)
        torch.testing.assert_close(found, with_gradients(partial(formula, seed=seed), leaves), atol=1e-4, rtol=1e-4)
    assert seeds[0] != seeds[1]
    assert programs.of() == {"flex"}


@pytest.mark.parametrize(
    "masks",
    [pytest.param((), marks=pytest.mark.thorough), ("key_mask", "segment_ids")],
    ids=["no masks", "packed"],
)
def test_one_program_holds_flex_with_chosen_blocks(masks: tuple[str, ...]) -> None:
    """On request: what they cost depends on what was chosen. Blocks are computed by the program itself."""
    case, programs = Case(Causal(), masks, lengths=(140, 200)), Programs()

    def compute(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, backend: str = "flex", **given: Tensor) -> Tensor:
        chosen = ChosenBlocks(blocks + 1, 16)
        return attention(q, k, v, Causal(), scale=SCALE, backend=backend, chosen=chosen, **given)

    compiled = torch.compile(compute, fullgraph=True, backend=programs.compile, dynamic=True)
    for num_tokens in case.lengths:
        blocks = torch.randint(-1, 12, (2, 2, num_tokens, 3), generator=torch.Generator().manual_seed(1))
        leaves, given = leaves_of(case, num_tokens), case.arguments(num_tokens)
        found, expected = (
            with_gradients(partial(forward, blocks=blocks, **given), leaves)
            for forward in (compiled, partial(compute, backend="reference"))
        )
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert programs.of() == {"flex"}
    assert len(programs.code) == 2


@pytest.mark.parametrize("label", [Distance(-2, 5), Slope()], ids=["values a head", "a value a head"])
def test_terms_that_a_program_computes_are_left_to_blocked(label: Label) -> None:
    """Whose gradients torch's trace of flex loses."""
    programs, pattern, values = Programs(), Band(9, 2), torch.rand(1, 4, 1, label.num_values, requires_grad=True)
    leaves = [*leaves_of(Case(pattern), 60), values]

    def compute(*given: Tensor, backend: str = "auto") -> Tensor:
        return attention(*given[:3], pattern, terms=(Term(given[3] * 2, label),), backend=backend)

    found = with_gradients(torch.compile(compute, fullgraph=True, backend=programs.compile), leaves)
    expected = with_gradients(partial(compute, backend="reference"), leaves)
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-4)
    assert programs.of() == {"blocked"}


def test_lengths_that_are_symbols_leave_drawn_patterns_to_blocked() -> None:
    programs = Programs()
    compiled = torch.compile(attention, fullgraph=True, backend=programs.compile, dynamic=True)
    q = torch.randn(1, 2, 64, 16)
    pattern = bigbird(16, 1, causal=True)
    torch.testing.assert_close(compiled(q, q, q, pattern), attention(q, q, q, pattern, backend="blocked"))
    assert programs.of() == {"blocked"}


def test_a_compiled_model_trains_with_flex_and_exports_with_blocked() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=60, num_key_value_heads=2, max_position_embeddings=256, **sizes)
    model, programs = hea.sparsify(LlamaForCausalLM(config), Band(8, 0)), Programs()
    ids = torch.randint(0, 60, (2, 90))
    inputs = {"input_ids": ids, "attention_mask": (ids > 5).long(), "labels": ids, "use_cache": False}

    def step(forward: Callable[..., Any]) -> list[Tensor]:
        loss = forward(**inputs).loss
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    found = step(torch.compile(model, fullgraph=True, backend=programs.compile))
    assert programs.of() == {"flex"}
    with hea.use_backend("blocked"):
        torch.testing.assert_close(found, step(model))
    exported = torch.export.export(model.eval(), (), {"input_ids": ids, "use_cache": False}, strict=False)
    assert {kind for kind, name in NAMES.items() if name in str(exported.graph)} == {"blocked"}
