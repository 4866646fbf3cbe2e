"""The command `analyze spans`: closed forms of what it measures, its files, and what it refuses."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_efficient_attn as hea
from hf_efficient_attn.analysis.span_report import HeadWeights
from hf_efficient_attn.analysis.span_sources import TEXT
from hf_efficient_attn.cli import main

SHAPE = {
    "vocab_size": 256,
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "span_limit": 16,
    "span_ramp": 4,
}
# the spans of two layers with three heads, in tokens
TOKENS = [[0.0, 8.0, 2.5], [14.0, 1.0, 0.5]]


def network(**fields: Any) -> Any:
    """Return a model that gives equal scores to all keys, so that attention is what its masks are."""
    torch.manual_seed(0)
    config = hea.AdaptiveSpanConfig(**{**SHAPE, "position_embedding_type": "none", **fields})
    model = hea.AdaptiveSpanForCausalLM(config) if config.is_causal else hea.AdaptiveSpanModel(config)
    for layer in model.base_model.layers:
        layer.self_attn.q_proj.weight.data.zero_()
    return model


def adaptive(**fields: Any) -> Any:
    model = network(span="adaptive", **fields)
    for layer, tokens in zip(model.base_model.layers, TOKENS, strict=True):
        layer.self_attn.spans.ratio.data = torch.tensor(tokens) / model.config.span_limit
    return model


def analyze(model: Any, folder: Path, *arguments: Any) -> dict[str, Any]:
    """Save a model, run the command on it, and return its JSON."""
    model.save_pretrained(folder / "model")
    main(["analyze", "spans", str(folder / "model"), "--output", str(folder / "out"), *map(str, arguments)])
    assert (folder / "out" / "spans.png").read_bytes().startswith(b"\x89PNG")
    return json.loads((folder / "out" / "spans.json").read_text(encoding="utf-8"))


def refusal(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    with pytest.raises(SystemExit) as stop:
        main(["analyze", "spans", *map(str, arguments)])
    assert stop.value.code == 2
    return capsys.readouterr().err


class TestFixed:
    def test_every_head_reads_the_limit_evenly(self, tmp_path: Path) -> None:
        results = analyze(network(span="fixed"), tmp_path)
        assert [layer["spans"] for layer in results["layers"]] == [[16.0] * 3] * 2
        assert [layer["keys"] for layer in results["layers"]] == [[16] * 3] * 2
        for name in ("shortest", "longest"):
            assert results[name]["first_distance"] == 1
            assert results[name]["weights"] == pytest.approx([1 / 16] * 16, rel=1e-5)
            assert results[name]["total_weight"] == pytest.approx(1.0, abs=1e-5)
            assert results[name]["mean_distance"] == pytest.approx(8.5, abs=1e-4)

    def test_cost(self, tmp_path: Path) -> None:
        assert analyze(network(span="fixed"), tmp_path)["cost"] == {
            "model": f"{tmp_path.name}/model",
            "kind": "fixed",
            "span_limit": 16,
            "average_span": 16.0,
            "max_span": 16,
            "flops_per_token": 2 * (4 * 12 * 12 + 2 * 12 * 20 + 2 * 16 * 12),
        }

    def test_of_equal_spans_the_heads_that_look_nearest_and_farthest_are_shown(self, tmp_path: Path) -> None:
        model = network(span="fixed", position_embedding_type="relative_keys")
        # head 1 of layer 0 likes near keys, head 2 of layer 1 far ones
        slope = torch.linspace(0, -1, 16)[:, None].expand(16, 4)
        model.model.distances.weight.data = slope.clone()
        for index, head, sign in ((0, 1, 1.0), (1, 2, -1.0)):
            layer = model.model.layers[index]
            # what the norm before it gives every token alike
            model.model.layers[0].mlp_norm.bias.data.fill_(3.0)
            layer.self_attn.q_proj.weight.data[4 * head : 4 * head + 4] = sign * 0.5
        model.model.embed_tokens.weight.data.fill_(1.0)
        results = analyze(model, tmp_path)
        assert (results["shortest"]["layer"], results["shortest"]["head"]) == (0, 1)
        assert (results["longest"]["layer"], results["longest"]["head"]) == (1, 2)
        assert results["shortest"]["weights"] == sorted(results["shortest"]["weights"], reverse=True)
        assert results["longest"]["weights"] == sorted(results["longest"]["weights"])

    def test_both_sides_are_added_up(self, tmp_path: Path) -> None:
        results = analyze(network(span="fixed", span_limit=8, is_causal=False, include_self=True), tmp_path)
        assert results["longest"]["first_distance"] == 0
        # 15 keys: the token itself and 7 on either side
        assert results["longest"]["weights"] == pytest.approx([1 / 15] + [2 / 15] * 7, rel=1e-5)
        assert not results["is_causal"]


class TestAdaptive:
    def test_spans_and_weights_are_those_of_the_soft_mask(self, tmp_path: Path) -> None:
        results = analyze(adaptive(), tmp_path)
        assert [layer["spans"] for layer in results["layers"]] == TOKENS
        assert [layer["keys"] for layer in results["layers"]] == [[4, 12, 7], [16, 5, 5]]
        shortest, longest = results["shortest"], results["longest"]
        assert (shortest["layer"], shortest["head"], shortest["span"], shortest["keys"]) == (0, 0, 0.0, 4)
        assert shortest["weights"] == pytest.approx([0.4, 0.3, 0.2, 0.1] + [0.0] * 12, abs=1e-6)
        assert (longest["layer"], longest["head"], longest["span"], longest["keys"]) == (1, 0, 14.0, 16)
        assert longest["weights"] == pytest.approx([1 / 15.75] * 15 + [0.75 / 15.75], abs=1e-6)

    def test_cost_is_the_authors(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        cost = analyze(adaptive(), tmp_path)["cost"]
        # per layer ⌈mean⌉ + 4: 4 + 4 and 6 + 4
        assert (cost["kind"], cost["average_span"], cost["max_span"]) == ("adaptive", 9.0, 16)
        assert cost["flops_per_token"] == 2 * (4 * 12 * 12 + 2 * 12 * 20 + 2 * 9 * 12)
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert ["0", "4", "7", "8", "12"] in lines
        assert ["1", "5", "5", "9", "16"] in lines
        assert [cost["model"], "adaptive", "16", "9.0", "16", "2,544"] in lines

    def test_frozen_spans_are_measured_alike(self, tmp_path: Path) -> None:
        before = analyze(adaptive(), tmp_path / "adaptive")
        after = analyze(hea.freeze_spans(adaptive()), tmp_path / "frozen")
        assert after["cost"]["kind"] == "frozen"
        for name in ("layers", "shortest", "longest"):
            assert after[name] == before[name]

    def test_the_panel_of_dynamic_spans_is_left_out_and_said(self, tmp_path: Path) -> None:
        results = analyze(adaptive(), tmp_path)
        assert results["along_text"] is None
        assert (
            "No spans along the text: those of this model (span: adaptive) are the same for every token."
            in (results["notes"])
        )

    def test_a_config_is_drawn_from_the_seed(self, tmp_path: Path) -> None:
        hea.AdaptiveSpanConfig(**SHAPE).to_json_file(tmp_path / "config.json")
        found = []
        for run, seed in enumerate((1, 1, 2)):
            out = tmp_path / str(run)
            main(["analyze", "spans", str(tmp_path / "config.json"), "--seed", str(seed), "--output", str(out)])
            found.append(json.loads((out / "spans.json").read_text(encoding="utf-8"))["longest"])
        assert found[0] == found[1] != found[2]


class TestDynamic:
    def test_untrained_spans_are_the_same_along_the_text(self, tmp_path: Path) -> None:
        results = analyze(network(span="dynamic"), tmp_path)
        num_tokens = 16 + 256
        assert results["along_text"]["spans"] == pytest.approx([16 / (1 + torch.e**4)] * num_tokens, rel=1e-5)
        assert "".join(results["along_text"]["symbols"]) == TEXT[:num_tokens].replace(" ", "␣").replace("\n", "↵")
        assert f"is cut at {num_tokens}: as many as the spans need." in results["notes"][0]

    def test_trained_spans_are_the_mean_over_layers_and_heads(self, tmp_path: Path) -> None:
        model = network(span="dynamic").eval()
        text = "a keeper overlooked it"
        (tmp_path / "text.txt").write_text(text, encoding="utf-8")
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.self_attn.spans.weight)
        results = analyze(model, tmp_path, "--text", tmp_path / "text.txt")
        with torch.no_grad():
            states = model(torch.tensor([list(text.encode())]), output_hidden_states=True).hidden_states
            each = [
                16 * torch.sigmoid(state[0] @ layer.self_attn.spans.weight.T - 4)
                for state, layer in zip(states, model.model.layers, strict=False)
            ]
        assert results["along_text"]["spans"] == pytest.approx(torch.cat(each, 1).mean(1).tolist(), rel=1e-4)
        for layer, spans in zip(results["layers"], each, strict=True):
            assert layer["spans"] == pytest.approx(spans.mean(0).tolist(), rel=1e-4)
        assert results["longest"]["span"] == max(max(layer["spans"]) for layer in results["layers"])

    def test_a_tokenizer_beside_the_model_is_used(self, tmp_path: Path) -> None:
        save_words(tmp_path / "model")
        (tmp_path / "text.txt").write_text("the ship the lamp " * 4, encoding="utf-8")
        results = analyze(network(span="dynamic", vocab_size=4), tmp_path, "--text", tmp_path / "text.txt")
        assert results["along_text"]["symbols"] == ["the", "ship", "the", "lamp"] * 4

    def test_bytes_that_are_no_characters_have_a_place(self, tmp_path: Path) -> None:
        (tmp_path / "text.txt").write_text("né\tà", encoding="utf-8")
        results = analyze(network(span="dynamic"), tmp_path, "--text", tmp_path / "text.txt")
        assert results["along_text"]["symbols"] == ["n", "·", "·", "→", "·", "·"]


@pytest.mark.parametrize(("block", "is_causal", "kind"), [("sas", True, "dynamic"), ("sas_p", False, "adaptive")])
def test_spans_of_another_family(tmp_path: Path, block: str, is_causal: bool, kind: str) -> None:
    fields = {**SHAPE, "block": block, "is_causal": is_causal, "span": kind, "position_embedding_type": "rope"}
    results = analyze(hea.SimplifiedTransformerModel(hea.SimplifiedTransformerConfig(**fields)), tmp_path)
    assert (results["cost"]["kind"], results["is_causal"]) == (kind, is_causal)
    assert (results["along_text"] is None) == (kind != "dynamic")
    for name in ("shortest", "longest"):
        assert results[name]["first_distance"] == 0
        assert results[name]["total_weight"] == pytest.approx(1.0, abs=1e-5)


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
        assert results["notes"][0] == "All 12 tokens of the text are read."
        assert results["notes"][1].startswith("Attention weights are shown up to distance 6, but heads reach up to 16:")

    def test_the_text_is_cut_at_tokens(self, tmp_path: Path) -> None:
        results = analyze(network(span="fixed"), tmp_path, "--tokens", 100)
        assert "is cut at 100: --tokens; the spans need 272." in results["notes"][0]
        assert results["settings"] == {"text": "the text that comes with the command", "tokens": 100, "seed": 0}

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
        assert "pip install 'hf-efficient-attn[plot]'" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


class TestRefusals:
    def test_models(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert "no such file or folder" in refusal(capsys, tmp_path / "nowhere")
        (tmp_path / "empty").mkdir()
        assert "holds no config.json" in refusal(capsys, tmp_path / "empty")
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
        assert "no such file" in refusal(capsys, *text, tmp_path / "nowhere.txt")
        assert "The text has 0 tokens; attention between tokens needs at least 2." in refusal(
            capsys, *text, tmp_path / "empty.txt"
        )
        assert "--tokens 1: attention" in refusal(capsys, tmp_path / "model", "--tokens", 1)
        assert not (tmp_path / "out").exists()

    def test_tokenizers(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        adaptive(vocab_size=2).save_pretrained(tmp_path / "model")
        assert "it has no tokenizer, and its 2 tokens cannot be the 256 bytes" in refusal(capsys, tmp_path / "model")
        save_words(tmp_path / "model")
        (tmp_path / "text.txt").write_text("the lamp", encoding="utf-8")
        assert "its tokenizer gives token 3, but the model has 2 tokens" in refusal(
            capsys, tmp_path / "model", "--text", tmp_path / "text.txt"
        )


def save_words(folder: Path) -> None:
    """Save a tokenizer of four words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"[UNK]": 0, "the": 1, "ship": 2, "lamp": 3}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(folder)
