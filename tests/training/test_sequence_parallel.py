"""Under DeepSpeed's sequence parallelism (Ulysses) processes that share a text compute what one process would.

Two processes (gloo, CPU) run `sequence_parallel_script.py` on models that this process saves.
With DeepSpeed itself, as tests/neighbours.sh does: ULYSSES=--deepspeed pytest tests/training/test_sequence_parallel.py
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from distributed import run_distributed
from sequence_parallel_script import batch, results

import hf_efficient_attn as hea
from hf_efficient_attn.integration import model_info
from hf_efficient_attn.patterns import Band, Causal, Dilated, GlobalTokens, PerHead, RandomBlocks

SCRIPT = Path(__file__).parents[1] / "sequence_parallel_script.py"
PER_HEAD = PerHead([Band(3, 0), Dilated(12, 0, 3), Band(0, 0) | RandomBlocks(1, 4, is_causal=True), Causal()])
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 8}
SLIDING = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 4}

# (config, pattern), a line a case
CASES: dict[str, tuple[Any, Any]] = {
    "one_pattern": (
        lambda: transformers.LlamaConfig(**SIZES, num_key_value_heads=4),
        Band(6, 0) | GlobalTokens([0, 1]),
    ),
    "layers": (lambda: transformers.Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=4), [Band(3, 0), Causal()]),
    "per_head": (lambda: transformers.LlamaConfig(**SIZES, num_key_value_heads=4), PER_HEAD),
    # each process gets a copy of the only key head
    "fewer_key_heads": (lambda: transformers.LlamaConfig(**SIZES, num_key_value_heads=1), PER_HEAD),
    "own_windows": (lambda: transformers.Gemma3TextConfig(**SIZES, **SLIDING, num_key_value_heads=2), None),
}


def build(name: str) -> Any:
    """Return a model with weights large enough for attention to matter."""
    config, pattern = CASES[name]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config(), attn_implementation="efficient")
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model if pattern is None else hea.sparsify(model, pattern)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the models, what one process computes with them, and what two do."""
    folder = tmp_path_factory.mktemp("sequence_parallel")
    for name in CASES:
        model = build(name)
        model.save_pretrained(folder / name)
        torch.save(results(model.double().eval(), batch(SIZES["vocab_size"])), folder / f"{name}-alone.pt")
    run_distributed(SCRIPT, folder, *os.environ.get("ULYSSES", "").split())
    return folder


@pytest.mark.parametrize("name", CASES)
def test_two_processes_compute_what_one_does(folder: Path, name: str) -> None:
    alone, together = torch.load(folder / f"{name}-alone.pt"), torch.load(folder / f"{name}.pt")
    for quantity, expected in alone.items():
        largest = float(expected.abs().max())
        assert largest > 1e-4
        # norms compute in single precision, whatever the weights have
        torch.testing.assert_close(together[quantity], expected, atol=1e-6 * largest, rtol=0)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("padding", "UnsupportedBackendError: Another library has replaced"),
        ("positions", "position_ids restart exactly where the part of each process begins"),
        ("heads", "UnsupportedBackendError: LlamaAttention computes 4 of 8 heads"),
    ],
)
def test_what_a_process_cannot_see_is_said(folder: Path, what: str, message: str) -> None:
    assert message in torch.load(folder / "per_head.pt")["said"][what]


@pytest.mark.parametrize(("tensor_rank", "sequence_rank"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_heads_of_tensor_parallelism_are_dealt_out(
    monkeypatch: pytest.MonkeyPatch, tensor_rank: int, sequence_rank: int
) -> None:
    """A process of four has two of eight heads: its half of the half that its projections compute."""
    layer = build("per_head").model.layers[0].self_attn
    monkeypatch.setattr(model_info, "head_shards", lambda module: [(tensor_rank, 2)])
    monkeypatch.setattr(model_info, "shard_of_heads", lambda implementation: (sequence_rank, 2))
    assert model_info.head_range(layer, PER_HEAD, 2) == (4 * tensor_rank + 2 * sequence_rank, 8)
