"""How far the costs that `explain` estimates are from what the benchmark has measured."""

import json
from pathlib import Path

import pytest

import hf_efficient_attn as hea
from hf_efficient_attn.bench.cases import pattern_of

RESULTS = Path(__file__).parents[2] / "model_cards" / "results"


@pytest.mark.parametrize("longest", [16_384, pytest.param(131_072, marks=pytest.mark.thorough)])
def test_estimates_are_as_low_as_the_docstring_says(longest: int) -> None:
    found = json.loads((RESULTS / "attention.json").read_text())
    rows = [row for row in found["results"] if row["contestant"] == "auto" and 2048 <= row["tokens"] <= longest]
    assert {row["pattern"] for row in rows} == {"band", "longformer", "bigbird", "dilated"}
    for row in rows:
        explanation = hea.explain(pattern_of(row["pattern"], row["tokens"]), row["tokens"])
        for measure in ("forward", "forward_backward"):
            measured = 1 / row[measure]["speed_against_dense"]["median"]
            assert 1.0 <= measured / explanation.relative_cost <= 2.8, (row["pattern"], row["tokens"], measure)


def test_costs_of_a_device_of_another_kind_are_said_to_be_unconfirmed() -> None:
    said = {
        device: hea.explain(hea.patterns.Band(64, 64), 1024, device=device).to_text(400)
        for device in ("cpu", "cuda", "mps")
    }
    assert [device for device, text in said.items() if "no measurement has confirmed" in text] == ["mps"]
