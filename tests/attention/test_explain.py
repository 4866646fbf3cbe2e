"""`explain` and its command: what is chosen and why, and counts that agree with the closed forms."""

import importlib

import pytest
import torch

import hf_efficient_attn as hea
from hf_efficient_attn.attention import functional
from hf_efficient_attn.attention.explain import allowed_pairs
from hf_efficient_attn.attention.select import BACKENDS
from hf_efficient_attn.backends.flex import backend as flex
from hf_efficient_attn.cli import main
from hf_efficient_attn.errors import EfficientAttentionError, UnsupportedBackendError
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.patterns import Band, Blocks, Causal, Full, GlobalTokens, PerHead, RandomBlocks, bigbird

PATTERNS = [
    Band(3, 2) | GlobalTokens([0, 9]),
    bigbird(4, 1),
    Band(5, 0) | Blocks(Band(1, 0), 4),
    PerHead([Causal(), Blocks(Full(), 8)]),
    RandomBlocks(2, 4, seed=1),
]


def test_names_at_the_top_are_functions() -> None:
    """`attention` is a sub-package too; importing its modules must not bind it again."""
    importlib.import_module("hf_efficient_attn.attention.select")
    assert callable(hea.attention)
    assert hea.attention is functional.attention
    assert callable(hea.explain)


def test_dtypes_are_those_of_torch() -> None:
    with pytest.raises(hea.InputError, match=r"dtype='bf16' must be one of torch.float32"):
        hea.explain(Band(1, 1), dtype="bf16")


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.kind)
@pytest.mark.parametrize(("num_queries", "num_keys"), [(24, 24), (5, 32), (1, 20)])
def test_allowed_pairs(pattern: hea.patterns.Pattern, num_queries: int, num_keys: int) -> None:
    layout = Layout(pattern, 2, num_queries, num_keys, num_keys - num_queries)
    queries = range(num_keys - num_queries, num_keys)
    counted = sum(
        bool(one.allowed(query, key)) for one in layout.head_patterns() for query in queries for key in range(num_keys)
    )
    assert allowed_pairs(layout) == counted


@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
@pytest.mark.parametrize("pattern", [Band(256, 256), bigbird(64, 3), Causal()], ids=lambda pattern: pattern.kind)
def test_every_other_backend_has_a_reason(pattern: hea.patterns.Pattern, backend: str) -> None:
    explanation = hea.explain(pattern, 1024, backend=backend)
    assert {explanation.backend, *explanation.reasons} == set(BACKENDS)
    assert explanation.backend not in explanation.reasons
    assert all(reason.endswith(".") for reason in explanation.reasons.values())
    assert 0 < explanation.allowed_pairs <= explanation.computed_pairs <= explanation.total_pairs == 8 * 1024**2
    assert 0 < explanation.density <= explanation.block_density <= 1
    assert explanation.memory_bytes > 8 * 1024 * 64 * 4
    assert explanation.relative_cost > 0


def test_the_choice() -> None:
    assert hea.explain(Band(256, 256), 8192).backend == "blocked"
    assert hea.explain(Band(256, 256), 64).backend == "sdpa"
    assert hea.explain(Full(), 8192).backend == "sdpa"
    with hea.use_backend("reference"):
        assert hea.explain(Band(256, 256), 8192).backend == "reference"


def test_it_is_the_choice_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    for name, module in BACKENDS.items():
        original = module.attend
        monkeypatch.setattr(
            module,
            "attend",
            lambda *args, _name=name, _own=original, **kw: (called.append(_name), _own(*args, **kw))[1],
        )
    for tokens in (16, 512, 2048):
        q = torch.randn(1, 2, tokens, 8)
        hea.attention(q, q, q, Band(8, 8))
        assert hea.explain(Band(8, 8), tokens, num_heads=2, head_dim=8).backend == called.pop()


def test_refusals() -> None:
    with pytest.raises(UnsupportedBackendError, match="no backward pass on cpu"):
        hea.explain(Band(1, 1), training=True, backend="flex")
    with pytest.raises(UnsupportedBackendError, match="does not exist"):
        hea.explain(Band(1, 1), backend="flash")
    with pytest.raises(EfficientAttentionError, match="at least as many keys as queries"):
        hea.explain(Band(1, 1), 8, key_tokens=4)


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    main(["explain", "band(2, 2) | global(0)", "--tokens", "64", "--heads", "1", "--training", "--dtype", "bfloat16"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[:7]] == [
        "pattern",
        "call",
        "backend",
        "allowed",
        "computed",
        "cost",
        "memory",
    ]
    assert "1 heads, 64 queries, 64 keys, bfloat16 on cpu, with gradients" in lines[1]
    # a band of five without its ends, and the first token's row and column beyond what the band holds of them
    assert "436 pairs" in lines[3]
    assert sum(line.startswith("not ") for line in lines) == len(BACKENDS) - 1


def test_command_for_a_decode_step_on_a_device_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    main(["explain", "causal()", "--tokens", "1", "--key-tokens", "4096", "--device", "cuda"])
    assert "1 queries, 4,096 keys, float32 on cuda" in capsys.readouterr().out


@pytest.mark.parametrize("is_there", [True, False])
def test_a_forecast_for_a_gpu_says_what_is_missing_here(monkeypatch: pytest.MonkeyPatch, is_there: bool) -> None:
    monkeypatch.setattr(flex, "_compiler", lambda device: ("triton", is_there))
    explanation = hea.explain(Band(64, 64), 1024, device="cuda")
    note = "(on cuda, auto may take flex where triton is installed; here it is not)"
    assert (explanation.backend == "flex", note in str(explanation)) == (is_there, not is_there)
    # head sizes of 8 are not for flex, whatever is installed
    assert note not in str(hea.explain(Band(64, 64), 1024, device="cuda", head_dim=8))
