"""Every backend, on every pattern, at odd lengths, masked and packed, in every dtype, gradients included.

A backend joins by one line in COMPARED_BACKENDS. `reference` is what they are compared with; fuzz_engine.py compares it
with a formula of its own.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from backends.compared_cases import cross_cases, huge_score_cases, memory_cases, pairwise_cases, special_cases
from backends_cases import MEMORY, THREE_PATTERNS, Case, tensors_of
from backends_contract import EPYC, check, results, widening

from hf_efficient_attn.backends import reference, sdpa
from hf_efficient_attn.backends.blocked import backend as blocked
from hf_efficient_attn.backends.flex import backend as flex
from hf_efficient_attn.backends.machine_costs import on_machine
from hf_efficient_attn.backends.protocol import Backend
from hf_efficient_attn.layout.score_terms import Distance, SoftSpan

COMPARED_BACKENDS: dict[str, Backend] = {"sdpa": sdpa, "blocked": blocked}
CASES = pairwise_cases() + special_cases() + memory_cases() + huge_score_cases() + cross_cases()
FLEX_CASES = [
    Case("far keys", 65, "documents", torch.float16, needs_grad=False),
    Case("causal random", 200, "left", torch.bfloat16, (4, 1), num_queries=70, needs_grad=False),
    Case("per head", 130, "globals", label=Distance(-3, 6), needs_grad=False),
    Case("causal band", 200, "left", label=SoftSpan(ramp=20, num_inner=5), has_own_values=True, needs_grad=False),
    Case("earlier keys", 127, "holes", num_queries=1, value_dim=24, needs_grad=False),
    Case("compressed keys", 40, "documents", num_queries=130, needs_grad=False, cross_offset=40),
    Case("scattered globals", 200, needs_grad=False, label=Distance(-3, 6)),
    Case("scattered globals", 300, "documents", heads=(6, 1), needs_grad=False),
    Case("scattered globals", 130, "globals", needs_grad=False),
]


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan() -> Iterator[None]:
    """Whatever is read before it was written shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.thorough] * (number % 2)) for number, case in enumerate(CASES)],
    ids=str,
)
def test_contract(case: Case) -> None:
    call = case.call(values=tensors_of(case, case.dtype).values)
    backends = [backend for backend in COMPARED_BACKENDS.values() if backend.why_not(call) is None]
    assert backends
    for backend in backends:
        check(case, backend)


@pytest.mark.parametrize("case", [case for case in CASES if case.dtype == torch.bfloat16][::4], ids=str)
def test_contract_where_bfloat16_is_computed_in_float32(case: Case) -> None:
    call = case.call(values=tensors_of(case, case.dtype).values)
    with on_machine(widening(EPYC)):
        for backend in COMPARED_BACKENDS.values():
            if backend.why_not(call) is None:
                check(case, backend)


@pytest.mark.parametrize("case", special_cases()[::15], ids=str)
def test_default_dtype_changes_nothing(case: Case) -> None:
    """In the low default first, since masks and plans are kept for later calls."""
    call, found = case.call(values=tensors_of(case, case.dtype).values), []
    backends = [each for each in (reference, *COMPARED_BACKENDS.values()) if each.why_not(call) is None]
    for default in (torch.bfloat16, torch.float32):
        torch.set_default_dtype(default)
        try:
            found.append([results(case, backend, case.dtype) for backend in backends])
        finally:
            torch.set_default_dtype(torch.float32)
    for low, wide in zip(*found, strict=True):
        assert all(torch.equal(low[name], wide[name]) for name in wide)


@pytest.mark.parametrize("name", ["per head", "random", THREE_PATTERNS])
@pytest.mark.parametrize("backend", [reference, *COMPARED_BACKENDS.values()], ids=["reference", *COMPARED_BACKENDS])
def test_heads_have_the_numbers_of_the_model(backend: Backend, name: str) -> None:
    """A process that has four of the heads computes what one with all twelve does in these."""
    case = Case(name, 40, "documents", heads=(12, 6))
    tensors = tensors_of(case, torch.float32)
    whole, _ = backend.attend(tensors.q, tensors.k, tensors.v, case.call())
    for first in (0, 4, 8):
        layout = replace(case.layout, num_heads=4, first_head=first, num_model_heads=12)
        queries, keys = slice(first, first + 4), slice(first // 2, first // 2 + 2)
        own = (tensors.q[:, queries], tensors.k[:, keys], tensors.v[:, keys])
        call = replace(case.call(), layout=layout)
        found, _ = backend.attend(*own, call)
        torch.testing.assert_close(found, whole[:, queries])
    if name == "per head":
        torch.compiler.reset()
        compiled, _ = torch.compile(backend.attend, backend="aot_eager")(*own, call)
        torch.testing.assert_close(compiled, found)


@pytest.mark.parametrize("name", ["reference", "flex", *COMPARED_BACKENDS])
def test_a_first_position_in_a_tensor_is_read_or_refused(name: str) -> None:
    """Its layout's offset, 37, is only a guess."""
    backend = {"reference": reference, "flex": flex, **COMPARED_BACKENDS}[name]
    case = Case("causal band", 40, num_queries=3, needs_grad=False)
    call = replace(case.call(), query_start=torch.tensor(20))
    if backend.why_not(call) is None:
        tensors = tensors_of(case, torch.float32)
        out, _ = backend.attend(tensors.q, tensors.k, tensors.v, call)
        known = replace(case.call(), layout=replace(case.layout, query_offset=20))
        torch.testing.assert_close(out, reference.attend(tensors.q, tensors.k, tensors.v, known)[0])
    else:
        assert backend.NAME != "blocked"


# torch's own imports warn when it compiles for the first time
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:flex_attention called without:UserWarning")
@pytest.mark.parametrize("case", FLEX_CASES, ids=str)
def test_contract_of_flex(case: Case) -> None:
    """Compiled, which takes seconds, for one case in low precision, and below."""
    assert flex.why_not(case.call()) is None
    with torch.compiler.set_stance("default" if case.dtype == torch.bfloat16 else "force_eager"):
        check(case, flex)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_one_kernel_of_flex_takes_any_memory() -> None:
    """Also on copies, where it assumes an order."""
    for name in MEMORY:
        check(Case("globals", 300, heads=(6, 1), memory=(name, name, name, "plain"), needs_grad=False), flex)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES if torch.cuda.is_available() else [], ids=str)
@pytest.mark.parametrize(
    "backend", [reference, *COMPARED_BACKENDS.values(), flex], ids=["reference", *COMPARED_BACKENDS, "flex"]
)
def test_contract_on_cuda(backend: Backend, case: Case) -> None:
    torch.use_deterministic_algorithms(False)
    reason = backend.why_not(case.call("cuda"))
    if reason is not None:
        pytest.skip(reason)
    check(case, backend, "cuda")


@pytest.mark.parametrize("mask", ["right", "holes", "documents"])
@pytest.mark.parametrize("backend", COMPARED_BACKENDS.values(), ids=COMPARED_BACKENDS)
def test_finite_numbers_of_masked_tokens_change_nothing(backend: Backend, mask: str) -> None:
    """Whatever padding holds; non-finite numbers are not promised, see `attention`."""
    case = Case("globals", 90, mask)
    masked = case.call().masked_queries
    found = []
    for garbage in (0.0, 1e15):
        tensors = tensors_of(case, torch.float32)
        leaves = [x.masked_fill(masked, garbage).requires_grad_() for x in (tensors.q, tensors.k, tensors.v)]
        out, lse = backend.attend(*leaves, case.call())
        gradients = torch.autograd.grad(out, leaves, tensors.grad_out)
        assert all(not gradient.masked_select(masked).any() for gradient in gradients)
        found.append([out, lse, *gradients])
    torch.testing.assert_close(*found)
