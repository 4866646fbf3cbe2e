"""`bench calibrate`: what is measured is kept, and how good its choices are is said."""

import json
from pathlib import Path

import pytest

from hf_efficient_attn.backends import machine_costs
from hf_efficient_attn.backends.machine_costs import Machine
from hf_efficient_attn.bench import calibrate, timing
from hf_efficient_attn.cli import main


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch, machine_anew: None) -> None:
    monkeypatch.setattr(calibrate, "TOKENS", 512)
    monkeypatch.setattr(calibrate, "BLOCK_LENGTHS", (32, 192))
    monkeypatch.setattr(calibrate, "LEAST_ROUNDS", 1)


def test_costs_are_kept_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "machines.json"
    monkeypatch.setenv(machine_costs.VARIABLE, str(kept))
    # one round agrees with itself
    before = machine_costs.machine_of("cpu")
    main(["bench", "calibrate", "--repeats", "1", "--threads", "1", "--output", str(tmp_path), "--device", "cpu"])
    printed, results = capsys.readouterr().out, json.loads((tmp_path / "calibrate.json").read_text())
    machine = machine_costs.machine_of("cpu")
    assert machine == Machine.from_dict(results["calibration"]) != before
    assert f"Kept in {kept}" in printed
    assert before.source in printed
    for dtype in ("float32", "bfloat16"):
        costs = machine.costs_in(dtype)
        assert costs.forward.blocks.lengths == costs.backward.blocks.lengths == (32, 192)
        numbers = [costs.dense_backward, costs.gathered, costs.moved, costs.forward.explicit]
        assert min(numbers + [time for _, time in costs.backward.blocks.per_score]) > 0


def test_few_rounds_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(machine_costs.VARIABLE, str(tmp_path / "machines.json"))
    monkeypatch.setattr(calibrate, "LEAST_ROUNDS", 2)
    main(["bench", "calibrate", "--repeats", "1", "--threads", "1", "--output", str(tmp_path), "--device", "cpu"])
    assert "1 rounds (--repeats) are too few; give at least 2." in capsys.readouterr().out
    assert not (tmp_path / "machines.json").exists()


@pytest.mark.parametrize(("most", "dtype"), [(100.0, "float32"), (0.0, "bfloat16")])
def test_bfloat16_is_computed_as_takes_less_time(
    most: float, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibrate, "MOST_IF_WIDENED", most)
    options = ["--show-only", "--repeats", "1", "--device", "cpu", "--output", str(tmp_path)]
    main(["bench", "calibrate", *options])
    printed, results = capsys.readouterr().out, json.loads((tmp_path / "calibrate.json").read_text())
    costs = Machine.from_dict(results["calibration"]).costs_in("bfloat16")
    assert costs.forward.is_widened == costs.backward.is_widened == (dtype == "float32")
    # the column of bfloat16 is the last
    assert [line.split()[-2] for line in printed.splitlines() if ": computed in" in line] == (
        [dtype] * 2 if dtype == "float32" else []
    )


def test_choices_are_compared(tmp_path: Path) -> None:
    lengths, options = ["128", "640"], ["--show-only", "--check", "--repeats", "1", "--max-seconds", "0.01", "--json"]
    command = ["bench", "calibrate", *options, "--device", "cpu", "--output", str(tmp_path), "--lengths", *lengths]
    main([*command, "--patterns", "band", "dilated"])
    results = json.loads((tmp_path / "calibrate.json").read_text())
    assert results["kept"] is None
    assert {(row["pattern"], row["tokens"], row["measure"]) for row in results["check"]} == {
        (pattern, tokens, measure)
        for pattern in ("band", "dilated")
        for tokens in (128, 640)
        for measure in ("forward", "forward + backward")
    }
    for row in results["check"]:
        times = row["milliseconds"]
        assert {"auto", "sdpa", "blocks of 32"} <= set(times)
        assert row["over_fastest"] == pytest.approx(times["auto"] / min(times.values()))


def test_rounds_that_disagree_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "machines.json"
    monkeypatch.setenv(machine_costs.VARIABLE, str(kept))
    ticks = iter(range(10**9))
    # ever slower
    monkeypatch.setattr(timing.time, "process_time", lambda: float(next(ticks)) ** 3)
    main(["bench", "calibrate", "--repeats", "3", "--threads", "1", "--output", str(tmp_path), "--device", "cpu"])
    printed, results = capsys.readouterr().out, json.loads((tmp_path / "calibrate.json").read_text())
    assert results["kept"] is None
    assert results["disagreement"] > 0.1
    assert "other programs are running" in printed
    assert not kept.exists()


def test_a_check_ends_in_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--show-only", "--check", "--repeats", "1", "--max-seconds", "0.01", "--max-minutes", "0"]
    command = ["bench", "calibrate", *options, "--device", "cpu", "--output", str(tmp_path), "--lengths", "640", "128"]
    main([*command, "--patterns", "band", "dilated"])
    results = json.loads((tmp_path / "calibrate.json").read_text())
    assert [(row["pattern"], row["tokens"]) for row in results["check"]] == [("band", 128)] * 2
