"""One softmax over the keys of several calls: log-sum-exps that have gradients, and what joins by them."""

from typing import Any

import pytest
import torch
from torch import Tensor

import hf_efficient_attn as hea
from hf_efficient_attn.errors import InputError, UnsupportedBackendError
from hf_efficient_attn.layout.score_terms import Distance, Term
from hf_efficient_attn.patterns import Band, Full, PerHead

NUM_LONG, NUM_GLOBAL = 70, 5
OPTIONS = {"return_lse": True, "lse_gradient": True, "scale": 0.5}


def inputs() -> list[Tensor]:
    """Return queries, then keys and values of long tokens and of global ones, and what a term looks up."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(NUM_LONG, 8)] * 3 + [(NUM_GLOBAL, 8)] * 2 + [(NUM_LONG, 7)]
    drawn = [torch.randn(2, 4, *size, generator=generator, dtype=torch.float64) for size in sizes]
    return [each.requires_grad_() for each in drawn]


def dense(states: list[Tensor], has_term: bool, real: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of a band of 9 and all global tokens, by the formula."""
    q, k, v, global_k, global_v, values = states
    place = torch.arange(NUM_LONG)
    distance = place[:, None] - place
    scores = 0.5 * (q @ k.mT)
    if has_term:
        scores = scores + values.gather(-1, (distance.clamp(-3, 3) + 3).expand(2, 4, -1, -1))
    near = (distance.abs() <= 9).expand(2, 1, -1, -1)
    near = near if real is None else near & real[:, None, None]
    joined = torch.cat([0.5 * (q @ global_k.mT), scores.masked_fill(~near, -torch.inf)], -1)
    return joined.softmax(-1) @ torch.cat([global_v, v], 2), joined.logsumexp(-1)


@pytest.mark.parametrize("backend", ["blocked", "sdpa", "reference"])
@pytest.mark.parametrize("has_term", [False, True])
@pytest.mark.parametrize("is_padded", [False, True])
def test_band_and_global_tokens_are_one_softmax(backend: str, has_term: bool, is_padded: bool) -> None:
    """As ETC has it; a masked query still reads the global tokens here, since only their call would mask it."""
    states, expected_states = inputs(), inputs()
    q, k, v, global_k, global_v, values = states
    real = torch.arange(NUM_LONG) >= torch.tensor([[4], [0]]) if is_padded else None
    terms = (Term(values, Distance(-3, 3)),) if has_term else ()
    long = hea.attention(q, k, v, Band(9, 9), key_mask=real, terms=terms, backend=backend, **OPTIONS)
    others = hea.attention(q, global_k, global_v, Full(), cross=True, query_mask=real, backend=backend, **OPTIONS)
    found = hea.join_attention((long, others))
    expected = dense(expected_states, has_term, real)
    rows = torch.ones(2, NUM_LONG, dtype=torch.bool) if real is None else real
    rows = rows[:, None].expand(-1, 4, -1)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours[rows], theirs[rows])
    assert not found[0][~rows].any()
    # of output and log-sum-exp at once
    used = states if has_term else states[:-1]
    gradients = [
        torch.autograd.grad((out[rows].square().sum() + lse[rows].sin().sum()), leaves[: len(used)])
        for (out, lse), leaves in ((found, states), (expected, expected_states))
    ]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("backend", ["blocked", "sdpa"])
@pytest.mark.parametrize("what", ["sinks", "softcap", "dropout", "heads", "half", "lse alone"])
def test_gradient_of_the_log_sum_exp_is_that_of_the_formula(what: str, backend: str) -> None:
    """Beside everything else that a call may have."""
    if (what, backend) == ("softcap", "sdpa"):
        pytest.skip("sdpa caps no scores")
    found = []
    for name in (backend, "reference"):
        q, k, v, *_ = inputs()
        sinks = torch.linspace(-1, 1, 4, dtype=q.dtype).requires_grad_()
        options: dict[str, Any] = {"sinks": {"sinks": sinks}, "softcap": {"softcap": 2.0}}.get(what, {})
        options |= {"dropout": 0.5} if what == "dropout" else {}
        if what == "half":
            q, k, v = (each.detach().bfloat16().requires_grad_() for each in (q, k, v))
        pattern = PerHead([Band(3, 0), Band(20, 20)]) if what == "heads" else Band(9, -1)
        torch.manual_seed(0)
        out, lse = hea.attention(q, k, v, pattern, backend=name, **options, **OPTIONS)
        leaves = (q, k, sinks) if what == "sinks" else (q, k)
        finite = lse > -torch.inf
        # which weights are dropped differs between backends; the log-sum-exp counts all of them
        total = lse[finite].sin().sum() + (0 if what in ("dropout", "lse alone") else out.square().sum())
        found.append(torch.autograd.grad(total, leaves))
    tolerance = {"atol": 0.05, "rtol": 0.05} if what == "half" else {}
    torch.testing.assert_close(*found, **tolerance)


def test_queries_without_keys_in_any_part_have_output_zero_and_no_gradient() -> None:
    q, k, v, global_k, global_v, _ = inputs()
    real, none = torch.arange(NUM_LONG).expand(2, -1) < 3, torch.zeros(2, NUM_GLOBAL, dtype=torch.bool)
    long = hea.attention(q, k, v, Band(2, 2), key_mask=real, **OPTIONS)
    others = hea.attention(q, global_k, global_v, Full(), cross=True, key_mask=none, **OPTIONS)
    out, lse = hea.join_attention((long, others))
    torch.testing.assert_close(out, long[0])
    torch.testing.assert_close(lse, long[1])
    gradients = torch.autograd.grad(out.square().sum(), (q, k, v), retain_graph=True)
    torch.testing.assert_close(gradients, torch.autograd.grad(long[0].square().sum(), (q, k, v)))


@pytest.mark.parametrize("backend", ["auto", "sdpa"])
def test_compiles_without_breaks(backend: str) -> None:
    options = {**OPTIONS, "backend": backend}

    def joined(q: Tensor, k: Tensor, v: Tensor, global_k: Tensor, global_v: Tensor, values: Tensor) -> Tensor:
        long = hea.attention(q, k, v, Band(9, 9), terms=(Term(values, Distance(-3, 3)),), **options)
        return hea.join_attention((long, hea.attention(q, global_k, global_v, Full(), cross=True, **options)))[0]

    states = inputs()
    torch.compiler.reset()
    compiled = torch.compile(joined, fullgraph=True, backend="aot_eager")
    found, expected = (torch.autograd.grad(function(*states).square().sum(), states) for function in (compiled, joined))
    torch.testing.assert_close(found, expected)


def test_what_gives_no_gradient_is_refused() -> None:
    q, k, v, *_ = inputs()
    single = [each.detach().float().requires_grad_() for each in (q, k, v)]
    with pytest.raises(UnsupportedBackendError, match="flex has no backward pass on cpu"):
        hea.attention(*single, Band(2, 2), backend="flex", **OPTIONS)
    with torch.no_grad():
        found = hea.attention(q, k, v, Band(2, 2), backend="sdpa", **OPTIONS)
    torch.testing.assert_close(found, hea.attention(q, k, v, Band(2, 2), backend="reference", **OPTIONS))
    with pytest.raises(InputError, match="Set return_lse=True"):
        hea.attention(q, k, v, Band(2, 2), lse_gradient=True)
    with pytest.raises(InputError, match="there must be at least one"):
        hea.join_attention([])
    with pytest.raises(InputError, match="of the same queries"):
        hea.join_attention([found, (found[0][:, :, 1:], found[1][:, :, 1:])])
