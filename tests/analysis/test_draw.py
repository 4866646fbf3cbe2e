"""The command `draw`: what it reads, prints and paints."""

import json
from pathlib import Path

import pytest
from transformers import LlamaConfig

from hf_efficient_attn import RoutingTransformerConfig
from hf_efficient_attn.analysis.draw import Drawing, Panel, patterns_figure
from hf_efficient_attn.analysis.pattern_sources import read_pattern
from hf_efficient_attn.cli import main
from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.patterns import Band, Full, GlobalTokens, PerHead, layers_to_dict
from hf_efficient_attn.patterns.config_spec import write_expression


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    main(["draw", "band(1, 1) | global(0)", "--tokens", "3", "--causal"])
    assert capsys.readouterr().out == "■⬚⬚\n■■⬚\n■■■\n6 of 9 pairs, 66.7%\n"


def test_layer_and_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"num_hidden_layers": 2, "attention_pattern": layers_to_dict([Full(), PerHead([Full(), Band(0, 0)])])}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    main(["draw", str(path), "--tokens", "2", "--layer", "1", "--head", "1"])
    assert capsys.readouterr().out == "■⬚\n⬚■\n2 of 4 pairs, 50.0%\n"
    with pytest.raises(ConfigurationError, match="Layer 2 has no pattern; .* 0 to 1"):
        read_pattern(str(path), layer=2)


def test_a_model_says_its_direction_and_heads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 16}
    config = LlamaConfig(vocab_size=8, **sizes, attn_implementation="efficient")
    config.attention_pattern = layers_to_dict([None, Band(0, 0) | GlobalTokens([0])])
    config.save_pretrained(tmp_path)
    # the first sparse layer, which the last line names
    main(["draw", str(tmp_path), "--tokens", "3"])
    *rows, last = capsys.readouterr().out.splitlines()
    assert rows == ["■⬚⬚", "■■⬚", "■⬚■"]
    assert f"{tmp_path.name}, layer 1: band(0, 0) | " in last
    # a layer without a pattern attends to the past
    main(["draw", str(tmp_path / "config.json"), "--tokens", "3", "--layer", "0"])
    assert capsys.readouterr().out.splitlines()[:3] == ["■⬚⬚", "■■⬚", "■■■"]
    for options, said in {
        ("--head", "2"): "--head 2",
        ("--causal",): "--causal",
        ("--layer", "2"): "layer=2",
        ("--part", "decoder"): "part='decoder'",
    }.items():
        with pytest.raises(SystemExit):
            main(["draw", str(tmp_path), *options])
        assert said in capsys.readouterr().err
    config = RoutingTransformerConfig(vocab_size=8, num_routing_heads=1, num_clusters=2, cluster_tokens=4, **sizes)
    config.save_pretrained(tmp_path)
    with pytest.raises(SystemExit):
        main(["draw", str(tmp_path)])
    assert "explore --model" in capsys.readouterr().err


def test_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "folder" / "pattern.png"
    main(["draw", "bigbird(4, 1)", "band(2, 2)", "--tokens", "40", "--picture", str(path)])
    assert path.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.splitlines()[1:] == ["band(2, 2): 194 of 1,600 pairs, 12.1%", f"Written: {path}"]


def test_titles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "pattern.png"
    main(["draw", "band(2, 2)", "full()", "--titles", "near", "all", "--tokens", "4", "--picture", str(path)])
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == ["near", "all", "Written"]
    with pytest.raises(SystemExit):
        main(["draw", "band(2, 2)", "full()", "--titles", "near"])


def test_a_length_that_shows_the_shape(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As many lines as fit the terminal, however far the pattern reaches; the pairs are those of all tokens."""
    monkeypatch.setenv("COLUMNS", "40")
    main(["draw", "band(500, 0) | global(0)"])
    *rows, last = capsys.readouterr().out.splitlines()
    assert [len(rows), *map(len, rows)] == [40] * 41
    assert rows[20].count("■") == 1 + 11
    pairs = sum(min(query, 500) + 1 + (query > 500) for query in range(1, 2000)) + 2000
    assert last == f"{pairs:,} of 4,000,000 pairs, {pairs / 4e6:.1%}; one ■ is 50 × 50 tokens"
    main(["draw", "band(2, 2)"])
    assert capsys.readouterr().out.startswith("■■■" + 29 * "⬚" + "\n")
    # a grid of images has one length
    main(["draw", "grid([4, 9], [band(1, 1), band(1, 1)])"])
    assert len(capsys.readouterr().out.splitlines()) == 36 + 1


def test_titles_fit_their_panels() -> None:
    pytest.importorskip("matplotlib")
    pattern = Band(2, 2) | GlobalTokens(range(40))
    panels = [Panel(write_expression(pattern), pattern, 0, 0), Panel("short", Band(2, 2), 0, 0)]
    figure = patterns_figure([Drawing(panel, 48, 1) for panel in panels], [panel.title for panel in panels])
    figure.canvas.draw()
    left, right = (axis.title.get_window_extent() for axis in figure.axes)
    assert left.x0 >= 0
    assert left.x1 <= figure.axes[1].get_tightbbox().x0
    assert right.x1 <= figure.bbox.x1


def test_json_text() -> None:
    assert read_pattern(json.dumps(Band(1, 2).to_dict())) == Band(1, 2)
    assert read_pattern(json.dumps([Full().to_dict(), Band(1, 2).to_dict()]), layer=1) == Band(1, 2)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("missing.json", "'missing.json'"),
        ('{"kind": ', "is not valid JSON"),
        ('{"model_type": "bert"}', "attention_pattern"),
        ('{"side": 1}', "The dict of a pattern has a kind"),
        ("[null]", "Layer 0 has no pattern"),
        ("[]", "Layer 0 has no pattern; the list has none."),
    ],
)
def test_refusals(source: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read_pattern(source)
