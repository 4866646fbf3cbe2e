"""examples/experiments/masked_summation.py, run as its users run it, on short sequences; and the sums under it."""

import json
from itertools import islice
from pathlib import Path

import pytest
import torch
from run_example import finish_example, refusal, start_forked

import hf_efficient_attn as hea

SCRIPT = "experiments/masked_summation.py"
TINY = ["--hidden_size", "16", "--num_attention_heads", "2", "--vector_size", "2", "--num_marked", "3"]
TINY += ["--train_lengths", "5", "9", "--test_lengths", "4", "8", "16", "--test_batches", "2", "--batch_size", "4"]
TINY += ["--max_steps", "4", "--seeds", "0", "1"]


def test_networks_are_tested_at_every_length(tmp_path: Path) -> None:
    output = finish_example(start_forked(tmp_path, SCRIPT, *TINY))
    assert "Error by length" in output
    networks = json.loads((tmp_path / "run" / "results.json").read_text())["networks"]
    assert list(networks) == ["star", "dense", "lstm"]
    for row in networks.values():
        assert list(row["errors"]) == list(row["milliseconds"]) == ["4", "8", "16"]
        assert all(len(errors) == 2 and min(errors) > 0 for errors in row["errors"].values())
        assert row["num_steps"] == 4
    assert networks["star"]["reload_difference"] == 0
    model = hea.StarTransformerForSequenceClassification.from_pretrained(tmp_path / "run" / "star")
    assert model.num_parameters() == networks["star"]["parameters"]
    assert (tmp_path / "run" / "errors.png").stat().st_size > 10_000
    assert refusal(start_forked(tmp_path, SCRIPT, "--num_marked", "17")).startswith("--num_marked 17 must be from 1")


def test_sums_are_those_of_the_marked_vectors() -> None:
    from comparison.marked_vectors import MarkedVectors, relative_error

    batches = MarkedVectors((6, 40), num_marked=5, width=3, batch_size=16, seed=0)
    seen = list(islice(batches, 200))
    for batch, again in zip(seen, batches, strict=False):
        vectors = batch["inputs_embeds"]
        assert torch.equal(vectors, again["inputs_embeds"])
        assert (vectors[..., 0].sum(1) == 5).all()
        torch.testing.assert_close(torch.einsum("bn,bnw->bw", vectors[..., 0], vectors[..., 1:]), batch["labels"])
    assert {batch["inputs_embeds"].shape[1] for batch in seen} == {*range(6, 41)}

    class Guess(torch.nn.Module):
        def forward(self, inputs_embeds: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"logits": torch.full((len(inputs_embeds), 3), 2.5)}

    assert relative_error(Guess(), batches, 200)[0] == pytest.approx(1.0, abs=0.02)
