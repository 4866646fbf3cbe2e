"""The contest that all benchmarks are: options, turns, memory in processes, tables, JSON and a picture. No timing."""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import contest
import pytest
import star
import torch
from distributed import run_script

from hf_efficient_attn.bench import memory, report
from hf_efficient_attn.bench.report import json_text, resolve_device, without_samples

TINY = ["--batch-size", "2", "--layers", "1", "--hidden-size", "16", "--heads", "2", "--max-seconds", "0"]
TINY += ["--device", "cpu", "--repeats", "2"]
SUMMARY = {"median", "first_quartile", "third_quartile"}


def run(*options: object) -> None:
    """Run the contest of star.py at a tiny size; later options win."""
    star.CONTEST.run(star.__doc__, [*TINY, *map(str, options)])


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that a run over all encoders wrote; the memory of one is measured."""
    folder = tmp_path_factory.mktemp("bench") / "new" / "folder"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contest, "peak_memory", lambda build, arguments, device: 2**20)
        run("--lengths", 16, 8, "--memory-lengths", 16, "--output", folder)
    return folder


@pytest.fixture(scope="module")
def results(output: Path) -> Any:
    return json.loads((output / "star.json").read_text())


def test_a_row_per_length_and_contestant(results: Any, output: Path) -> None:
    assert set(results) == {"machine", "settings", "results"}
    names = list(star.CONTEST.contestants)
    assert [(row["tokens"], row["encoder"]) for row in results["results"]] == [
        (tokens, name) for tokens in (8, 16) for name in names
    ]
    for row in results["results"]:
        for measure in ("forward", "training"):
            others = {"dense", "lstm"} - {row["encoder"]}
            assert set(row[measure]) == {"milliseconds", "speed_against"}
            assert set(row[measure]["speed_against"]) == others
            assert set(row[measure]["milliseconds"]) == SUMMARY
        assert row["peak_memory_bytes"] == (2**20 if row["tokens"] == 16 else None)
    assert results["settings"]["lengths"] == [8, 16]
    assert results["machine"]["torch"] == torch.__version__
    assert str(output) not in json.dumps(results)


def test_tables_and_picture(output: Path, results: Any) -> None:
    text = (output / "star.md").read_text()
    assert text.startswith("# Star-Transformer: 1 layers, width 16")
    for title in ("Speed against dense, training step", "Milliseconds, forward", "Growth, and", "Peak MiB"):
        assert f"## {title}" in text
    assert (output / "star.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    # from what was written, too
    assert star.CONTEST.markdown(results) == text.strip()


def test_limits_leave_out_long_texts() -> None:
    limited = replace(star.CONTEST, limits={"lstm": "batch_size"})
    settings = {"encoders": ["star", "lstm"], "batch_size": 8}
    assert limited.names_of(16, settings) == ["star"]
    assert limited.names_of(8, settings) == ["star", "lstm"]


@pytest.mark.parametrize("is_forked", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_memory_is_measured_in_a_process(is_forked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_forked:
        monkeypatch.setattr(memory.subprocess, "run", run_script)
    shape = {"tokens": 64, "batch_size": 8, "layers": 1, "hidden_size": 64, "heads": 2, "dtype": "float32"}
    arguments = {"script": star.__file__, "name": "lstm", "shape": {**shape, "device": "cpu"}}
    assert contest.peak_memory(contest.training_of_script, arguments, torch.device("cpu")) > 0


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (["--repeats", 0], "repeats"),
        (["--lengths", 0], "lengths"),
        (["--threads", 0], "threads"),
        (["--hidden-size", 6, "--heads", 4], "hidden_size"),
        (["--encoders", "tree"], "tree"),
        (["--output", "{folder}/file"], "file"),
    ],
)
def test_refusals(options: list[object], field: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(SystemExit) as stop:
        run(*(str(option).format(folder=tmp_path) for option in options))
    assert stop.value.code == 2
    assert field in capsys.readouterr().err.splitlines()[-1]


def test_options_that_are_given_hold_with_quick(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    star.CONTEST.add_arguments(parser)
    args = parser.parse_args(["--quick", "--repeats", "7"])
    contest.fill_options(args, {"lengths": [64, 128], "repeats": 2})
    assert (args.lengths, args.repeats) == ([64, 128], 7)


def test_refuses_cuda_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="device='cuda', but torch"):
        resolve_device("cuda")
    assert resolve_device("auto") == torch.device("cpu")


def test_without_matplotlib_only_the_picture_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(report, "can_draw", lambda: False)
    args = argparse.Namespace(output=tmp_path, json=False)
    report.publish(args, "blocks", {"a": 1}, "| a |", draw=lambda results: pytest.fail("drawn"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["blocks.json", "blocks.md"]
    assert "pip install matplotlib" in capsys.readouterr().out


def test_json_is_all_that_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(report, "can_draw", lambda: False)
    found = {"a": 1, "results": [{"tokens": 8, "forward": {"milliseconds": {"median": 1.0}, "samples": [1.0]}}]}
    report.publish(argparse.Namespace(output=tmp_path, json=True), "blocks", found, "| a |")
    printed = capsys.readouterr()
    assert json.loads(printed.out) == without_samples(found) == json.loads((tmp_path / "blocks.json").read_text())
    assert f"Written: {tmp_path / 'blocks.json'}" in printed.err
    assert json_text(found).count("\n") == 5
