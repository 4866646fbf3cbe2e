"""The command `analyze spans`: models compared, texts, files, and what it refuses."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from analysis.span_models import adaptive, analyze, network, save_words

import hf_efficient_attn as hea
from hf_efficient_attn.analysis.span_report import HeadWeights, SpanReport, spans_figure
from hf_efficient_attn.cli import main


def refusal(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    with pytest.raises(SystemExit) as stop:
        main(["analyze", "spans", *map(str, arguments)])
    assert stop.value.code == 2
    return capsys.readouterr().err


class TestCommand:
    def test_compared_models(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        others = {}
        for name, model in {
            "fixed8": network(span="fixed", span_limit=8),
            "fixed16": network(span="fixed"),
            "dynamic": network(span="dynamic", dynamic_span_bias=0.0),
        }.items():
            others[name] = tmp_path / name
            model.save_pretrained(others[name])
        results = analyze(adaptive(), tmp_path, "--compare", *others.values())
        assert [
            (cost["model"], cost["kind"], cost["span_limit"], cost["average_span"]) for cost in results["compared"]
        ] == [
            (f"{tmp_path.name}/fixed8", "fixed", 8, 8.0),
            (f"{tmp_path.name}/fixed16", "fixed", 16, 16.0),
            (f"{tmp_path.name}/dynamic", "dynamic", 16, 12.0),
        ]
        printed = capsys.readouterr().out
        assert all(cost["model"] in printed for cost in [results["cost"], *results["compared"]])

    def test_dynamic_spans_of_a_compared_model_are_those_of_the_text(self, tmp_path: Path) -> None:
        model = network(span="dynamic")
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.self_attn.spans.weight)
        results = analyze(model, tmp_path, "--compare", tmp_path / "model", "--tokens", 200)
        assert results["compared"] == [results["cost"]]

    def test_a_short_text_shows_short_distances_and_says_so(self, tmp_path: Path) -> None:
        (tmp_path / "text.txt").write_text("twelve bytes", encoding="utf-8")
        results = analyze(network(span="fixed"), tmp_path, "--text", tmp_path / "text.txt")
        assert (results["reach"], results["farthest_shown"], results["num_queries"]) == (16, 6, 6)
        # queries 6 … 11 read all that is before them, evenly
        expected = sum(1 / query for query in range(6, 12)) / 6
        assert results["longest"]["weights"] == pytest.approx([expected] * 6, rel=1e-5)
        assert results["notes"][0] == "All 12 tokens of the text are used."
        assert results["notes"][1].startswith("Attention weights are shown up to distance 6, but heads reach up to 16,")

    def test_the_text_is_cut_at_tokens(self, tmp_path: Path) -> None:
        results = analyze(network(span="fixed"), tmp_path, "--tokens", 100)
        assert "(see --tokens; the spans need 272)" in results["notes"][0]
        assert results["settings"] == {"text": "the text that comes with the command", "tokens": 100, "seed": 0}

    @pytest.mark.parametrize("span", ["adaptive", "dynamic"])
    def test_the_json_is_read_back(self, span: str, tmp_path: Path) -> None:
        results = analyze(adaptive() if span == "adaptive" else network(span=span), tmp_path)
        report = SpanReport.from_dict(results)
        assert report.to_dict() == {name: results[name] for name in report.to_dict()}
        assert (report.along_text is None) == (span == "adaptive")

    def test_no_panel_shows_a_single_point(self, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        report = SpanReport.from_dict(analyze(adaptive(), tmp_path))
        assert len(spans_figure(report, [report.cost], "a text").axes) == 2
        other = replace(report.cost, kind="fixed", average_span=16.0)
        for costs, num_bars in (((report.cost, other), 2), ((report.cost, other, replace(other, span_limit=8)), 0)):
            average = spans_figure(report, costs, "a text").axes[2]
            assert len(average.patches) == num_bars
            assert bool(average.lines) == (num_bars == 0)
        labels = [
            label.get_text() for label in spans_figure(report, [report.cost, other], "a text").axes[2].get_yticklabels()
        ]
        assert labels == ["fixed", "adaptive"]

    def test_picture_path(self, tmp_path: Path) -> None:
        adaptive().save_pretrained(tmp_path / "model")
        picture = tmp_path / "cards" / "spans.svg"
        main(["analyze", "spans", *map(str, (tmp_path / "model", "--output", tmp_path, "--picture", picture))])
        assert picture.read_bytes().startswith(b"<?xml")
        assert not (tmp_path / "spans.png").exists()

    def test_points_of_the_picture_are_means_of_bins(self) -> None:
        weights = tuple(1 / (distance + 1) for distance in range(100))
        head = HeadWeights(0, 0, 100.0, 100, 1, weights)
        points = head.points()
        assert points[:8] == [(distance, pytest.approx(1 / distance)) for distance in range(1, 9)]
        assert points[-1] == (pytest.approx(98.5), pytest.approx(sum(1 / d for d in range(97, 101)) / 4))

    def test_a_missing_matplotlib_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        adaptive().save_pretrained(tmp_path / "model")
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        with pytest.raises(SystemExit):
            main(["analyze", "spans", str(tmp_path / "model"), "--output", str(tmp_path / "out")])
        assert "pip install matplotlib" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


class TestRefusals:
    def test_models(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        config = hea.SimplifiedTransformerConfig(
            vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2
        )
        hea.SimplifiedTransformerModel(config).save_pretrained(tmp_path / "plain")
        assert "plain: SimplifiedTransformerModel has no spans" in refusal(capsys, tmp_path / "plain")
        adaptive().save_pretrained(tmp_path / "model")
        assert "plain: SimplifiedTransformerModel has no spans" in refusal(
            capsys, tmp_path / "model", "--compare", tmp_path / "plain", "--output", tmp_path / "out"
        )
        assert not (tmp_path / "out").exists()

    def test_texts(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        adaptive().save_pretrained(tmp_path / "model")
        (tmp_path / "empty.txt").touch()
        text = (tmp_path / "model", "--output", tmp_path / "out", "--text")
        assert "The text has 0 tokens; attention between tokens needs at least 2 tokens." in refusal(
            capsys, *text, tmp_path / "empty.txt"
        )
        assert "--tokens 1: attention" in refusal(capsys, tmp_path / "model", "--tokens", 1)
        assert not (tmp_path / "out").exists()

    def test_tokenizers(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        adaptive(vocab_size=2).save_pretrained(tmp_path / "model")
        assert "has no tokenizer, and its 2 tokens cannot be the 256 bytes" in refusal(capsys, tmp_path / "model")
        save_words(tmp_path / "model")
        (tmp_path / "text.txt").write_text("the lamp", encoding="utf-8")
        assert "gives token 3, but the model has 2 tokens" in refusal(
            capsys, tmp_path / "model", "--text", tmp_path / "text.txt"
        )
