"""The contract of a backend: what is correct for a call, and how far a backend may be from it."""

from dataclasses import replace
from functools import lru_cache

import torch
from backends_cases import BATCH_SIZE, SCALE, Case, Tensors, tensors_of
from torch import Tensor

from hf_efficient_attn.backends import reference
from hf_efficient_attn.backends.machine_costs import Machine, known_machines
from hf_efficient_attn.backends.protocol import Backend
from hf_efficient_attn.layout.call import cap
from hf_efficient_attn.layout.dense_mask import allowed_pairs, close_pairs, selected_pairs, term_bias
from hf_efficient_attn.layout.grouped_reference import in_groups
from hf_efficient_attn.layout.score_terms import Term

# choices whose rows have no one log-sum-exp
WITHOUT_LSE = ("mean of groups",)
# out, lse, and the gradients of the leaves
Results = dict[str, Tensor]


EPYC, XEON, TILELESS_XEON, GPU, *_ = known_machines()
# how many times the error of plain attention on a CPU: on GPUs a product in float32 may be three of TF32
FACTORS = {"cpu": 4, "cuda": 8}


def widening(machine: Machine) -> Machine:
    """Return a machine like another one that computes bfloat16 in float32."""
    costs = machine.costs_in("bfloat16")
    forward, backward = (replace(each, is_widened=True) for each in (costs.forward, costs.backward))
    others = [each for each in machine.costs if each[0] != "bfloat16"]
    return replace(machine, costs=(*others, ("bfloat16", replace(costs, forward=forward, backward=backward))))


def results(case: Case, backend: Backend, dtype: torch.dtype, device: str = "cpu") -> Results:
    """Return everything a backend computes for a case, in float64 on CPU."""
    tensors = tensors_of(case, dtype, device)
    for leaf in tensors.leaves(case).values():
        leaf.requires_grad_()
    out, lse = backend.attend(tensors.q, tensors.k, tensors.v, case.call(device, tensors.values, tensors.sinks))
    assert lse is not None
    assert out.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert not lse.requires_grad
    assert lse.shape == out.shape[:3]
    found = {"out": out} if case.choice in WITHOUT_LSE else {"out": out, "lse": lse}
    if case.needs_grad:
        found |= gradients_of(out, tensors, case)
    return {name: tensor.detach().cpu().double() for name, tensor in found.items()}


def gradients_of(out: Tensor, tensors: Tensors, case: Case) -> Results:
    """Return the gradients of the leaves."""
    leaves = tensors.leaves(case)
    gradients = torch.autograd.grad(out, tuple(leaves.values()), tensors.grad_out)
    return {f"gradient of leaf {number}": gradient for number, gradient in zip(leaves, gradients, strict=True)}


def plain_attention(case: Case, dtype: torch.dtype) -> Results:
    """Return the results of matmul, softmax, matmul in `dtype`: the rounding that any kernel may show."""
    tensors = tensors_of(case, dtype)
    for leaf in tensors.leaves(case).values():
        leaf.requires_grad_()
    tokens, cpu = case.tokens, torch.device("cpu")
    keys, values = (each.repeat_interleave(case.heads[0] // case.heads[1], 1) for each in (tensors.k, tensors.v))
    scores = cap(tensors.q @ keys.transpose(-1, -2) * case.scale, case.softcap)
    chosen = case.chosen()
    if chosen is not None and chosen.needs_groups:
        allowed = allowed_pairs(case.layout, tokens, BATCH_SIZE, cpu)
        out, lse = in_groups(scores, values, allowed, case.call("cpu", tensors.values, tensors.sinks))
        found = {"out": out} if case.choice in WITHOUT_LSE else {"out": out, "lse": lse}
        found |= gradients_of(out, tensors, case) if case.needs_grad else {}
        return {name: tensor.detach().double() for name, tensor in found.items()}
    bias = term_bias([Term(each, case.label) for each in tensors.values if case.label], case.layout, tokens, cpu)
    allowed = allowed_pairs(case.layout, tokens, BATCH_SIZE, cpu)
    if bias is not None:
        bias, allowed = close_pairs(bias, allowed)
        scores = scores + bias.to(dtype)
    if chosen is not None:
        allowed, counts = selected_pairs(chosen, allowed, case.layout, tokens, case.heads[1])
        scores = scores + counts.to(dtype).log()
    allowed = torch.ones((), dtype=torch.bool) if allowed is None else allowed
    lowest = torch.finfo(dtype).min
    sinks = torch.full((1,), -torch.inf, dtype=dtype) if tensors.sinks is None else tensors.sinks
    joined = torch.cat([scores.masked_fill(~allowed, lowest), sinks[:, None, None].expand(*scores.shape[:3], 1)], -1)
    weights = torch.softmax(joined, -1)[..., :-1].masked_fill(~allowed, 0)
    out = weights @ values
    found = {"out": out, "lse": joined.masked_fill(joined == lowest, -torch.inf).logsumexp(-1)}
    if case.needs_grad:
        found |= gradients_of(out, tensors, case)
    return {name: tensor.detach().double() for name, tensor in found.items()}


@lru_cache(maxsize=1)
def correct_and_rounded(case: Case) -> tuple[Results, Results]:
    """Return what is correct, and what plain attention in the case's dtype makes of it: once for several backends."""
    return results(case, reference, torch.float64), plain_attention(case, case.dtype)


def check(case: Case, backend: Backend, device: str = "cpu") -> None:
    """Assert that a backend is as near to float64 as plain low-precision attention, up to a small factor."""
    expected, rounded = correct_and_rounded(case)
    found = results(case, backend, case.dtype, device)
    assert found.keys() == expected.keys()
    tensors = tensors_of(case, torch.float64)
    # numbers of this size cancel in the gradient of a score, in float32 at least
    inner = (
        case.score_factor * SCALE * (tensors.grad_out.abs().amax((0, 1, 2)) @ tensors.v.abs().amax((0, 1, 2))).item()
    )
    for name, correct in expected.items():
        finite = correct.isfinite()
        assert torch.equal(found[name].isneginf(), correct.isneginf()), f"{backend.NAME}, {name}: rows without keys"
        if finite.any():
            error, typical = ((each[name] - correct)[finite].abs().max().item() for each in (found, rounded))
            last_digit = torch.finfo(case.dtype).eps * correct[finite].abs().max().item()
            allowed = FACTORS[device] * (typical + last_digit + torch.finfo(torch.float32).eps * inner)
            assert error <= allowed, f"{backend.NAME}, {name}: off by {error:.2e}, {allowed:.2e} is allowed"
