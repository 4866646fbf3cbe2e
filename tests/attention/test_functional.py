"""`attention`: what it refuses, and how a backend is chosen."""

import pickle
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hf_efficient_attn as hea
from hf_efficient_attn.attention.build_call import _laid_out, warn_of_keyless
from hf_efficient_attn.attention.dispatch import _plans
from hf_efficient_attn.attention.functional import attention
from hf_efficient_attn.attention.select import BACKENDS, fastest, select, use_backend
from hf_efficient_attn.backends.flex import backend as flex
from hf_efficient_attn.errors import EfficientAttentionError, InputError, UnsupportedBackendError
from hf_efficient_attn.layout.call import AttentionCall, Inputs
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.layout.score_terms import Distance, Term
from hf_efficient_attn.messages import warn_once
from hf_efficient_attn.models.config.errors import FieldError
from hf_efficient_attn.patterns.algebra import PerHead
from hf_efficient_attn.patterns.bands import Band, Causal, Full
from hf_efficient_attn.patterns.big_bird import RandomBlocks
from hf_efficient_attn.patterns.global_tokens import GlobalTokens

X = torch.randn(2, 4, 20, 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": X[0]}, "must have four dimensions"),
        ({"k": X[:1]}, "batch sizes"),
        ({"v": X[:, :, :10]}, "same heads and tokens"),
        ({"q": X[..., :4]}, "same head_dim"),
        ({"k": X[:, :3], "v": X[:, :3]}, "3 key heads must divide the 4 query heads"),
        ({"k": X.half()}, "they must be equal"),
        ({"q": X.long(), "k": X.long(), "v": X.long()}, "dtype torch.int64; it must be one of"),
        ({"q": X[:, :0], "k": X[:, :0], "v": X[:, :0]}, "at least one head"),
        ({"k": X[:, :, :10], "v": X[:, :, :10]}, r"more queries .* than keys\. Transpose tensors"),
        ({"query_offset": 0.5}, "query_offset=0.5 must be an integer"),
        ({"query_offset": torch.tensor([0, 0])}, r"query_offset=tensor\(\[0, 0\]\) must be an integer"),
        ({"scale": "x"}, "scale='x' must be a finite number"),
        ({"scale": float("nan")}, "scale=nan must be a finite number"),
        ({"scale": 10**400}, "scale=an integer of 1329 bits must be a finite number"),
        ({"scale": -1e300}, "scale=-1e[+]300 must be a finite number"),
        ({"scale": True}, "scale=True must be a finite number"),
        ({"softcap": 10**400}, "softcap=an integer of 1329 bits must be a positive number"),
        ({"softcap": 1e300}, "softcap=1e[+]300 must be a positive number"),
        ({"softcap": 1e-300}, "softcap=1e-300 must be a positive number"),
        ({"softcap": True}, "softcap=True must be a positive number"),
        ({"layer": -1}, "layer=-1 must be the index"),
        ({"layer": True}, "layer=True must be the index"),
        ({"layer": 10**30}, "layer=10+ must be the index"),
        ({"query_offset": True}, "query_offset=True must be an integer"),
        ({"query_offset": torch.tensor(True)}, r"query_offset=tensor\(True\) must be an integer"),
        ({"first_head": True}, "first_head=True"),
        ({"terms": 5}, "terms=5 must be a list of Term"),
        ({"terms": [3]}, r"terms=\[3\] must be a list of Term"),
        ({"terms": [Term(3, Distance(0, 3))]}, "must be a list of Term"),  # type: ignore[arg-type]
        ({"terms": [Term(X, 3)]}, "must be a list of Term"),  # type: ignore[arg-type]
        ({"query_offset": 3}, "20 queries from position 3 end at 23"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"key_mask": torch.ones(2, 20)}, "key_mask has dtype torch.float32"),
        ({"key_mask": torch.ones(2, 19, dtype=torch.bool)}, r"key_mask has shape \(2, 19\)"),
        ({"k": X.mT, "v": X.mT}, r"head_dim \(last .* The dimensions are \(batch, heads, tokens, head_dim\)"),
        ({"terms": [Term(torch.zeros(1, 4, 1, 5), Distance(0, 3))]}, r"values of shape \[1, 4, 1, 5\]"),
        ({"terms": [Term(torch.zeros(1, 3, 1, 4), Distance(0, 3))]}, r"values of shape \[1, 3, 1, 4\]"),
    ],
)
def test_refusals(changes: dict[str, object], message: str) -> None:
    arguments = {"q": X, "k": X, "v": X, "pattern": Band(3, 3), **changes}
    with pytest.raises(InputError, match=message) as refusal:
        attention(**arguments)
    assert len(str(refusal.value)) <= 500


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key_mask": torch.ones(2, 20, dtype=torch.long)}, "key_mask has dtype torch.int64; it must be torch.bool"),
        ({"key_mask": torch.ones(2, 20).bool(), "backend": "flex"}, "flex cannot be compiled on cpu with masks"),
        ({"scale": float("nan")}, "scale=nan must be a finite number"),
        pytest.param(
            {"dropout": 1.0}, "dropout=1.0 must be a number of at least 0 and below 1", marks=pytest.mark.thorough
        ),
        pytest.param({"layer": -1}, "layer=-1 must be the index", marks=pytest.mark.thorough),
        pytest.param({"first_head": True}, "first_head=True", marks=pytest.mark.thorough),
        pytest.param({"backend": "triton"}, "backend='triton' does not exist", marks=pytest.mark.thorough),
    ],
)
def test_compilers_repeat_refusals(changes: dict[str, Any], message: str) -> None:
    torch.compiler.reset()
    compiled = torch.compile(attention, fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match=message):
        compiled(X, X, X, Band(3, 3), **changes)


@pytest.mark.parametrize("error", [InputError, FieldError])
def test_long_messages_are_cut_and_survive_pickling(error: type[EfficientAttentionError]) -> None:
    refusal = error("what is wrong: " + "x" * 1000 + ". What to do.")
    assert len(str(refusal)) <= 500
    assert str(refusal).endswith("x. What to do.")
    copied = pickle.loads(pickle.dumps(refusal))
    assert (type(copied), str(copied)) == (error, str(refusal))


@pytest.mark.parametrize("softcap", [1e-30, 1e30, 1])
@pytest.mark.parametrize("backend", ["auto", "blocked"])
def test_the_smallest_and_largest_cap_are_computed(backend: str, softcap: float) -> None:
    expected = attention(X.double(), X.double(), X.double(), Band(3, 3), softcap=softcap, backend="reference")
    found = attention(X, X, X, Band(3, 3), softcap=softcap, backend=backend)
    torch.testing.assert_close(found, expected.float(), atol=1e-5, rtol=1e-4)  # type: ignore[union-attr]


@pytest.mark.parametrize("pattern", [{"kind": "band", "left": 1, "right": 1}, "bnd(1, 1)", None, Band], ids=str)
def test_what_is_no_pattern_is_refused(pattern: object) -> None:
    with pytest.raises(hea.ConfigurationError, match="pattern"):
        attention(X, X, X, pattern)


def test_an_expression_is_its_pattern() -> None:
    text, pattern = "band(1, 0) | global(3)", Band(1, 0) | GlobalTokens([3])
    expected = attention(X, X, X, pattern)
    assert torch.equal(attention(X, X, X, text), expected)
    compiled = torch.compile(attention, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(X, X, X, text), expected)


def test_queries_without_keys_are_named_once() -> None:
    _laid_out.cache_clear()
    _plans.clear()
    warn_of_keyless.cache_clear()
    warn_once.cache_clear()
    # where tokens read only those before them, the first has none, and pytest would turn a warning into an error
    attention(X, X, X, Band(3, -1))
    with pytest.warns(UserWarning, match="the first at position 1"):
        attention(X, X, X, Band(3, -1) & ~Band(1, 0))
    attention(X, X, X, Band(3, -1) & ~Band(1, 0))


@pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning")
def test_flex_by_name() -> None:
    with torch.compiler.set_stance("force_eager"):
        found = attention(X, X, X, Band(3, 3), backend="flex")
    torch.testing.assert_close(found, attention(X, X, X, Band(3, 3), backend="reference"))


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(
        UnsupportedBackendError, match=r"backend='triton' does not exist. Use 'auto' or one of: blocked"
    ):
        attention(X, X, X, Band(3, 3), backend="triton")
    for unhashable in (["auto"], {}, None):
        with pytest.raises(UnsupportedBackendError, match="does not exist"):
            attention(X, X, X, Band(3, 3), backend=unhashable)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedBackendError, match="does not exist"), use_backend("triton"):
        pass


def test_an_explicit_backend_never_falls_back() -> None:
    with pytest.raises(UnsupportedBackendError, match="backend='flex' cannot compute this: .*backward"):
        attention(X.clone().requires_grad_(), X, X, Band(3, 3), backend="flex")


def test_use_backend_reaches_calls_that_leave_the_choice_open(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    for name, module in BACKENDS.items():
        attend = module.attend
        monkeypatch.setattr(
            module, "attend", lambda *a, name=name, attend=attend, **k: calls.append(name) or attend(*a, **k)
        )
    with use_backend("reference"):
        attention(X, X, X, Band(3, 3))
        # with a log-sum-exp: otherwise torch's kernel is called directly
        attention(X, X, X, Band(3, 3), backend="sdpa", return_lse=True)
    assert calls == ["reference", "sdpa"]


def call(num_tokens: int, pattern: hea.patterns.Pattern, device: str = "cpu", **options: Any) -> AttentionCall:
    layout = Layout(pattern, 8, num_tokens, num_tokens)
    return AttentionCall(layout, Inputs(device, torch.float32, 64, 64, 8, 1, **options))


def test_auto_is_dense_where_that_is_cheaper() -> None:
    assert fastest(call(128, Band(256, 256))) == "sdpa"
    assert fastest(call(8192, Full())) == "sdpa"
    assert fastest(call(8192, Band(256, 256))) == "blocked"
    assert select(call(8192, Band(256, 256), needs_grad=True)).NAME == "blocked"


@pytest.mark.parametrize("changes", [{"dropout": 0.1}, {"terms": (Term(torch.zeros(1, 8, 1, 4), Distance(0, 3)),)}])
def test_auto_counts_what_no_fused_kernel_computes(changes: dict[str, Any]) -> None:
    for name in ("blocked", "sdpa"):
        plain = call(512, Full())
        assert BACKENDS[name].cost(replace(plain, **changes)) > 2 * BACKENDS[name].cost(plain)
    assert fastest(call(512, Causal())) == "sdpa"
    assert fastest(replace(call(512, Causal()), **changes)) == "blocked"
    # blocks cost a fixed time, which shows in short inputs
    assert fastest(replace(call(64, Causal()), **changes)) == "sdpa"


@pytest.mark.parametrize("pattern", [Band(256, 0), Band(256, 0) | GlobalTokens([0]), PerHead([Band(9, 0), Causal()])])
def test_a_step_of_decoding_asks_no_other_backend(
    pattern: hea.patterns.Pattern, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = replace(call(8192, pattern), layout=Layout(pattern, 8, 1, 8192, 8191))
    for name in BACKENDS:
        monkeypatch.setattr(BACKENDS[name], "cost", None)
    assert fastest(step) == "sdpa"
    monkeypatch.setattr(BACKENDS["flex"], "is_fastest", lambda call: True)
    monkeypatch.setattr(BACKENDS["flex"], "why_not", lambda call: None)
    assert fastest(step) == "flex"


def test_auto_on_a_gpu_is_flex_but_not_for_steps_of_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BACKENDS["flex"], "why_not", lambda call: None)
    on_gpu = call(8192, Band(256, 256), "cuda")
    assert fastest(on_gpu) == "flex"
    step = Layout(Band(256, 0), 8, 1, 8192, 8191)
    assert fastest(replace(on_gpu, layout=step)) in ("blocked", "sdpa")


def test_while_compiling_auto_is_the_first_rank_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "_compiler", lambda device: ("a compiler", True))
    on_cpu, on_gpu = (call(8192, Band(256, 256), device, is_compiling=True) for device in ("cpu", "cuda"))
    assert fastest(call(8192, Causal(), "cuda", is_compiling=True)) == "sdpa"
    assert (fastest(on_cpu), fastest(on_gpu)) == ("blocked", "flex")
    assert fastest(replace(on_gpu, layout=Layout(Band(256, 0), 8, 1, 8192, 8191), softcap=9.0)) == "blocked"
    for pattern in (Causal(), Band(256, 256)):
        unknown = replace(call(8192, pattern, "cuda", is_compiling=True), query_start=torch.tensor(0))
        able = [name for name in BACKENDS if BACKENDS[name].why_not(unknown) is None]
        assert able == [fastest(unknown)] == ["blocked"]
        with pytest.raises(UnsupportedBackendError, match="sdpa cannot compile a query_offset that is a tensor"):
            select(unknown, "sdpa")
    assert fastest(replace(on_gpu, inputs=replace(on_gpu.inputs, dtype=torch.float8_e5m2))) == "reference"
    between = flex.rank(on_gpu) + 1
    added = SimpleNamespace(NAME="added", why_not=lambda call: None, rank=lambda call: between)
    monkeypatch.setitem(BACKENDS, "added", added)
    assert (fastest(on_cpu), fastest(on_gpu)) == ("added", "flex")


def test_what_is_no_tensor_or_has_no_width_is_refused() -> None:
    states = torch.zeros(1, 2, 4, 8)
    for wrong in (states.numpy(), None, states.tolist()):
        with pytest.raises(InputError, match="v is a .*; it must be a tensor"):
            attention(states, states, wrong, Band(1, 0))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="head_dim"):
        attention(*[states[..., :0]] * 3, Band(1, 0))


@pytest.mark.parametrize("backend", ["auto", "reference", "sdpa", "blocked"])
@pytest.mark.parametrize("sizes", [(0, 4, 4), (2, 0, 4), (2, 0, 0), (0, 0, 0)])
def test_no_queries_give_an_empty_output_and_no_gradient(backend: str, sizes: tuple[int, int, int]) -> None:
    """torch's fused operator ends the process where there are none."""
    batch, queries, keys = sizes
    shapes = ((batch, 4, queries, 8), (batch, 2, keys, 8), (batch, 2, keys, 6))
    for pattern in (Full(), Band(2, 2), RandomBlocks(1, 2, seed=0)):
        q, k, v = (torch.zeros(shape, requires_grad=True) for shape in shapes)
        mask = torch.ones(batch, keys, dtype=torch.bool)
        out, lse = hea.attention(q, k, v, pattern, key_mask=mask, backend=backend, return_lse=True)
        assert out.shape == (batch, 4, queries, 6)
        assert lse.shape == (batch, 4, queries)
        out.sum().backward()
        assert all(not each.grad.any() for each in (q, k, v))


# torch's tracer warns of itself
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tracing_is_refused() -> None:
    """A trace would keep what the mask said of one input."""
    states, mask = torch.randn(1, 2, 9, 8), torch.ones(1, 9, dtype=torch.bool)
    with pytest.raises(hea.UnsupportedBackendError, match=r"torch\.export"):
        torch.jit.trace(lambda x, key_mask: hea.attention(x, x, x, Band(2, 2), key_mask=key_mask), (states, mask))
