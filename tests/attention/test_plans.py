"""Plans of calls: used where everything that a plan depends on is the same, and nowhere else."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from attention_models import build, token_ids
from backends_contract import EPYC

import hf_efficient_attn as hea
from hf_efficient_attn import attention
from hf_efficient_attn.attention import dispatch
from hf_efficient_attn.attention.dispatch import _plans
from hf_efficient_attn.attention.select import BACKENDS, use_backend
from hf_efficient_attn.backends import machine_costs
from hf_efficient_attn.bench.calibrate import uniform
from hf_efficient_attn.patterns import (
    Band,
    Causal,
    Full,
    GlobalTokens,
    PerHead,
)

PATTERN = Band(3, 2) | GlobalTokens([1])


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the calls that are built, from no plan on."""
    _plans.clear()
    calls: list[Any] = []
    build_call = dispatch.build_call

    def noted(*args: Any, **options: Any) -> Any:
        calls.append(build_call(*args, **options))
        return calls[-1]

    monkeypatch.setattr(dispatch, "build_call", noted)
    return calls


def states(dtype: torch.dtype = torch.float32, tokens: int = 20, heads: int = 2) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(3, 1, heads, tokens, 8, dtype=dtype))


def test_a_call_is_checked_and_built_once(built: list[Any]) -> None:
    for _ in range(3):
        q, k, v = states()
        expected = attention(q, k, v, PATTERN, backend="reference")
        torch.testing.assert_close(attention(q, k, v, PATTERN), expected, rtol=1e-5, atol=1e-5)
    assert len(built) == 2


def test_what_differs_has_plans_of_its_own(built: list[Any]) -> None:
    q, k, v = states()
    others: list[Any] = [
        lambda: attention(q, k, v, PATTERN),
        lambda: attention(q, k, v, Causal()),
        lambda: attention(q, k, v, PATTERN, scale=0.5),
        lambda: attention(q, k, v, PATTERN, softcap=2.0),
        lambda: attention(q, k, v, PATTERN, dropout=0.5),
        lambda: attention(q[:, :, :4], k, v, PATTERN, query_offset=3),
        lambda: attention(q, k, v, Full(), cross=True),
        lambda: attention(q, k, v, PATTERN, layer=1),
        lambda: attention(q, k, v, PATTERN, first_head=1, num_model_heads=4),
        lambda: attention(q, k, v, PATTERN, backend="blocked"),
        lambda: attention(q, k[:, :1], v[:, :1], PATTERN),
        lambda: attention(q, k, v[..., :4], PATTERN),
        lambda: attention(q.double(), k.double(), v.double(), PATTERN),
        lambda: attention(q.requires_grad_(), k, v, PATTERN),
    ]
    for _ in range(2):
        for other in others:
            other()
        assert len(built) == len(others)
        q = q.detach()
    assert len(_plans) == len(others)


def test_masks_terms_sinks_and_chosen_keys_have_plans(built: list[Any]) -> None:
    """One for all contents of tensors; and another one for other kinds of tensors."""
    q, k, v = states()
    mask, ids = torch.ones(1, 20, dtype=torch.bool), torch.zeros(1, 20, dtype=torch.int64)
    values, blocks = torch.randn(1, 1, 1, 3), torch.zeros(1, 1, 20, 1, dtype=torch.int64)
    others: list[dict[str, Any]] = [
        {"key_mask": mask},
        {"segment_ids": ids},
        {"segment_ids": ids.int()},
        {"key_mask": mask, "global_mask": ~mask},
        {"sinks": torch.zeros(2)},
        {"sinks": torch.zeros(4), "num_model_heads": 4, "first_head": 1},
        {"sinks": torch.zeros(2, requires_grad=True)},
        {"terms": [hea.Term(values, hea.Distance(-1, 1))]},
        {"terms": [hea.Term(values.expand(1, 2, 1, 3), hea.Distance(-1, 1))]},
        {"terms": [hea.Term(values, hea.Distance(0, 2))]},
        {"chosen": hea.ChosenBlocks(blocks, 10)},
        {"chosen": hea.ChosenBlocks(blocks, 5)},
    ]
    for moved in range(3):
        mask[:, moved : 2 * moved], ids[:, 4 * moved + 4 :], blocks[:, :, 5:] = False, moved, moved
        values.normal_()
        for number, other in enumerate(others):
            wanted = attention(q, k, v, PATTERN, backend="reference", **other)
            torch.testing.assert_close(attention(q, k, v, PATTERN, **other), wanted, rtol=1e-4, atol=1e-5)
            assert len(built) == 2 * (number + 1 if moved == 0 else len(others))


def test_calls_without_a_plan(built: list[Any]) -> None:
    q, k, v = states()
    for _ in range(2):
        attention(q[:, :, :1], k, v, PATTERN, query_offset=3)
        attention(q[:, :, :4], k, v, PATTERN, query_offset=torch.tensor(2))
        attention(q[:0], k[:0], v[:0], PATTERN)
    assert len(built) == 6
    assert len(_plans) == 0


@pytest.mark.parametrize("name", ["key_mask", "segment_ids", "global_mask", "sinks", "chosen", "query_mask"])
@pytest.mark.parametrize("wrong", [[], (), False], ids=str)
def test_nothing_is_taken_for_a_tensor_that_is_left_out(name: str, wrong: Any) -> None:
    for inputs in (states(), (states()[0][:, :, -1:], *states()[1:])):
        attention(*inputs, PATTERN)
        with pytest.raises(hea.EfficientAttentionError):
            attention(*inputs, PATTERN, **{name: wrong})


def test_the_chosen_backend_and_the_machine_count(built: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = states(tokens=300)
    used = []
    for name, backend in BACKENDS.items():

        def noted(*args: Any, name: str = name, attend: Any = backend.attend, **options: Any) -> Any:
            used.append(name)
            return attend(*args, **options)

        monkeypatch.setattr(backend, "attend", noted)
    # with a log-sum-exp none is a direct call of torch's kernel
    for _ in range(2):
        attention(q, k, v, PATTERN, return_lse=True)
        with use_backend("reference"):
            attention(q, k, v, PATTERN, return_lse=True)
        with machine_costs.on_machine(uniform(EPYC, 64)):
            attention(q, k, v, PATTERN, return_lse=True)
        attention(q, k, v, PATTERN, return_lse=True, backend="sdpa")
    assert used[1::4] == ["reference"] * 2
    assert used[3::4] == ["sdpa"] * 2
    assert used[:4] == used[4:]
    # each pretended machine is another one
    assert len(built) == 5


@pytest.mark.parametrize(
    "wrong", [{"scale": True}, {"layer": False}, {"cross": 0}, {"query_offset": 0.0}, {"dropout": "0"}], ids=str
)
def test_what_equals_an_argument_is_still_refused(wrong: dict[str, Any]) -> None:
    q, k, v = states()
    attention(q, k, v, PATTERN, scale=1, query_offset=0)
    attention(q, k, v, PATTERN)
    with pytest.raises(hea.EfficientAttentionError):
        attention(q, k, v, PATTERN, **wrong)


def test_arguments_that_cannot_be_compared_are_refused_as_ever() -> None:
    q, k, v = states()
    with pytest.raises(hea.ConfigurationError, match="must be a pattern"):
        attention(q, k, v, {"kind": "causal"})  # type: ignore[arg-type]
    with pytest.raises(hea.InputError, match="scale"):
        attention(q, k, v, PATTERN, scale=torch.tensor(1.0))  # type: ignore[arg-type]
    attention(q, k, v, PATTERN)
    with pytest.raises(hea.UnsupportedBackendError, match=r"torch\.func"):
        torch.func.grad(lambda q: attention(q, k, v, PATTERN).sum())(q)  # type: ignore[union-attr]


def test_autocast_has_calls_of_its_own(built: list[Any]) -> None:
    q, k, v = states()
    for _ in range(2):
        assert attention(q, k, v, PATTERN).dtype == torch.float32  # type: ignore[union-attr]
        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu", dtype):
                out = attention(q, k, v, PATTERN)
            assert out.dtype == dtype  # type: ignore[union-attr]
            expected = attention(q.to(dtype), k.to(dtype), v.to(dtype), PATTERN)
            assert torch.equal(out, expected)  # type: ignore[arg-type]
    assert len(built) == 5


def test_gradients_and_lse_of_plans() -> None:
    for _ in range(2):
        inputs = [each.requires_grad_() for each in states(torch.float64)]
        out, lse = attention(*inputs, PATTERN, return_lse=True)  # type: ignore[misc]
        wanted, wanted_lse = attention(*inputs, PATTERN, return_lse=True, backend="reference")  # type: ignore[misc]
        torch.testing.assert_close(lse.double(), wanted_lse.double(), rtol=1e-5, atol=1e-5)
        weights = torch.randn_like(out)
        ours, others = (torch.autograd.grad((each * weights).sum(), inputs) for each in (out, wanted))
        for mine, other in zip(ours, others, strict=True):
            torch.testing.assert_close(mine, other)


@pytest.mark.parametrize(
    "pattern",
    [PATTERN, Causal(), Full(), Band(30, 30), PerHead([Band(3, 0), Causal()])],
    ids=["masked", "causal", "full", "all pairs", "heads"],
)
@pytest.mark.parametrize("options", [{}, {"scale": -0.5}, {"query_offset": 3}], ids=str)
def test_direct_calls_are_as_others(pattern: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    _plans.clear()
    q, k, v = states(torch.float64)
    q = q[:, :, :12] if "query_offset" in options else q
    wide = torch.randn(2, 20, 3, 8, dtype=torch.float64).transpose(1, 2)
    for inputs in ((q, k, v), (wide[:, :2, : q.shape[2]], k.expand(2, 2, 20, 8), wide[:, 1:])):
        inputs = [each.detach().requires_grad_() for each in inputs]
        attention(*inputs, pattern, **options, backend="sdpa")
        with monkeypatch.context() as only:
            # a causal mask is laid over scores before they are scaled
            if options.get("scale", 1) > 0 or pattern not in (Causal(),):
                only.setattr(BACKENDS["sdpa"], "attend", None)
            out = attention(*inputs, pattern, **options, backend="sdpa")
        wanted = attention(*inputs, pattern, **options, backend="reference")
        torch.testing.assert_close(out, wanted)
        weights = torch.randn_like(out)
        ours, others = (torch.autograd.grad((each * weights).sum(), inputs) for each in (out, wanted))
        for mine, other in zip(ours, others, strict=True):
            torch.testing.assert_close(mine, other)


def test_long_masks_are_kept_once() -> None:
    _plans.clear()
    for tokens, most in ((300, 2**19), (1100, 2**14)):
        attention(*states(tokens=tokens), PATTERN, backend="sdpa")
        (key,) = (each for each in _plans._entries if each[2][2] == tokens)
        assert _plans._entries[key].num_bytes < most


def test_layers_of_models_use_plans(built: list[Any]) -> None:
    model = hea.sparsify(build("llama"), Band(3, 0)).eval()
    for tokens in (9, 12, 9):
        ids = token_ids(2, tokens)
        with torch.no_grad():
            out = model(ids, use_cache=False).logits
        with torch.no_grad(), use_backend("reference"):
            torch.testing.assert_close(model(ids, use_cache=False).logits, out, rtol=1e-4, atol=1e-4)
    # two layers, two lengths, two backends
    assert len(built) == 8


def test_threads_that_prefer_others_get_their_own() -> None:
    q, k, v = states(torch.float64)
    expected = attention(q, k, v, PATTERN, backend="reference")
    _plans.clear()

    def call(name: str) -> None:
        for _ in range(30):
            with use_backend(name):
                torch.testing.assert_close(attention(q, k, v, PATTERN), expected)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(call, ["auto", "sdpa", "blocked"]))
    for key, entry in _plans._entries.items():
        name: Any = key[0]  # type: ignore[index]
        assert name == "auto" or entry.value.backend == name


def test_they_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_plans", dispatch.BoundedCache(1 << 16))
    attention(*states(), PATTERN)
    # about what one takes: neither modules nor tensors
    assert dispatch._plans.num_bytes < 1 << 14
    for tokens in range(2, 40):
        attention(*states(tokens=tokens), PATTERN)
    assert dispatch._plans.num_bytes <= 1 << 16
    assert 0 < len(dispatch._plans) < 38
