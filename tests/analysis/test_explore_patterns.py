"""The page of `explore`, patterns: the same pairs as Python's, and what a mouse and a keyboard can do."""

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from analysis.browser import Page, chromium
from analysis.explore_pages import data_of
from hypothesis import given, settings
from hypothesis import strategies as st
from patterns.strategies import compositions, small, with_heads
from transformers import GPT2Config

from hf_efficient_attn.analysis.explore import render_page
from hf_efficient_attn.analysis.explore_patterns import interval_data
from hf_efficient_attn.cli import main
from hf_efficient_attn.errors import EfficientAttentionError
from hf_efficient_attn.integration.explain import explain
from hf_efficient_attn.patterns import (
    InterleavedSpanTree,
    Pattern,
    SizedSpanTree,
    SpanTree,
    parse_pattern,
    span_tree_nodes,
)
from hf_efficient_attn.patterns.intervals import normalize

TREES = st.one_of(
    st.builds(SpanTree, small, st.booleans(), st.sampled_from(["fixed", "release"])),
    st.builds(SizedSpanTree, st.integers(1, 20), small, st.booleans()),
    st.builds(InterleavedSpanTree, small, st.booleans(), st.none() | st.integers(1, 20)),
)
# longer ones by their intervals
MOST_PAIR_BY_PAIR = 70
KEYS = """([parts, numKeys]) => {
  const pattern = new explore.KeyIntervals(parts);
  return Array.from({ length: numKeys }, (_, query) => pattern.keys(query, 0, numKeys));
}"""
# of a layer and a head of the pattern that is chosen
SHOWN_KEYS = """([layer, head]) => {
  const pattern = explore.patternOf(layer, head);
  return Array.from({ length: explore.data.tokens }, (_, query) => pattern.keys(query, 0, explore.data.tokens));
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


GIVEN = ("bigbird(8, 2)", "per_head([band(1, 1), dilated(6, 0, 2) | strided(10)])")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    (folder / "layers.json").write_text(json.dumps([{"kind": "band", "left": 3, "right": 0}, {"kind": "causal"}] * 2))
    patterns = ["dilated(30, 30, 3) | global(95)", str(folder / "layers.json"), *GIVEN]
    main(["explore", *patterns, "--tokens", "96", "--layers", "4", "--output", str(folder / "page.html")])
    return folder / "page.html"


@pytest.fixture(scope="module")
def shared(browser: Any, written: Path) -> Page:
    """A page whose controls no test changes."""
    return Page(browser, written)


@pytest.fixture
def page(browser: Any, written: Path) -> Iterator[Page]:
    opened = Page(browser, written)
    yield opened
    assert opened.complaints == []
    opened.tab.close()


def keys_of(resolved: Pattern, num_tokens: int) -> Any:
    """Return the ends of the intervals of the keys of each query."""
    if num_tokens > MOST_PAIR_BY_PAIR:
        return [list(chain(*resolved.key_intervals(query, query, num_tokens))) for query in range(num_tokens)]
    rows = ((key for key in range(num_tokens) if resolved.allowed(query, key)) for query in range(num_tokens))
    return [list(chain(*normalize((key, key + 1) for key in row))) for row in rows]


@settings(max_examples=100)
@given(with_heads | compositions | TREES, st.integers(1, 30), st.integers(0, 3), st.booleans())
def test_pairs_are_those_of_python(
    shared: Page, pattern: Pattern, num_tokens: int, number: int, is_causal: bool
) -> None:
    if pattern.needs_two_axes:
        return
    if isinstance(pattern, SpanTree):
        num_tokens = span_tree_nodes(num_tokens)
    heads = pattern.num_head_patterns
    try:
        resolved = (pattern.causal() if is_causal else pattern).resolve(num_tokens, number, number % heads, heads)
    except EfficientAttentionError:
        return
    assert shared.tab.evaluate(KEYS, [interval_data(resolved, num_tokens), num_tokens]) == keys_of(resolved, num_tokens)


@pytest.mark.parametrize(
    ("text", "num_tokens"),
    [
        ("bigbird(64, 3)", 1000),
        ("bigbird(32, 2, 7, causal=True)", 700),
        ("bigbird(64, 3, plan='authors')", 1024),
        ("bigbird(64, 2, 1, 'transformers')", 1024),
        ("per_head([band(1, 1), bigbird(8, 2, plan='authors')])", 200),
        ("span_tree(2)", 12),
        ("grid([7, 9], [band(1, 2), dilated(2, 4, 2)], 1, 'shifted')", 64),
        ("grid([None, 8], [band(2, 2), full()], is_causal=True)", 61),
        ("grid([None, 8], [band(2, 2), full()])", 64),
        ("dilated(128, 128, 4) & ~global(0)", 400),
        ("band(127, 0) | strided(128)", 1500),
        ("blocks(band(1, 1), 64) | global(3, 700)", 1000),
    ],
)
def test_longer_ones(shared: Page, text: str, num_tokens: int) -> None:
    heads = parse_pattern(text).num_head_patterns * 4
    resolved = parse_pattern(text).resolve(num_tokens, 2, heads - 1, heads)
    assert shared.tab.evaluate(KEYS, [interval_data(resolved, num_tokens), num_tokens]) == keys_of(resolved, num_tokens)


@pytest.mark.parametrize("index", [0, 1])
def test_layers_and_heads_are_those_of_python(page: Page, index: int) -> None:
    page.choose(2 + index)
    for layer, head in ((0, 0), (0, 7), (3, 3), (3, 4)):
        resolved = parse_pattern(GIVEN[index]).resolve(96, layer, head, 8)
        assert page.tab.evaluate(SHOWN_KEYS, [layer, head]) == keys_of(resolved, 96)


def test_it_loads_nothing_and_complains_of_nothing(shared: Page, written: Path) -> None:
    assert shared.complaints == []
    assert shared.requests == [written.as_uri()]


def test_a_click_highlights_what_a_token_reads(page: Page) -> None:
    matrix = page.tab.locator("#matrix")
    place = page.tab.evaluate("(() => { const { x, y, scale } = explore.matrix.view; return { x, y, scale }; })()")
    token, (left, top) = 40, page.tab.evaluate("[MARGIN.left, MARGIN.top]")

    def at(query: int, key: int) -> dict[str, float]:
        return {"x": left + (key + 0.5 - place["x"]) * place["scale"], "y": top + (query + 0.5) * place["scale"]}

    matrix.click(position=at(token, 70))
    page.wait()
    reads = [key for key in range(96) if parse_pattern("dilated(30, 30, 3) | global(95)").allowed(token, key)]
    assert page.text("#summary") == f"Token {token} attends to {len(reads)} of 96 tokens."
    highlighted = page.tab.evaluate(
        """(places) => {
          const { canvas } = explore.matrix;
          const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
          const color = ({ x, y }) => pixels.slice(4 * (Math.floor(y) * canvas.width + Math.floor(x))).slice(0, 3);
          return places.filter((place) => color(place).join() === rgbOf("--reads").join()).length;
        }""",
        [at(token, key) for key in range(96)],
    )
    assert highlighted == len(reads)


def test_keys_choose_tokens_and_zoom(page: Page) -> None:
    page.tab.focus("#matrix")
    token = int(page.tab.input_value("#token"))
    for key in ("ArrowDown", "ArrowDown", "ArrowUp", "1"):
        page.tab.keyboard.press(key)
    assert page.tab.input_value("#token") == str(token + 1)
    assert page.tab.evaluate("explore.matrix.view.scale") == 16
    page.tab.keyboard.press("End")
    assert page.tab.input_value("#token") == "95"
    page.tab.keyboard.press("0")
    assert page.tab.evaluate("explore.matrix.view.x") == 0


def test_layers_of_a_pattern(page: Page) -> None:
    page.choose(1)
    assert page.text("#expression") == "band(3, 0)\ncausal()"
    pairs = parse_pattern("band(3, 0)").num_pairs(96, 96)
    assert page.text("#counts").startswith(f"pairs{pairs:,} of 9,216of causal")
    # the last layer reads everything before, and so do all of them together
    assert [page.text(f"#reach li:nth-child({layers})").partition(" ·")[0] for layers in (1, 4)] == [
        "1 layer49",
        "4 layers49",
    ]
    page.type("#layer", "1")
    assert "4,656 of 9,216" in page.text("#counts")
    assert page.text("#alike") == "Layer 1 follows line 2."
    # of four layers, every second is dense
    overall = (pairs + 4656) / 2 / 96**2
    assert page.text("#overall") == f"{overall:.1%} in all layers and heads together."
    page.type("#layer", "99")
    assert page.tab.input_value("#layer") == "3"


def test_backends_are_those_of_explain(page: Page) -> None:
    explained = page.text("#backend")
    assert "inference" in explained
    assert "96 tokens. Estimates" in explained
    expected = explain(parse_pattern("dilated(30, 30, 3) | global(95)"), 96, num_heads=8)
    for name, reason in expected.reasons.items():
        assert f"not {name}: {reason}" in explained
    assert expected.backend in explained


def test_too_many_intervals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pattern that is given is refused; of those that are offered, it is left out."""
    monkeypatch.setattr("hf_efficient_attn.analysis.explore_patterns.MAX_INTERVALS", 100)
    arguments = ["--tokens", "640", "--output", str(tmp_path / "page.html")]
    main(["explore", *arguments])
    titles = [preset["title"] for preset in data_of(tmp_path / "page.html")["presets"]]
    assert "Dense" in titles
    assert "BigBird: random blocks" not in titles
    with pytest.raises(SystemExit):
        main(["explore", "bigbird(8, 3)", *arguments])
    assert "Use fewer --tokens, --layers or --heads" in capsys.readouterr().err


def luminance(color: str) -> float:
    channels = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_contrast(scheme: int) -> None:
    """Texts and marks stand out from the paper, and who reads a token from the cells, also where hues look alike."""
    css = render_page({}).partition("</style>")[0].split("prefers-color-scheme")[scheme]
    values = dict(line.strip().rstrip(";").split(": ") for line in css.splitlines() if line.strip().startswith("--"))

    def contrast(first: str, second: str) -> float:
        low, high = sorted((luminance(values[first]), luminance(values[second])))
        return (high + 0.05) / (low + 0.05)

    for name, least in {"--ink": 7, "--soft": 4.5, "--reads": 3, "--read-by": 3, "--cell": 3}.items():
        assert contrast("--paper", name) >= least, name
    assert contrast("--read-by", "--cell") >= 1.9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["band(4, 4)", "--tokens", "0"], "--tokens is 0"),
        (["per_head([full(), causal(), full()])"], "cannot share 8 heads evenly"),
        (["--output", "{folder}/page.pdf"], "ends with .html"),
        (["--device", "abacus"], "torch does not know device='abacus'"),
        (["block_top_k(16, 2)"], "block_top_k selects keys by their content"),
        (["compressed_keys(2, 2)"], "attends to keys of another sequence"),
        (["--tokens", "10000000"], "262,144"),
        (["--layers", "129"], "--layers 129"),
        (["--num-rows", "5"], "--num-rows 5"),
        (["--rows", "3"], "--rows 3"),
        (["--causal"], "--causal"),
    ],
)
def test_one_sentence(arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(
            ["explore", "--output", str(tmp_path / "page.html"), *(each.format(folder=tmp_path) for each in arguments)]
        )
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()[-1:]
    assert line.startswith("hf-efficient-attn: error: ")
    assert message.format(folder=tmp_path) in line
    assert not list(tmp_path.iterdir())


def test_layers_of_a_config(tmp_path: Path) -> None:
    band, full = {"kind": "band", "left": 4, "right": 4}, {"kind": "full"}
    tiled = {"tile": "BF", "patterns": {"B": band, "F": full}}
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 6, "attention_pattern": tiled}))
    path = tmp_path / "page.html"
    main(["explore", str(tmp_path / "config.json"), "--tokens", "32", "--output", str(path)])
    data = data_of(path)
    assert data["presets"][0]["expressions"] == ["band(4, 4)", "full()"]
    assert data["presets"][0]["layers"] == 6
    # a saved model decides on its direction and its heads; GPT-2 has other names for its sizes
    config = GPT2Config(n_embd=12, n_layer=4, n_head=3, vocab_size=8, attention_pattern=[None, band] * 2)
    config.save_pretrained(tmp_path / "model")
    main(["explore", str(tmp_path / "model"), "--tokens", "32", "--output", str(path)])
    shown = data_of(path)["presets"][0]
    assert shown["expressions"] == ["causal()", "band(4, 0)"]
    assert (shown["layers"], shown["heads"]) == (4, 3)
