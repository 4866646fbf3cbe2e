"""`hf-efficient-attn bench attention --profile`: parts, factors and sentences agree. No timing is asserted."""

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest

from hf_efficient_attn.analysis.pattern_sources import read_pattern
from hf_efficient_attn.bench import profile as attention_profile
from hf_efficient_attn.bench.cases import Shape
from hf_efficient_attn.bench.profile import (
    CASES,
    ProfileCase,
    Round,
    comparison_section,
    least_of,
    limit_sentence,
    profile_case,
)
from hf_efficient_attn.cli import main

SHAPE = Shape(batch_size=2, num_heads=2, head_dim=8, dtype="float32", device="cpu")
FACTORS = ["block granularity", "kernel speed", "kernel in place", "kernel share"]
TINY = (
    ProfileCase("band(4, 4)", 16, figure="speed"),
    *(ProfileCase("band(4, 4)", n, "blocked", "forward_backward", "growth") for n in (256, 512)),
)

JOINS = "joins by log-sum-exp"


def test_parts_and_factors_belong_together() -> None:
    case = ProfileCase("band(4, 4)", 512, "blocked", "forward_backward")
    found = profile_case(case, SHAPE, repeats=2, max_seconds=0.0)
    assert found["computed_by"] == "blocked"
    assert found["rounds"] == 2
    # 9 keys a query, fewer at the ends
    assert found["allowed_pairs"] == 2 * 2 * (512 * 9 - 20)
    assert list(found["factors"]) == FACTORS
    assert prod(found["factors"].values()) * found["residual"] == pytest.approx(found["efficiency"])
    assert 0 < found["factors"]["block granularity"] < 1
    assert 0 < found["factors"]["kernel share"] < 1
    assert {"kernel, forward", "kernel, backward"} <= set(found["purposes"])
    # one run has all keys of a query, unless all read a token far away
    assert JOINS not in found["purposes"]
    case = ProfileCase("band(4, 4) | global(0)", 512, "blocked", "forward")
    assert JOINS in profile_case(case, SHAPE, repeats=1, max_seconds=0.0)["purposes"]


@pytest.mark.parametrize("backend", ["blocked", "sdpa"])
def test_every_kernel_call_is_seen_in_both_directions(backend: str) -> None:
    found = profile_case(ProfileCase("full", 64, backend, "forward_backward"), SHAPE, repeats=1, max_seconds=0.0)
    pairs = dict.fromkeys(("forward", "backward"), 0)
    for kernel in found["kernels"]:
        assert kernel["calls"] > 0
        pairs[kernel["direction"]] += kernel["pairs"]
    # nothing but allowed pairs is computed: every one once forward and once backward
    assert pairs == dict.fromkeys(pairs, 2 * 2 * 64 * 64)
    assert found["factors"]["block granularity"] == pytest.approx(1.0)


def test_of_several_rounds_the_least_disturbed_measurements_count() -> None:
    def kernel(seconds: float) -> dict[str, Any]:
        return {"seconds": seconds}

    first = Round({"own": 2.0, "dense": 4.0}, {"a": 1.0, "b": 5.0}, [kernel(1.0)])
    second = Round({"own": 3.0, "dense": 3.0}, {"a": 2.0, "b": 1.0}, [kernel(0.25), kernel(0.5)])
    assert least_of([first, second]) == Round({"own": 2.0, "dense": 3.0}, second.purposes, second.kernels)


def test_the_command_writes_what_it_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(attention_profile, "CASES", TINY)
    monkeypatch.setattr(attention_profile, "LAYOUTS", (("bigbird", 1024),))
    options = ["--heads", "2", "--head-dim", "8", "--repeats", "1", "--max-seconds", "0", "--output", str(tmp_path)]
    main(["bench", "attention", "--profile", *options])
    markdown = (tmp_path / "profile.md").read_text()
    printed = capsys.readouterr().out
    assert printed.startswith(markdown)
    assert f"Written: {tmp_path / 'profile.json'}" in printed[len(markdown) :]
    results = json.loads((tmp_path / "profile.json").read_text())
    assert [case["computed_by"] for case in results["cases"]] == ["sdpa", "blocked", "blocked"]
    assert set(results["layouts"][0]["milliseconds"]) > {"drawing random blocks", "forward pass"}
    for title in (
        "## band(4, 4), auto, 16 tokens, forward",
        "## Growth from 256 to 512 tokens",
        "## Building the layout",
    ):
        assert title in markdown


def test_only_cpus_are_profiled(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "attention", "--profile", "--device", "cuda"])
    assert "device='cuda' cannot be profiled" in capsys.readouterr().err


def case_of(**changed: Any) -> dict[str, Any]:
    factors = dict(zip(FACTORS, (0.5, 0.8, 1.0, 0.7), strict=True))
    purposes = {"kernel, forward": 7.0, "gathers and copies": 2.0, "masks": 1.0}
    figures = {"milliseconds": 10.0, "efficiency": 0.3, "speed": 0.9, "computed_by": "blocked", "tokens": 128}
    names = {"pattern": "band", "backend": "auto", "measure": "forward", "figure": "efficiency"}
    return {"factors": factors, "purposes": purposes, **figures, **names, **changed}


def test_the_sentence_names_the_largest_loss() -> None:
    text = limit_sentence(case_of())
    assert "30% useful-pair efficiency" in text
    assert "block granularity (× 0.50; 60% without it)" in text
    # dense attention with a mask computes all pairs on purpose
    text = limit_sentence(case_of(figure="speed", speed=0.7))
    assert "0.70 times the speed of dense attention" in text
    assert "kernel share (× 0.70; 1.00 times" in text
    assert "most of it gathers and copies" in text


def test_growth_names_what_grows_fastest() -> None:
    long = case_of(tokens=256, milliseconds=23.0, purposes={"kernel, forward": 14.0, "gathers and copies": 7.0},
                   figure="growth")  # fmt: skip
    heading, sentence, table = comparison_section(case_of(), long)
    assert heading == "## Growth from 128 to 256 tokens: band, auto, forward"
    assert sentence.startswith("2.30 times the time.")
    assert sentence.endswith("the part that adds most beyond 2 × the first call is gathers and copies: +3 ms.")
    assert "3.50" in table


def test_two_patterns_of_one_length_are_compared() -> None:
    other = case_of(pattern="dilated", milliseconds=12.0, figure="time")
    heading, sentence, _ = comparison_section(case_of(), other)
    assert heading == "## dilated against band: auto, 128 tokens, forward"
    assert sentence.startswith("1.20 times the time.")
    assert sentence.endswith("no part takes more than 1 × its time in the first call.")


@pytest.mark.parametrize("case", [case for case in CASES if case.aligned])
def test_aligned_patterns_have_no_partial_blocks(case: ProfileCase) -> None:
    pattern = read_pattern(str(case.aligned))
    assert pattern.granularity % 64 == 0
