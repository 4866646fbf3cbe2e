"""`hf-efficient-attn bench models`: what it writes, compares and refuses. No timing is asserted."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_efficient_attn.bench import models
from hf_efficient_attn.bench.models import (
    ARCHITECTURES,
    OURS,
    SELF_ONLY,
    THEIRS,
    Shape,
    build_encoder,
    largest_difference,
    read_comparably,
    training_step,
)
from hf_efficient_attn.cli import main
from hf_efficient_attn.errors import EfficientAttentionError

LENGTHS = [512, 1024]
TINY = ["--hidden-size", 16, "--num-heads", 2, "--intermediate-size", 32, "--layers", 2, "--layer-tokens", 1024]
QUICK = [*TINY, "--repeats", 2, "--max-seconds", 0, "--device", "cpu", "--memory-layers", 1]
SUMMARY = {"median", "first_quartile", "third_quartile"}
SHAPE = Shape(1, 16, 2, 32, 1024, 2, 0.0, "float32", "cpu")
ENCODERS = [(name, by) for name, architecture in ARCHITECTURES.items() for by in architecture.makers]
PEERS = ["longformer", "bert", SELF_ONLY]
IN_TREE = [name for name, by in ENCODERS if by == THEIRS]


def bench(*options: object) -> None:
    """Run the command at a tiny size; later options win."""
    main(["bench", "models", *map(str, [*QUICK, *options])])


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that a run over some architectures wrote; twins are measured up to 512 tokens."""
    folder = tmp_path_factory.mktemp("bench") / "new"
    with pytest.MonkeyPatch.context() as patch:
        # in processes of their own, which take seconds to start: test_memory
        patch.setattr(models, "cases_apart", lambda build, arguments, device: nullcontext(build(*arguments)))
        bench("--peers", *PEERS, "--lengths", *LENGTHS, "--peer-limit", 512, "--memory-lengths", "--output", folder)
    return folder


@pytest.fixture(scope="module")
def results(output: Path) -> Any:
    return json.loads((output / "models.json").read_text())


def test_a_row_per_length_and_encoder(results: Any) -> None:
    assert set(results) == {"machine", "settings", "differences", "results"}
    rows = [(row["tokens"], row["model"], row["by"]) for row in results["results"]]
    short = [encoder for encoder in ENCODERS if encoder[0] in PEERS]
    long = [("longformer", OURS), ("bert", THEIRS), (SELF_ONLY, OURS)]
    assert rows == [*((512, *encoder) for encoder in short), *((1024, *encoder) for encoder in long)]
    assert {row["tokens"]: row["layers"] for row in results["results"]} == {512: 2, 1024: 1}
    for row in results["results"]:
        for measure in ("forward", "training"):
            assert set(row[measure]["milliseconds"]) == SUMMARY
            assert "samples" not in row[measure]


def test_outputs_were_compared(results: Any) -> None:
    assert set(results["differences"]) == {"longformer", "bert"}
    for by_length in results["differences"].values():
        assert 0 < by_length["512"] < 1e-5


def test_speeds_are_ratios_within_a_round() -> None:
    def row(name: str, by: str, milliseconds: list[float]) -> dict[str, Any]:
        return {"model": name, "by": by, "tokens": 8, "training": {"samples": milliseconds}, "forward": {"reason": "."}}

    rows = [row("longformer", OURS, [1.0, 1.0, 1.0]), row("longformer", THEIRS, [3.0, 4.5, 9.0])]
    models.add_ratios(rows)
    assert set(rows[0]["speed_against"]) == {"longformer"}
    assert rows[0]["speed_against"]["longformer"]["training"]["median"] == 4.5


def test_tables_and_picture(output: Path) -> None:
    markdown = (output / "models.md").read_text()
    for title in ("Speed of ours, training step", "Milliseconds, forward"):
        assert f"## {title}" in markdown
    assert "Peak MiB" not in markdown
    assert all(f"| {SELF_ONLY} / {name}" in markdown for name in ("longformer", "bert"))
    assert "Everything requested was measured." in markdown
    assert (output / "models.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.thorough
def test_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench("--peers", "bert", "--lengths", 512, "--memory-lengths", 512, "--output", tmp_path)
    rows = json.loads((tmp_path / "models.json").read_text())["results"]
    assert [row["by"] for row in rows] == [OURS, THEIRS]
    assert all(row["peak_memory_bytes"] is not None for row in rows)
    assert "## Peak MiB of a training step beyond the weights, 1 layers" in capsys.readouterr().out


@pytest.mark.parametrize("name", IN_TREE)
def test_both_train_from_the_same_weights(name: str) -> None:
    encoders = {by: build_encoder(name, by, SHAPE) for by in (OURS, THEIRS)}
    largest_difference(name, *(read_comparably(encoder) for encoder in encoders.values()), SHAPE)
    for encoder in encoders.values():
        before = {key: tensor.clone() for key, tensor in encoder.model.named_parameters()}
        training_step(encoder)()
        moved = {key for key, tensor in encoder.model.named_parameters() if not torch.equal(tensor, before[key])}
        kinds = ("embed_tokens", "word_embeddings", "shared")
        assert any(key.startswith("encoder.") or "layers.0." in key for key in moved)
        assert any(kind in key for key in moved for kind in kinds)


def test_the_patterns_are_those_of_the_papers() -> None:
    configs = {name: build_encoder(name, OURS, SHAPE).model.config for name in IN_TREE}
    assert configs["longformer"].attention_pattern == [{"kind": "band", "left": 256, "right": 256}]
    assert configs["longformer"].global_tokens == configs["led"].global_tokens == "first"
    assert configs["big_bird"].random_blocks_in_eval == "fixed"
    assert configs["bert"].attention_pattern == {"kind": "full"}


def test_the_bound_reads_nothing_but_itself() -> None:
    encoder = build_encoder(SELF_ONLY, OURS, SHAPE)
    before = read_comparably(encoder)
    encoder.inputs["input_ids"][:, 5] = 3
    differs = (read_comparably(encoder) != before).any(-1)
    assert differs[:, 5].all()
    assert differs.sum() == len(differs)


def test_other_outputs_are_not_timed() -> None:
    encoders = {by: build_encoder("longformer", by, SHAPE) for by in (OURS, THEIRS)}
    encoders[OURS].model.config.global_tokens = None
    with pytest.raises(EfficientAttentionError, match="longformer and transformers' differ by"):
        largest_difference("longformer", *(read_comparably(encoder) for encoder in encoders.values()), SHAPE)
