"""`hf-efficient-attn bench mechanisms`: what it writes and compares. No timing is asserted."""

import json
from pathlib import Path

import pytest
import torch

from hf_efficient_attn.bench.mechanisms.cases import MECHANISMS, Shape
from hf_efficient_attn.bench.mechanisms.models import Model, build_model, read_prompt, training_step
from hf_efficient_attn.cli import main

TINY = ["--quick", "--lengths", 16, 32, "--hidden-size", 16, "--heads", 2, "--keys", 8, "--max-seconds", 0]
TINY += ["--dense-limit", 16, "--scores-limit", 8, "--device", "cpu"]


def results_of(folder: Path, *options: str) -> tuple[dict, str]:
    main(["bench", "mechanisms", *map(str, [*TINY, *options, "--output", folder])])
    assert (folder / "mechanisms.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    text = (folder / "mechanisms.md").read_text(encoding="utf-8")
    return json.loads((folder / "mechanisms.json").read_text(encoding="utf-8")), text


def test_causal_mechanisms_are_timed_and_decoded(tmp_path: Path) -> None:
    names = ["dense", "talking_heads", "band", "linear"]
    results, text = results_of(tmp_path, "--causal", "--memory-lengths", "--mechanisms", *names)
    rows = results["results"]
    assert [(row["tokens"], row["mechanism"]) for row in rows] == [(n, name) for n in (16, 32) for name in names]
    held = {(row["tokens"], row["mechanism"]): row["cache_bytes"] for row in rows}
    # keys and values of all tokens; of the window without the token to come; sums of features times values and one
    assert (held[16, "dense"], held[32, "dense"]) == (2 * 16 * 16 * 4, None)
    assert held[16, "band"] == held[32, "band"] == 2 * 7 * 16 * 4
    assert held[16, "linear"] == held[32, "linear"] == 2 * 8 * 9 * 4
    for row in rows:
        is_timed = row["tokens"] <= {"dense": 16, "talking_heads": 8}.get(row["mechanism"], 32)
        for measure in ("forward", "training", "decoding"):
            assert len(row[measure].get("samples", ())) == 2 * is_timed
    for title in ("Growth, and from where on", "Milliseconds, one more token", "MiB of the cache"):
        assert f"## {title}" in text


def test_bidirectional_mechanisms_have_their_memory_measured(tmp_path: Path, measured_in_forks: None) -> None:
    results, text = results_of(tmp_path, "--memory-lengths", "32", "--mechanisms", "linformer")
    assert [row["peak_memory_bytes"] is not None for row in results["results"]] == [False, True]
    assert "linformer: 8 projected tokens" in text
    assert "one more token" not in text


def test_what_cannot_be_measured_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, told in (
        (["--causal", "--mechanisms", "star"], "--mechanisms star: there is no causal form."),
        (["--repeats", "512"], "at most 511 tokens are decoded"),
    ):
        with pytest.raises(SystemExit) as refusal:
            results_of(tmp_path, *options)
        assert refusal.value.code == 2
        assert told in capsys.readouterr().err


def trained(model: Model, states: torch.Tensor) -> set[str]:
    """Return the names of the parameters that get a gradient in a training step."""
    seen: set[str] = set()
    for key, parameter in model.named_parameters():
        parameter.register_hook(lambda _, key=key: seen.add(key))
    training_step(model, states)()
    return seen


@pytest.mark.parametrize("name", MECHANISMS)
def test_every_mechanism_trains_and_decodes(name: str) -> None:
    for is_causal in MECHANISMS[name].directions:
        shape = Shape(24, 1, 16, 2, 8, is_causal, "float32", "cpu")
        model, states = build_model(name, shape), shape.states()
        # a reversible layer has two streams, which end side by side
        assert model(states).shape[:2] == states.shape[:2]
        # texts are given as embeddings
        assert all("embed" in key for key in set(dict(model.named_parameters())) - trained(model, states))
        if is_causal:
            step, size = read_prompt(model, states)
            step()
            assert size > 0
