"""Flex: what it refuses, and how seldom it compiles."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn.attention.flex_attention import _transpose_ordered

from hf_efficient_attn.backends.flex import backend as flex
from hf_efficient_attn.backends.flex.kernel import _compiled
from hf_efficient_attn.backends.flex.mods import structure_of
from hf_efficient_attn.layout.block_table import by_column
from hf_efficient_attn.layout.call import AttentionCall, Inputs, inputs_of
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.layout.score_terms import Distance, Term
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.patterns.bands import Band, Causal
from hf_efficient_attn.patterns.big_bird import RandomBlocks
from hf_efficient_attn.patterns.blocks import Blocks
from hf_efficient_attn.patterns.pattern import Pattern
from hf_efficient_attn.patterns.tables import KeyTable

BAND = Layout(Band(3, 3), 4, 64, 64)
INPUTS = Inputs("cpu", torch.float32, 16, 16, 2, 2)
CALL = AttentionCall(BAND, INPUTS)
PADDED = TokenMask(key_mask=torch.ones(2, 64, dtype=torch.bool))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"inputs": replace(INPUTS, device="mps")}, "mps"),
        ({"inputs": replace(INPUTS, dtype=torch.float64)}, "float64"),
        ({"dropout": 0.1}, "dropout (0.1)"),
        ({"inputs": replace(INPUTS, needs_grad=True)}, "backward"),
        ({"inputs": replace(INPUTS, is_compiling=True), "tokens": PADDED}, "cannot be compiled on cpu with masks"),
        ({"inputs": replace(INPUTS, device="cuda", value_dim=8)}, "not 8"),
        ({"layout": replace(BAND, pattern=RandomBlocks(1, 8)), "tokens": PADDED}, "random_blocks"),
    ],
)
def test_refuses(changes: dict[str, object], named: str) -> None:
    assert named in str(flex.why_not(replace(CALL, **changes)))


def test_accepts() -> None:
    terms = (Term(torch.zeros(1, 4, 1, 3), Distance(-1, 1)),)
    assert flex.why_not(CALL) is None
    assert flex.why_not(replace(CALL, tokens=PADDED, terms=terms, inputs=replace(INPUTS, value_dim=24))) is None


def test_refuses_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    flex._found_compiler.cache_clear()
    monkeypatch.setattr(flex.shutil, "which", lambda name: None)
    assert "C++ compiler" in str(flex.why_not(CALL))
    flex._found_compiler.cache_clear()


def kind_of(pattern: Pattern) -> object:
    return structure_of(Layout(pattern, 2, 64, 64))


def test_kinds() -> None:
    """A kernel serves other draws of the same shape, and no other pattern."""
    assert kind_of(Band(3, 3)) == kind_of(Band(3, 3))
    assert kind_of(Band(3, 3)) != kind_of(Band(3, 4))
    tables = [KeyTable([[0], [1]]), KeyTable([[1], [0]]), KeyTable([[0], [1], [2]])]
    kinds = [kind_of(Blocks(table, 32) | Causal()) for table in tables]
    assert kinds[0] == kinds[1]
    assert kinds[0] != kinds[2]
    assert kinds[0] != kind_of(Blocks(tables[0], 16) | Causal())


# torch's own imports warn when it compiles for the first time
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiles_twice_for_all_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for the first length, once for all others; other draws, batches and documents find the kernel again.

    What is compiled anew is decided before code is generated, which takes seconds and is left out.
    """
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    _compiled.cache_clear()
    torch._dynamo.utils.counters.clear()
    for num_tokens, batch_size in ((300, 2), (400, 2), (500, 2), (330, 3)):
        q = torch.randn(batch_size, 2, num_tokens, 16)
        call = AttentionCall(Layout(Band(5, 5), 2, num_tokens, num_tokens), inputs_of(q, q, q), scale=0.3)
        flex.attend(q, q, q, call, need_lse=False)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3
    assert _compiled.cache_info().currsize == 1
    _compiled.cache_clear()
    torch.compiler.reset()


def test_blocks_by_column_are_those_of_torch() -> None:
    counts = torch.randint(0, 6, (2, 3, 7), dtype=torch.int32)
    indices = torch.rand(2, 3, 7, 5).argsort(-1).int()
    for found, expected in zip(by_column(counts, indices), _transpose_ordered(counts, indices), strict=True):
        assert torch.equal(found, expected)
