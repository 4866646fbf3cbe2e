"""FlashAttention-4 under the contract of a backend, by a stand-in of its functions: everything but the kernels.

`flash_compile.py` compiles the kernels without a GPU; `test_flash_on_cuda` runs them on one.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import flash_standin
import pytest
import torch
from backends import chosen_cases
from backends.compared_cases import cross_cases, huge_score_cases, memory_cases, pairwise_cases, special_cases
from backends_cases import Case, tensors_of
from backends_contract import check

import hf_efficient_attn as hea
from hf_efficient_attn.backends import reference
from hf_efficient_attn.backends.flash import backend as flash
from hf_efficient_attn.backends.flash import library
from hf_efficient_attn.backends.flash.parts import parts_of
from hf_efficient_attn.backends.machine_costs import known_gpu, on_machine
from hf_efficient_attn.layout.call import AttentionCall
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.patterns import Band, BlockLocal, Causal, Dilated, GlobalTokens, KeyTable, PerHead, bigbird


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


def test_deterministic_gradients_of_masks_are_refused() -> None:
    torch.use_deterministic_algorithms(True)
    for pattern, is_refused in (("band", False), ("scattered globals", False), ("block local", True)):
        tensors, call = tensors_of(Case(pattern, 200), torch.float32), Case(pattern, 200).call()
        with pytest.raises(hea.UnsupportedBackendError) if is_refused else nullcontext():
            flash.attend(tensors.q, tensors.k, tensors.v, call)


def test_heads_with_patterns_of_their_own_have_their_own_kernels() -> None:
    pattern = PerHead([Band(64, 64), Dilated(64, 64, 4)])
    assert [each.count for each in parts_of(Layout(pattern, 8, 1024, 1024), None)] == [4, 4]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("pattern", [Band(9, 0), Band(9, 9) | GlobalTokens([0, 7])])
def test_compiled_as_one_operator(pattern: hea.patterns.Pattern) -> None:
    q, grad = torch.randn(1, 2, 50, 8, requires_grad=True), torch.randn(1, 2, 50, 8)
    call = replace(Case("band", 50, heads=(2, 2)).call(), layout=Layout(pattern, 2, 50, 50))
    torch.compiler.reset()
    compiled = torch.compile(lambda q: flash.attend(q, q, q, call)[0], backend="aot_eager", fullgraph=True)
    found = [torch.autograd.grad(each(q), q, grad)[0] for each in (compiled, lambda q: flash.attend(q, q, q, call)[0])]
    torch.testing.assert_close(*found)


@pytest.mark.parametrize(
    "changed",
    [
        {"dropout": 0.1},
        {"query_start": torch.tensor(3)},
        {"layout": Layout(KeyTable([[0, 3]] * 40), 4, 40, 40)},
        {"layout": Layout(Band(3, 3), 4, 1, 40, 39)},
        {"inputs": replace(Case().call().inputs, device="cuda", dtype=torch.float32)},
        {"inputs": replace(Case().call().inputs, device="cuda", dtype=torch.bfloat16, head_dim=20)},
        {"inputs": Case().call().inputs},
    ],
    ids=str,
)
def test_refused(changed: dict) -> None:
    call = on_gpu(Case().call())
    assert flash.why_not(call) is None
    assert flash.why_not(replace(call, **changed))


def test_ampere_has_forward_windows_alone() -> None:
    kinds = [("band", False), ("band", True), ("globals", False)]
    with on_machine(known_gpu("a100")):
        reasons = [flash.why_not(on_gpu(Case(name, 65, needs_grad=needs_grad).call())) for name, needs_grad in kinds]
    assert [reason is None for reason in reasons] == [True, False, False]


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
