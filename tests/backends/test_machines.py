"""Costs of machines: which are used, how they are kept, and what they decide."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from backends_contract import EPYC, GPU, TILELESS_XEON, XEON, widening

import hf_efficient_attn as hea
from hf_efficient_attn.backends import machine_costs
from hf_efficient_attn.backends.blocked import execute
from hf_efficient_attn.backends.flex import backend as flex
from hf_efficient_attn.backends.machine_costs import Machine, Processor, known_machines, processor_of
from hf_efficient_attn.bench.calibrate import uniform
from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.layout.block_layout import BlockCosts

PATTERN = hea.patterns.Band(20, 20)
pytestmark = pytest.mark.usefixtures("machine_anew")


@pytest.fixture
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "new" / "machines.json"
    monkeypatch.setenv(machine_costs.VARIABLE, str(path))
    return path


@pytest.mark.parametrize("machine", known_machines(), ids=str)
def test_written_and_read_again(machine: Machine) -> None:
    assert Machine.from_dict(machine.to_dict()) == machine


@pytest.mark.parametrize(
    ("processor", "nearest"),
    [
        (EPYC.processor, EPYC),
        (replace(EPYC.processor, name="AMD Ryzen 9"), EPYC),
        (replace(XEON.processor, name="Intel(R) Xeon(R) Platinum 8480"), XEON),
        (Processor("cpu", "Intel(R) Core(TM)", "GenuineIntel", XEON.processor.vectors, False), TILELESS_XEON),
        # or a virtual machine that hides them
        (replace(XEON.processor, has_tiles=False), TILELESS_XEON),
        (replace(XEON.processor, vectors="AVX2", has_tiles=False), TILELESS_XEON),
        (Processor("cpu", "AMD Ryzen 5", "AuthenticAMD", "AVX2", False), EPYC),
        (Processor("cpu", "Apple M4", "", "DEFAULT", False), EPYC),
        (Processor("cuda", "NVIDIA H100"), GPU),
        (Processor("mps", ""), GPU),
    ],
)
def test_the_most_similar_is_taken(processor: Processor, nearest: Machine) -> None:
    assert machine_costs.nearest(processor, known_machines()) is nearest


def test_own_measurements_replace_what_is_known(own_file: Path) -> None:
    elsewhere = replace(XEON, processor=replace(XEON.processor, name="of another node of the cluster"))
    own = replace(uniform(EPYC, 16), processor=processor_of("cpu"), source="measured today")
    assert machine_costs.machine_of("cpu") != own
    for machine in (elsewhere, own, own):
        assert machine_costs.remember(machine) == own_file
    assert machine_costs.measured() == [elsewhere, own]
    assert machine_costs.machine_of("cpu") == own
    assert "measured today" in hea.explain(PATTERN, query_tokens=64, num_heads=1).to_text(400)
    assert [path.name for path in own_file.parent.iterdir()] == [own_file.name]


def test_a_file_with_numbers_of_cores_is_read(own_file: Path) -> None:
    own = replace(uniform(EPYC, 16), processor=processor_of("cpu"))
    data = own.to_dict()
    own_file.parent.mkdir()
    own_file.write_text(json.dumps([{**data, "processor": {**data["processor"], "num_cores": 2}}]))
    assert machine_costs.machine_of("cpu") == own


@pytest.mark.parametrize("text", ["{", "[1]", '[{"processor": {}}]', "{}x", '[{"costs": []}]'])
def test_a_damaged_file_is_refused(own_file: Path, text: str) -> None:
    own_file.parent.mkdir()
    own_file.write_text(text)
    with pytest.raises(ConfigurationError, match=r"machines.json is not .* Delete it"):
        hea.attention(*torch.randn(3, 1, 1, 200, 8), PATTERN, backend="blocked")


@pytest.mark.parametrize("tokens", [16, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_costs_decide_the_blocks_and_nothing_else(
    tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = (each.requires_grad_() for each in torch.randn(3, 1, 2, 500, 8, dtype=dtype))
    lengths, compiled = [], execute.call_slices

    def listed(call: object, q: object, k: object, costs: BlockCosts) -> object:
        lengths.append(costs.lengths)
        return compiled(call, q, k, costs)  # type: ignore[arg-type]

    monkeypatch.setattr(execute, "call_slices", listed)
    found = []
    for machine in (EPYC, uniform(EPYC, tokens)):
        with machine_costs.on_machine(machine):
            out = hea.attention(q, k, v, PATTERN, backend="blocked")
            found.append((out.detach(), *torch.autograd.grad(out.sum(), (q, k, v))))
    assert lengths[2:] == [(tokens,)] * 2
    for ours, other in zip(*found, strict=True):
        torch.testing.assert_close(ours, other, rtol=3e-2, atol=3e-2 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("backend", ["blocked", "sdpa", "gathered"])
def test_bfloat16_is_computed_in_float32_where_a_machine_says_so(backend: str) -> None:
    """Output and gradients are then nearer to those in float64, and still of bfloat16."""
    torch.manual_seed(0)
    states = torch.randn(4, 1, 2, 300, 16).bfloat16()
    chosen = hea.ChosenBlocks(torch.arange(3).expand(1, 1, 3, 3), 100, 100)
    chosen = chosen if backend == "gathered" else None

    def computed(dtype: torch.dtype, machine: Machine) -> list[torch.Tensor]:
        *leaves, grad = states.to(dtype)
        leaves = [leaf.requires_grad_() for leaf in leaves]
        with machine_costs.on_machine(machine):
            out = hea.attention(*leaves, PATTERN, chosen=chosen, backend=backend)
            found = [out, *torch.autograd.grad(out, leaves, grad)]
        assert {each.dtype for each in found} == {dtype}
        return [each.double() for each in found]

    expected, narrow = computed(torch.float64, EPYC), computed(torch.bfloat16, EPYC)
    for correct, wide, other in zip(expected, computed(torch.bfloat16, widening(EPYC)), narrow, strict=True):
        assert (wide - correct).norm() < 0.95 * (other - correct).norm()


def test_the_cheapest_length_is_taken() -> None:
    """Long blocks where they are so much faster that the keys that they read in vain do not matter."""
    keys = {32: 544, 192: 704}
    assert BlockCosts(((32, 1.2), (192, 1.0))).cheapest({32, 192}, keys.__getitem__) == 32
    assert BlockCosts(((32, 1.33), (192, 1.02))).cheapest({32, 192}, keys.__getitem__) == 192


def test_explain_names_a_missing_compiler_only_where_its_backend_costs_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "_compiler", lambda device: ("triton", False))
    options = {"device": "cuda", "dtype": torch.float32}
    found = (hea.explain(hea.patterns.Band(64, 64), tokens, **options) for tokens in (1024, 32_768))
    messages = [each.to_text(400) for each in found]
    assert ["auto may choose flex if triton is installed" in each for each in messages] == [False, True]
