"""Closed forms of what `analyze spans` measures, for every kind of span."""

import json
from pathlib import Path

import pytest
import torch
from analysis.span_models import SHAPE, TOKENS, adaptive, analyze, network, save_words

import hf_efficient_attn as hea
from hf_efficient_attn.analysis.model_sources import TEXT
from hf_efficient_attn.cli import main


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
            "Spans along the text are not shown: this model (span: adaptive) has the same spans for every token."
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
        assert f"The first {num_tokens} of the " in results["notes"][0]

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
