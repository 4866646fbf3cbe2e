"""Chosen blocks in flex: gradients by its functions, the blocks that its kernel visits, what it refuses."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from backends.chosen_cases import special_cases, varied_cases
from backends_cases import BATCH_SIZE, Case, tensors_of
from backends_contract import check
from pretended_cuda import on_cuda, pretended_cuda
from torch import Tensor

import hf_efficient_attn as hea
from hf_efficient_attn.backends.flex import backend as flex
from hf_efficient_attn.backends.flex.block_mask import BLOCK_SIZES, block_mask
from hf_efficient_attn.backends.flex.mods import mods_of
from hf_efficient_attn.layout.block_table import are_listed, selected_tables
from hf_efficient_attn.layout.dense_mask import allowed_pairs, documents_of, selected_pairs

CPU = torch.device("cpu")
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{start}:UserWarning")
    for start in ("flex_attention called without", "There is a performance drop")
]


def on_gpu(case: Case) -> Any:
    """Return the call of a case, which says that it is on a GPU."""
    call = case.call()
    return replace(call, inputs=replace(call.inputs, device="cuda"))


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "_found_compiler", lambda device: ("triton", True))


@pytest.fixture
def pretended_gpu(triton: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # flex would refuse gradients on a CPU
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *tensors: None)
    with torch.compiler.set_stance("force_eager"):
        yield


def computed_by_flex() -> list[Case]:
    """Return cases of blocks, without gradients of terms, which flex has on GPUs and in programs alone."""
    cases = [replace(case, learned=(0, 1, 2)) for case in (*varied_cases(), *special_cases())]
    return [case for case in cases if case.choice.startswith(("blocks", "own blocks")) and case.dtype != torch.float64]


def attend_on_gpu(q: Tensor, k: Tensor, v: Tensor, call: Any) -> tuple[Tensor, Tensor | None]:
    return flex.attend(q, k, v, replace(call, inputs=replace(call.inputs, device="cuda")))


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.thorough] * (i % 4 > 0)) for i, case in enumerate(computed_by_flex())],
    ids=str,
)
def test_contract_by_the_functions_of_the_kernel(case: Case, pretended_gpu: None) -> None:
    """Gradients included, as torch computes them of all pairs by these functions."""
    reason = flex.why_not(on_gpu(case))
    assert reason is None or any(each in reason for each in ("drawn anew", "several documents"))
    if reason is None:
        check(case, SimpleNamespace(NAME="flex", attend=attend_on_gpu))


# torch's own imports warn when it compiles for the first time
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "case",
    [
        Case("causal", 200, "documents", torch.bfloat16, (6, 2), choice="own blocks", needs_grad=False),
        pytest.param(
            Case("causal", 330, heads=(4, 2), choice="blocks for blocks", needs_grad=False), marks=pytest.mark.thorough
        ),
    ],
    ids=str,
)
def test_contract_of_the_kernel(case: Case) -> None:
    assert flex.why_not(case.call()) is None
    check(case, flex)


def pooled(pairs: Tensor, block_size: tuple[int, int], join: Callable[[Tensor], Tensor], rest: bool) -> Tensor:
    """Return blocks of pairs, joined, of which those beyond the last query or key are as `rest` says."""
    queries, keys = block_size
    sizes = (-pairs.shape[3] % keys, -pairs.shape[2] % queries)
    padded = torch.nn.functional.pad(pairs, (0, sizes[0], 0, sizes[1]), value=rest)
    return join(padded.unflatten(3, (-1, keys)).unflatten(2, (-1, queries)).transpose(3, 4).flatten(4))


@pytest.mark.parametrize("mask", ["none", "left", "documents", "holes", "globals"])
@pytest.mark.parametrize("choice", ["blocks", "own blocks", "blocks of key heads", "blocks for blocks", "wide"])
def test_the_kernel_visits_the_blocks_of_chosen_pairs(choice: str, mask: str) -> None:
    """All that hold a pair which is read, and none without both a chosen and an allowed one."""
    case = Case("causal", 200, mask, choice="own blocks" if choice == "wide" else choice)
    layout, tokens, call, block_size = case.layout, case.tokens, case.call(), BLOCK_SIZES["cpu"]
    chosen: Any = call.chosen
    if choice == "wide":
        # all queries of a block choose alike, so that whole blocks of scores are read
        chosen = hea.ChosenBlocks(torch.tensor([[[[0, 0]], [[1, 0]]]]).expand(-1, -1, 4, -1), 96, 64)
    tables = selected_tables(chosen, layout, tokens, documents_of(call), block_size, CPU, needs_grad=True)
    partial, full, *by_column = (are_listed(*tables[first : first + 2]) for first in range(0, 8, 2))
    for of_rows, of_columns in zip((partial, full), by_column, strict=True):
        assert torch.equal(of_rows, of_columns.transpose(-1, -2))
    allowed = allowed_pairs(layout, tokens, BATCH_SIZE, CPU)
    assert allowed is not None
    read, _ = selected_pairs(chosen, allowed, layout, tokens, case.heads[1])
    is_chosen, _ = selected_pairs(chosen, None, layout, tokens, case.heads[1])
    some, whole = (lambda blocks: blocks.any(4)), (lambda blocks: blocks.all(4))
    listed = partial | full
    assert not (partial & full).any()
    assert (pooled(read, block_size, some, False) <= listed).all()
    # blocks are counted from the start of a query's document, and reach into the next one
    if mask != "documents":
        assert (listed <= pooled(is_chosen, block_size, some, False)).all()
    assert (listed <= pooled(allowed, block_size, some, False)).all()
    complete = pooled(read, block_size, whole, False)
    assert (full <= complete).all()
    if mask == "none":
        assert torch.equal(full.expand_as(complete), complete)
        assert full.any() == (choice == "wide")


def test_the_choice_is_part_of_the_kind_of_a_kernel() -> None:
    chosen = hea.ChosenBlocks(torch.zeros(1, 4, 64, 3, dtype=torch.long), 8)
    kinds = {}
    for name, changes in {
        "plain": {},
        "other contents": {"blocks": torch.ones(1, 4, 64, 3, dtype=torch.long)},
        "length": {"block_tokens": 16},
        "number": {"blocks": torch.zeros(1, 4, 64, 2, dtype=torch.long)},
        "heads": {"blocks": torch.zeros(1, 2, 64, 3, dtype=torch.long)},
        "shared": {"blocks": torch.zeros(1, 4, 16, 3, dtype=torch.long), "queries_per_choice": 4},
        "axis": {"counted_from": "axis"},
    }.items():
        call = replace(Case("causal", 64).call(), chosen=replace(chosen, **changes))
        kinds[name] = mods_of(call, CPU).kind
    assert kinds["plain"] == kinds["other contents"]
    assert len(set(kinds.values())) == len(kinds) - 1


def test_the_host_does_not_wait_for_what_was_chosen() -> None:
    call, device = on_gpu(Case("causal", 90, choice="own blocks")), torch.device("cuda", 0)
    with pretended_cuda() as waits:
        tensors = zip(call.chosen.tensor_names, call.chosen.tensors, strict=True)
        own = {name: on_cuda(each) for name, each in tensors if each is not None}
        moved = replace(call, chosen=replace(call.chosen, **own))
        for _ in range(2):
            waits.clear()
            block_mask(moved, device, mods_of(moved, device).mask_mod)
    assert waits.total() == 0, dict(waits)


def test_refusals() -> None:
    def refusal(chosen: Any) -> str:
        return str(flex.why_not(replace(Case("causal", 64, needs_grad=False).call(), chosen=chosen)))

    order = hea.ChunkedOrder(torch.arange(64).expand(1, 1, 1, -1), 8)
    for other in (hea.ChosenTokens(torch.zeros(1, 1, 64, 3, dtype=torch.long)), order):
        assert "only as ChosenBlocks: use gathered" in refusal(other)
    assert "at most 64 selected blocks per query, not 65" in refusal(
        hea.ChosenBlocks(torch.zeros(1, 1, 64, 65).long(), 1)
    )
    two_axes = Case("full", 40, "documents", num_queries=60, cross_offset=3, choice="blocks", needs_grad=False)
    assert "several documents of another sequence" in str(flex.why_not(two_axes.call()))
    trained = str(flex.why_not(Case("causal", 64, choice="blocks").call()))
    assert "no backward pass on cpu: use gathered" in trained


def test_tables_that_no_device_holds_are_refused(triton: None) -> None:
    call = Case("causal", 64, choice="blocks").call()
    layout = replace(call.layout, num_queries=1 << 20, num_keys=1 << 20)
    large = replace(call, layout=layout, inputs=replace(call.inputs, device="cuda"))
    assert "8 GiB for tables of selected blocks: use gathered" in str(flex.why_not(large))


def alike(num_tokens: int, num_blocks: int, block_tokens: int) -> Any:
    """Return for every query the first block, and its own."""
    own = torch.arange(num_tokens)[:, None] // block_tokens
    return hea.ChosenBlocks(torch.cat([own.expand(-1, num_blocks - 1), own * 0], 1)[None, None], block_tokens)


def test_explain_counts_the_blocks_of_scores(triton: None) -> None:
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "num_heads": 2, "backend": "flex"}
    explanation = hea.explain(hea.patterns.Causal(), 1024, chosen=alike(1024, 2, 256), **options)
    # of 8 rows, in pairs with a block of 256 keys: their own triangle, and 2 blocks of the first 256 keys
    assert explanation.computed_pairs == 2 * 128**2 * (4 * 3 + 6 * 2)
    assert explanation.allowed_pairs == 2 * (4 * 256 * 257 // 2 + 768 * 256)
    dense = hea.explain(hea.patterns.Causal(), 1024, **options)
    unknown = hea.explain(hea.patterns.BlockTopK(256, 2), 1024, **options)
    assert explanation.block_density < unknown.block_density == dense.block_density


def test_auto_leaves_chosen_keys_to_gathered(triton: None) -> None:
    """Also where neighbours share a choice: no GPU has measured them."""
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "training": True}
    assert hea.explain(hea.patterns.Band(500, 0), 8192, **options).backend == "flash"
    shared = hea.ChosenBlocks(torch.empty(1, 1, 64, 4, dtype=torch.int32, device="meta"), 128, queries_per_choice=128)
    for pattern, chosen in ((hea.patterns.BlockTopK(512, 3), None), (hea.patterns.Causal(), shared)):
        explanation = hea.explain(pattern, 8192, chosen=chosen, **options)
        assert explanation.backend == "gathered"
        assert "auto never takes it" in explanation.reasons["flex"]


def test_dropout_is_that_of_the_functions(pretended_gpu: None) -> None:
    """Of a query that reads one key, the weight is dropped or divided by the share that is kept."""
    case = Case("causal", 50)
    tensors = tensors_of(case, torch.float32)
    chosen = hea.ChosenBlocks(torch.arange(50).expand(1, 1, -1)[..., None], 1)
    call = replace(on_gpu(case), chosen=chosen, dropout=0.25)
    out, _ = flex.attend(tensors.q, tensors.k, tensors.v, call)
    values = tensors.v.repeat_interleave(2, 1)
    shares = (out / values).mean(-1)
    assert ((shares.abs() < 1e-4) | ((shares - 4 / 3).abs() < 1e-4)).all()
    assert 0.6 < (shares > 1).float().mean() < 0.9
