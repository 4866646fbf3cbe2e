"""`hf-efficient-attn bench content`: what it writes, compares and judges. No timing is asserted."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_efficient_attn.bench.content.cases import (
    BLOCKS,
    DENSE,
    IN_TREE,
    LAYERS,
    REFORMER,
    ROUTING,
    Shape,
    build_layer,
    training_step,
)
from hf_efficient_attn.bench.content.depth import PLAIN, REVERSIBLE
from hf_efficient_attn.bench.content.targets import add_ratios, targets
from hf_efficient_attn.cli import main

LENGTHS = [64, 128]
SIZES = ["--heads", 2, "--head-dim", 8, "--hash-chunk-tokens", 16, "--cluster-tokens", 16, "--block-tokens", 16]
TINY = [*SIZES, "--chosen-tokens", 8, "--depth-tokens", 1024, "--repeats", 2, "--max-seconds", 0, "--device", "cpu"]


def shape(tokens: int) -> Shape:
    return Shape(tokens, 2, 8, 1, 1, 16, 16, 16, 3, 8, "float32", "cpu")


@pytest.fixture
def output(tmp_path: Path, measured_in_forks: None) -> Path:
    """The folder that a run over all layers wrote."""
    options = ["--lengths", *LENGTHS, "--memory-lengths", 128, "--depths", 2, 6, "--peer-limit", 64]
    main(["bench", "content", *map(str, [*TINY, *options, "--output", tmp_path])])
    return tmp_path


def test_results_tables_and_picture(output: Path) -> None:
    results = json.loads((output / "content.json").read_text())
    rows = results["results"]
    assert [(row["tokens"], row["layer"]) for row in rows] == [(tokens, name) for tokens in LENGTHS for name in LAYERS]
    for row in rows:
        is_timed = row["layer"] != IN_TREE or row["tokens"] == 64
        for measure in ("forward", "training"):
            assert len(row[measure].get("samples", [])) == 2 * is_timed
        assert (row["peak_memory_bytes"] is not None) == (is_timed and row["tokens"] == 128)
    reformer = next(row for row in rows if row["layer"] == REFORMER)
    assert set(reformer["training"]["speed_against"]) == {DENSE, IN_TREE}
    depths = {(row["stack"], row["layers"]) for row in results["depth"]}
    assert depths == {(stack, layers) for stack in (PLAIN, REVERSIBLE) for layers in (2, 6)}
    markdown = (output / "content.md").read_text()
    for title in ("Targets", "Milliseconds, training step", "Crossover and growth", "Peak MiB of 1,024 tokens"):
        assert f"## {title}" in markdown
    assert (output / "content.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_causal_and_train(name: str) -> None:
    sizes = shape(32)
    layer, states = build_layer(name, sizes).eval(), sizes.states()
    changed = states.detach().clone()
    changed[:, -1] += 1.0
    torch.manual_seed(0)
    first = layer(states)
    torch.manual_seed(0)
    # two chunks, which read each other: the whole past, whatever the buckets
    torch.testing.assert_close(layer(changed)[:, :16], first[:, :16])
    seen: dict[str, torch.Tensor] = {}
    for key, parameter in layer.named_parameters():
        parameter.register_hook(lambda gradient, key=key: seen.update({key: gradient}))
    training_step(layer, states)()
    assert set(seen) == {key for key, _ in layer.named_parameters()}
    assert states.grad is None


def test_what_chooses_everything_is_dense_attention() -> None:
    sizes = shape(48)
    states = sizes.states()
    torch.testing.assert_close(build_layer(BLOCKS, sizes)(states), build_layer(DENSE, sizes)(states))


def test_the_reformers_are_equal_with_equal_weights() -> None:
    # two chunks, which read each other, since that before the first is the last: all tokens, whatever the buckets
    sizes = shape(32)
    states = sizes.states()
    own, theirs = (build_layer(name, sizes).eval() for name in (REFORMER, IN_TREE))
    theirs.attention.query_key.load_state_dict(own.attention.qk_proj.state_dict())
    theirs.attention.value.load_state_dict(own.attention.v_proj.state_dict())
    theirs.o_proj.load_state_dict(own.attention.o_proj.state_dict())
    torch.testing.assert_close(own(states), theirs(states), atol=1e-5, rtol=1e-4)


def test_training_moves_centroids() -> None:
    sizes = shape(64)
    layer = build_layer(ROUTING, sizes)
    before = layer.attention.centroids.means.clone()
    training_step(layer, sizes.states())()
    assert not torch.equal(layer.attention.centroids.means, before)


def test_targets_are_judged_by_medians() -> None:
    def row(layer: str, tokens: int, milliseconds: float) -> dict[str, Any]:
        timed = {"milliseconds": {"median": milliseconds}, "samples": [milliseconds] * 3}
        return {"layer": layer, "tokens": tokens, "forward": {}, "training": timed, "peak_memory_bytes": None}

    dense = [row(DENSE, 4096, 10.0), row(DENSE, 8192, 40.0), row(DENSE, 16384, 160.0)]
    rows = [*dense, row(IN_TREE, 4096, 24.0), *(row(REFORMER, 4096 * 2**n, 8.0 * 2.3**n) for n in range(3))]
    rows += [row(ROUTING, 4096, 9.0), row(ROUTING, 8192, 30.0), row(ROUTING, 16384, 90.0)]
    rows += [row(BLOCKS, 4096, 30.0), row(BLOCKS, 8192, 50.0), row(BLOCKS, 16384, 100.0)]
    add_ratios(rows)
    depth = [{"layers": count, "stack": REVERSIBLE, "peak_memory_bytes": 100 + count} for count in (2, 12)]
    judged = [each[1:] for each in targets(rows, depth)]
    assert judged == [
        ("at least 3 x", "3.00 x", True),
        ("at most 4,096 tokens", "4,096 tokens", True),
        ("at most 8,192 tokens", "4,096 tokens", True),
        ("at most 8,192 tokens", "10,240 tokens", False),
        ("at most 2.2 x", "2.30 x", False),
        ("at most 2.2 x", "3.00 x", False),
        ("at most 2.2 x", "2.00 x", True),
        ("at most 1.1 x", "1.10 x", True),
    ]
