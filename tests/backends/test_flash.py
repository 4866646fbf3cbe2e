"""FlashAttention-4 under the contract of a backend, by a stand-in of its functions: everything but the kernels.

`flash_compile.py` compiles the kernels without a GPU; `test_flash_on_cuda` runs them on one.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import flash_standin
import pytest
import torch
from backends import chosen_cases
from backends.compared_cases import cross_cases, huge_score_cases, memory_cases, pairwise_cases, special_cases
from backends_cases import Case, tensors_of
from backends_contract import check

import hf_efficient_attn as hea
from hf_efficient_attn.attention import build_call
from hf_efficient_attn.backends import reference
from hf_efficient_attn.backends.flash import backend as flash
from hf_efficient_attn.backends.flash import library
from hf_efficient_attn.backends.flash.parts import parts_of
from hf_efficient_attn.backends.machine_costs import known_gpu, on_machine
from hf_efficient_attn.layout.call import AttentionCall
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.layout.listed_keys import ChosenBlocks
from hf_efficient_attn.patterns import (
    Band,
    BlockLocal,
    Causal,
    Dilated,
    GlobalTokens,
    KeyTable,
    Pattern,
    PerHead,
    SpanTree,
    bigbird,
)
from hf_efficient_attn.patterns.intervals import normalize


def on_gpu(call: AttentionCall) -> AttentionCall:
    """Return a call as it would be on a GPU; the stand-in computes in any dtype."""
    return replace(call, inputs=replace(call.inputs, device="cuda", dtype=torch.bfloat16))


LISTED = [*pairwise_cases(), *special_cases(), *memory_cases(), *huge_score_cases(), *cross_cases()]
SINKS_OF_PARTS = [
    Case(pattern, 200, mask, dtype, has_sinks=True, softcap=softcap)
    for pattern, mask, dtype, softcap in (
        ("globals", "none", torch.bfloat16, None),
        ("scattered globals", "none", torch.float32, 5.0),
        ("band", "two texts", torch.float16, 5.0),
        ("dilated", "none", torch.float32, None),
    )
]
CASES = [
    case
    for case in (*LISTED, *SINKS_OF_PARTS, *chosen_cases.varied_cases(), *chosen_cases.special_cases())
    if flash.why_not(on_gpu(case.call(values=tensors_of(case, case.dtype).values))) is None
]


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Memory that was not written is NaN."""
    monkeypatch.setattr(library, "library", flash_standin.standin)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.thorough] * (number % 2)) for number, case in enumerate(CASES)],
    ids=str,
)
def test_contract(case: Case) -> None:
    check(case, flash)


def test_most_cases_are_computed() -> None:
    """Learned terms and single queries are not, nor trees and tables of keys."""
    others = [case for case in LISTED if case.label is None and case.num_queries != 1]
    assert len(CASES) > 0.7 * len(others)
    assert any(case.choice for case in CASES)


@pytest.mark.parametrize("pattern", ["band", "globals", "scattered globals"])
def test_gradient_of_the_log_sum_exp(pattern: str) -> None:
    case, found = Case(pattern, 70), []
    for backend in (flash, reference):
        tensors = tensors_of(case, torch.float32)
        leaves = [each.requires_grad_() for each in (tensors.q, tensors.k, tensors.v)]
        out, lse = backend.attend(*leaves, replace(case.call(), lse_needs_grad=True))
        found.append(torch.autograd.grad((out * tensors.grad_out).sum() + lse.sin().sum(), leaves))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize(
    ("pattern", "num_parts"),
    [
        (Causal(), 1),
        (Band(1023, 0), 1),
        (Dilated(64, 64, 4), 1),
        (Band(64, 64) | GlobalTokens([0, 700]), 3),
        (Band(60, 0) | GlobalTokens([0, 1, 2, 3], attends_to_all=False).causal(), 2),
        (bigbird(64), 2),
        (BlockLocal(256), 1),
    ],
)
def test_kernels_of_a_pattern(pattern: hea.patterns.Pattern, num_parts: int) -> None:
    (heads,) = parts_of(Layout(pattern, 8, 1024, 1024), None)
    assert (heads.count, len(heads.parts)) == (8, num_parts)


def test_deterministic_gradients_of_masks_are_left_to_others() -> None:
    torch.use_deterministic_algorithms(True)
    for pattern, is_refused in (("band", False), ("scattered globals", False), ("block local", True)):
        assert (flash.why_not(on_gpu(Case(pattern, 200, needs_grad=True).call())) is not None) == is_refused


def test_heads_with_patterns_of_their_own_have_their_own_kernels() -> None:
    pattern = PerHead([Band(64, 64), Dilated(64, 64, 4)])
    assert [each.count for each in parts_of(Layout(pattern, 8, 1024, 1024), None)] == [4, 4]


def test_a_pattern_without_any_pair() -> None:
    pattern = GlobalTokens([0], attended_by_all=False) & Band(None, -1)
    call = replace(Case("band", 50, heads=(2, 2)).call(), layout=Layout(pattern, 2, 50, 50))
    q = torch.randn(1, 2, 50, 8, requires_grad=True)
    out = flash.attend(q, q, q, call)[0]
    assert (out.abs().max(), torch.autograd.grad(out.sum(), q)[0].abs().max()) == (0, 0)


def test_selected_blocks_of_a_pattern_that_depends_on_the_length() -> None:
    pattern, blocks = GlobalTokens([-1]) | Band(9, 9), torch.randint(0, 4, (1, 2, 60, 2))
    call = replace(
        Case("band", 60, heads=(2, 2)).call(), layout=Layout(pattern, 2, 60, 60), chosen=ChosenBlocks(blocks, 16)
    )
    q = torch.randn(1, 2, 60, 8)
    torch.testing.assert_close(*(each.attend(q, q, q, call)[0] for each in (flash, reference)))


@pytest.mark.parametrize("error", [ImportError("no CUDA"), RuntimeError("older"), AttributeError("another")], ids=repr)
def test_a_library_that_cannot_be_imported_is_not_called(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> None:
        raise error

    monkeypatch.setattr(library, "find_spec", find)
    monkeypatch.setattr(flash, "is_there", lambda device: True)
    library.why_not_installed.cache_clear()
    try:
        reason, lacking = flash.why_not(on_gpu(Case().call())), flash.missing(on_gpu(Case().call()))
    finally:
        library.why_not_installed.cache_clear()
    assert str(error) in str(reason)
    assert lacking == library.PACKAGE


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("pattern", [Band(9, 0), Band(9, 9) | GlobalTokens([0, 7])])
def test_compiled_as_one_operator(pattern: hea.patterns.Pattern) -> None:
    q, grad = torch.randn(1, 2, 50, 8, requires_grad=True), torch.randn(1, 2, 50, 8)
    call = replace(Case("band", 50, heads=(2, 2)).call(), layout=Layout(pattern, 2, 50, 50))
    torch.compiler.reset()
    compiled = torch.compile(lambda q: flash.attend(q, q, q, call)[0], backend="aot_eager", fullgraph=True)
    found = [torch.autograd.grad(each(q), q, grad)[0] for each in (compiled, lambda q: flash.attend(q, q, q, call)[0])]
    torch.testing.assert_close(*found)


GPU_INPUTS = replace(Case().call().inputs, device="cuda", dtype=torch.bfloat16)


def test_values_of_another_width() -> None:
    call = on_gpu(Case("band").call())
    for key_heads, needs_grad, is_computed in ((4, True, True), (2, False, True), (2, True, False)):
        wide = replace(GPU_INPUTS, head_dim=192, value_dim=128, num_key_heads=key_heads, needs_grad=needs_grad)
        assert (flash.why_not(replace(call, inputs=wide)) is None) == is_computed


@pytest.mark.parametrize(
    "changed",
    [
        {"dropout": 0.1},
        {"query_start": torch.tensor(3)},
        {"layout": Layout(KeyTable([[0, 3]] * 40), 4, 40, 40)},
        {"layout": Layout(SpanTree(2), 4, 40, 40)},
        {"layout": Layout(Band(3, 3), 4, 1, 40, 39)},
        {"inputs": replace(Case().call().inputs, device="cuda", dtype=torch.float32)},
        {"inputs": replace(GPU_INPUTS, head_dim=20, value_dim=20)},
        {"inputs": replace(GPU_INPUTS, head_dim=64, value_dim=32)},
        {"inputs": replace(GPU_INPUTS, head_dim=192, value_dim=128, num_key_heads=2, needs_grad=True)},
        {"inputs": Case().call().inputs},
    ],
    ids=str,
)
def test_refused(changed: dict) -> None:
    call = on_gpu(Case().call())
    assert flash.why_not(call) is None
    assert flash.why_not(replace(call, **changed))


def test_a_class_of_ones_own_is_left_to_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    """In CuTe DSL, -1 % 4 is -1."""
    monkeypatch.setattr(Pattern, "kinds", dict(Pattern.kinds))

    @dataclass(frozen=True)
    class Ours(Pattern, kind="ours"):
        def allowed(self, query: Any, key: Any) -> Any:
            return (query - key) % 4 == 1

        def key_intervals(self, first_query: int, last_query: int, num_keys: int) -> Any:
            queries = range(first_query, last_query + 1)
            return normalize((key, key + 1) for query in queries for key in range((query - 1) % 4, num_keys, 4))

    for pattern in (Ours(), Ours() | Band(3, 3)):
        assert flash.why_not(replace(on_gpu(Case().call()), layout=Layout(pattern, 4, 40, 40)))


def test_ampere_has_forward_windows_alone() -> None:
    kinds = [("band", False), ("band", True), ("globals", False)]
    with on_machine(known_gpu("a100")):
        reasons = [flash.why_not(on_gpu(Case(name, 65, needs_grad=needs_grad).call())) for name, needs_grad in kinds]
    assert [reason is None for reason in reasons] == [True, False, False]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_programs_that_train_ask_it_while_they_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.use_deterministic_algorithms(False)
    found: list[str | None] = []

    def select(call: AttentionCall, name: str) -> Any:
        inputs = replace(call.inputs, device="cuda", dtype=torch.bfloat16)
        found.append(flash._refused(replace(call, inputs=inputs)))
        return selected(call, name)

    selected = build_call.select
    monkeypatch.setattr(build_call, "select", select)
    q = torch.randn(1, 2, 64, 16, requires_grad=True)
    torch.compiler.reset()
    torch.compile(lambda q: hea.attention(q, q, q, Band(9, 0)), fullgraph=True, backend="eager")(q)
    assert found == [None]


@pytest.mark.parametrize("device", ["cuda", "h100", "h200", "a100"])
def test_a_gpu_that_is_not_here_is_explained_as_if_its_libraries_were(device: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    explanation = hea.explain(Band(1023, 0), 32768, device=device)
    assert explanation.backend == "flash"
    assert explanation.relative_cost < 0.2
    assert any("assumes" in note for note in explanation.notes)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES if torch.cuda.is_available() else [], ids=str)
def test_contract_on_cuda(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    torch.use_deterministic_algorithms(False)
    case = case if case.dtype != torch.float32 else replace(case, dtype=torch.bfloat16)
    reason = flash.why_not(case.call("cuda"))
    if reason is not None:
        pytest.skip(reason)
    check(case, flash, "cuda")
