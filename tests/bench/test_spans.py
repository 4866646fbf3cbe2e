"""`hf-efficient-attn bench spans`: what it writes, compares and refuses. No timing is asserted."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_efficient_attn.bench.spans.cases import (
    ADAPTIVE,
    DENSE,
    DYNAMIC,
    FIXED,
    FROZEN,
    MODELS,
    POSITIONS,
    Shape,
    build_model,
    check_frozen,
    decode,
    full_cache,
    kept_keys,
    training_step,
)
from hf_efficient_attn.bench.spans.profile import LONGEST, average, profile
from hf_efficient_attn.bench.spans.targets import add_ratios, targets
from hf_efficient_attn.cli import main
from hf_efficient_attn.errors import EfficientAttentionError
from hf_efficient_attn.models.spans.costs import average_span, max_span
from hf_efficient_attn.models.spans.module import span_modules

LIMITS = [256, 512]
TINY = ["--hidden-size", 16, "--num-heads", 4, "--intermediate-size", 32, "--layers", 3, "--segment-tokens", 32]
DECODING = ["--decode-tokens", 1, "--decode-batch-sizes", 3, 1]
QUICK = [*TINY, *DECODING, "--repeats", 2, "--max-seconds", 0, "--device", "cpu"]
SUMMARY = {"median", "first_quartile", "third_quartile"}


def shape(positions: str = "rope", limit: int = 256) -> Shape:
    return Shape(positions, limit, 3, 16, 4, 32, 32, 2, 0.0, "float32", "cpu")


def bench(*options: object) -> None:
    """Run the command at a tiny size; later options win."""
    main(["bench", "spans", *map(str, [*QUICK, *options])])


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that a run over all models wrote."""
    folder = tmp_path_factory.mktemp("bench") / "new"
    bench("--limits", *LIMITS, "--memory-limits", "--output", folder)
    return folder


@pytest.fixture(scope="module")
def results(output: Path) -> Any:
    return json.loads((output / "spans.json").read_text())


def test_a_row_per_positions_limit_and_model(results: Any) -> None:
    assert set(results) == {"machine", "settings", "results"}
    rows = [(row["positions"], row["limit"], row["model"]) for row in results["results"]]
    assert rows == [(positions, limit, name) for positions in POSITIONS for limit in LIMITS for name in MODELS]
    for row in results["results"]:
        assert list(row["times"]) == ["training", "decode_1", "decode_3"]
        for times in row["times"].values():
            assert set(times["milliseconds"]) == SUMMARY
            assert len(times["samples"]) == 2
        assert (row["difference"] is not None) == (row["model"] == FROZEN)


def test_costs_follow_the_spans(results: Any) -> None:
    rows = {row["model"]: row for row in results["results"] if (row["positions"], row["limit"]) == ("rope", 512)}
    layers = profile(512, 3, 4)
    assert rows[FIXED]["kept_keys"] == rows[DENSE]["kept_keys"] == 512
    assert rows[ADAPTIVE]["kept_keys"] == rows[FROZEN]["kept_keys"] == average(layers)
    maps = 4 * 16**2 + 2 * 16 * 32
    assert rows[ADAPTIVE]["flops_per_token"] == pytest.approx(3 * (maps + 2 * average(layers) * 16))
    # float32 keys and values; the nearest of n keys is the token before the query; room for 32 new tokens
    assert rows[ADAPTIVE]["cache_bytes"] == 2 * 4 * 16 * sum(max(layer) + 32 for layer in layers)
    assert rows[FIXED]["cache_bytes"] == 2 * 4 * 16 * 3 * (512 + 32)


def test_ratios_are_of_rounds(results: Any) -> None:
    rows = {row["model"]: row for row in results["results"] if (row["positions"], row["limit"]) == ("rope", 512)}
    assert {name: set(row["time_over"]) for name, row in rows.items()} == {
        FIXED: {DENSE},
        ADAPTIVE: {FIXED, DENSE},
        FROZEN: {FIXED},
        DYNAMIC: {ADAPTIVE, FIXED},
        DENSE: set(),
    }
    pairs = zip(*(rows[name]["times"]["decode_3"]["samples"] for name in (ADAPTIVE, FIXED)), strict=True)
    assert rows[ADAPTIVE]["time_over"][FIXED]["decode_3"]["median"] == pytest.approx(sum(a / b for a, b in pairs) / 2)


def test_tables_and_picture(output: Path) -> None:
    markdown = (output / "spans.md").read_text()
    for title in ("Targets", "Time ratios, training step", "Decode step of 3 texts, milliseconds", "MiB of the cache"):
        assert f"## {title}" in markdown
    assert "Peak MiB" not in markdown
    assert "| rope, limit 512: decode step of 1 text, time over fixed" in markdown
    assert (output / "spans.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.usefixtures("measured_in_forks")
def test_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = ["--models", FIXED, ADAPTIVE]
    bench("--limits", 256, "--memory-limits", 256, "--positions", "rope", *models, "--output", tmp_path)
    rows = json.loads((tmp_path / "spans.json").read_text())["results"]
    assert all(row["peak_memory_bytes"] is not None for row in rows)
    printed = capsys.readouterr().out
    assert "## Peak MiB of a training step beyond weights and memory" in printed
    assert "rope, limit 256: peak memory of training over fixed" in printed


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("name", MODELS)
def test_models_train_and_decode(name: str, positions: str) -> None:
    sizes = shape(positions)
    model = build_model(name, sizes)
    spans = [each.head_spans().clone() for each in span_modules(model)]
    before = {key: parameter.clone() for key, parameter in model.named_parameters()}
    step = training_step(name, model, sizes)
    step()
    step()
    moved = {key for key, parameter in model.named_parameters() if not torch.equal(parameter, before[key])}
    assert {key for key in before if "spans" not in key} == moved
    # the means over the tokens of the step; their parameters have not moved
    if name != DYNAMIC:
        assert all(map(torch.equal, spans, (each.head_spans() for each in span_modules(model))))
    cache = full_cache(name, model.eval(), sizes, 2)
    held = [layer.keys.shape[2] for layer in cache.layers]
    decode(model, cache, 2, 2)
    grown = 2 if name == DENSE else 0
    assert [layer.keys.shape[2] for layer in cache.layers] == [tokens + grown for tokens in held]


def test_dynamic_spans_lie_around_the_adaptive_ones() -> None:
    sizes = shape(limit=512)
    means = []
    for name in (ADAPTIVE, DYNAMIC):
        model = build_model(name, sizes).eval()
        model(input_ids=torch.arange(200)[None], use_cache=False)
        means.append(torch.stack([each.head_spans() for each in span_modules(model)]))
        longest = torch.stack([each.longest_spans() for each in span_modules(model)])
    is_long = means[0] > 32
    assert is_long.any()
    assert ((means[1] / means[0])[is_long] - 1).abs().max() < 0.5
    assert (longest > 1.2 * means[1])[is_long & (means[0] < 256)].all()


def test_memory_is_full_from_the_first_step() -> None:
    model = build_model(ADAPTIVE, shape(limit=512))
    training_step(ADAPTIVE, model, shape(limit=512))
    states = model.base_model.memory.open(torch.tensor([1, 1]), True, 3).memories
    assert [len(each[0]) for each in states] == [min(512, max(layer) + 64) for layer in profile(512, 3, 4)]


def test_profile_is_that_of_the_picture() -> None:
    assert [max(layer) for layer in profile(4096, 12, 8)] == list(LONGEST)
    sizes = Shape("rope", 4096, 12, 16, 8, 8, 32, 1, 0.0, "float32", "cpu")
    model = build_model(ADAPTIVE, sizes)
    assert max_span(model) == 3900
    assert kept_keys(model, sizes) == average(profile(4096, 12, 8))
    # the authors round up the mean of each layer
    assert kept_keys(model, sizes) <= average_span(model) < kept_keys(model, sizes) + 1


def test_other_outputs_are_not_timed() -> None:
    models = [build_model(name, shape()) for name in (ADAPTIVE, FROZEN)]
    assert check_frozen(*models, shape()) < 1e-5
    span_modules(models[0])[-1].ratio.data.fill_(1.0)
    with pytest.raises(EfficientAttentionError, match="differ by"):
        check_frozen(*models, shape())


def test_targets_are_judged_by_medians() -> None:
    def row(name: str, flops: float, milliseconds: list[float], peak: int | None) -> dict[str, Any]:
        times = {"training": {"samples": milliseconds}, "decode_1": {"samples": milliseconds}}
        sizes = {"model": name, "positions": "rope", "limit": 1024, "peak_memory_bytes": peak}
        return {**sizes, "times": times, "flops_per_token": flops}

    rows = [row(FIXED, 4.0, [10.0, 10.0, 20.0], 100), row(ADAPTIVE, 2.0, [6.6, 6.0, 13.2], 101)]
    add_ratios(rows)
    training, decoding, memory = targets(rows)
    assert training[1:] == decoding[1:] == ("at most 1.3 x 0.50 = 0.65", "0.66", False)
    assert memory[1:] == ("below 1", "1.01", False)
    rows[0]["peak_memory_bytes"] = None
    assert len(list(targets(rows))) == 2
