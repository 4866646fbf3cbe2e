"""The page of `explore`, patterns: the same pairs as Python's, and what a mouse and a keyboard can do."""

import json
import shlex
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from analysis.browser import Page, chromium
from analysis.explore_pages import data_of, say_backends_at
from hypothesis import given, settings
from hypothesis import strategies as st
from patterns.strategies import compositions, small, with_heads

from hf_efficient_attn.analysis.explore_html import render_page
from hf_efficient_attn.analysis.explore_patterns import LENGTHS
from hf_efficient_attn.cli import main
from hf_efficient_attn.errors import EfficientAttentionError
from hf_efficient_attn.patterns import (
    InterleavedSpanTree,
    Pattern,
    SizedSpanTree,
    SpanTree,
    parse_pattern,
    span_tree_nodes,
)
from hf_efficient_attn.patterns.expressions import write_expression
from hf_efficient_attn.patterns.intervals import normalize

TREES = st.one_of(
    st.builds(SpanTree, small, st.booleans(), st.sampled_from(["fixed", "release"])),
    st.builds(SizedSpanTree, st.integers(1, 20), small, st.booleans()),
    st.builds(InterleavedSpanTree, small, st.booleans(), st.none() | st.integers(1, 20)),
)
# longer ones by their intervals
MOST_PAIR_BY_PAIR = 70
KEYS = """([text, numKeys, layer, head, numHeads, isCausal]) => {
  try {
    const parsed = explore.parsePattern(text);
    const pattern = (isCausal ? parsed.causal() : parsed).resolve({ numKeys, layer, head, numHeads });
    return Array.from({ length: numKeys }, (_, query) => pattern.keys(query, query, 0, numKeys));
  } catch (error) {
    return "refused";
  }
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "page.html"
    with pytest.MonkeyPatch.context() as patch:
        say_backends_at((512, 4096), patch)
        main(["explore", "band(3, 3) | global(0)", "--tokens", "96", "--layers", "3", "--output", str(path)])
    return path


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


def keys_of(pattern: Pattern, num_tokens: int, layer: int, head: int, num_heads: int, is_causal: bool) -> Any:
    """Return the ends of the intervals of the keys of each query."""
    try:
        resolved = (pattern.causal() if is_causal else pattern).resolve(num_tokens, layer, head, num_heads)
    except EfficientAttentionError:
        return "refused"
    rows = ((key for key in range(num_tokens) if resolved.allowed(query, key)) for query in range(num_tokens))
    if num_tokens > MOST_PAIR_BY_PAIR:
        return [list(chain(*resolved.key_intervals(query, query, num_tokens))) for query in range(num_tokens)]
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
    num_heads = pattern.num_head_patterns * (1 + number // pattern.num_head_patterns)
    place = [num_tokens, number, number, num_heads, is_causal]
    for text in (repr(pattern), write_expression(pattern)):
        assert shared.tab.evaluate(KEYS, [text, *place]) == keys_of(pattern, *place)


# lengths of the published plan, and one at which the page must refuse, too
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
        ("grid([None, 8], [band(2, 2), full()])", 61),
    ],
)
def test_longer_ones(shared: Page, text: str, num_tokens: int) -> None:
    heads = parse_pattern(text).num_head_patterns * 4
    place = [num_tokens, 2, heads - 1, heads, False]
    assert shared.tab.evaluate(KEYS, [text, *place]) == keys_of(parse_pattern(text), *place)


def test_every_kind_can_be_typed(shared: Page) -> None:
    """A new pattern needs a class in `explore_page/` and its line in `kinds.js`."""
    kinds = {kind for kind, cls in Pattern.kinds.items() if cls.__module__.startswith("hf_efficient_attn.")}
    refused = {"compressed_keys": "keys of another sequence", "block_top_k": "chooses keys by their content"}
    kinds -= {*refused, "gathered_keys"}
    assert set(shared.tab.evaluate("Object.keys(KINDS)")) == kinds | {"bigbird"}
    for kind, said in refused.items():
        typed = f"try {{ explore.parsePattern('{kind}(2, 2)'); }} catch (error) {{ return error.message; }}"
        assert said in shared.tab.evaluate(f"(() => {{ {typed} }})()")


def test_it_loads_nothing_and_complains_of_nothing(shared: Page, written: Path) -> None:
    assert shared.complaints == []
    assert shared.requests == [written.as_uri()]


def test_a_click_highlights_what_a_token_reads(page: Page) -> None:
    page.type("#expression", "dilated(30, 30, 3) | global(95)")
    matrix = page.tab.locator("#matrix")
    place = page.tab.evaluate("(() => { const { x, y, scale } = explore.matrix.view; return { x, y, scale }; })()")
    token, (left, top) = 40, page.tab.evaluate("[MARGIN.left, MARGIN.top]")

    def at(query: int, key: int) -> dict[str, float]:
        return {"x": left + (key + 0.5 - place["x"]) * place["scale"], "y": top + (query + 0.5) * place["scale"]}

    matrix.click(position=at(token, 70))
    page.wait()
    reads = [key for key in range(96) if parse_pattern("dilated(30, 30, 3) | global(95)").allowed(token, key)]
    assert page.text("#summary") == f"Token {token} reads {len(reads)} of 96 tokens."
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


def test_typed_patterns(page: Page) -> None:
    page.type("#expression", "band(3, 0)\ncausal()")
    pairs = parse_pattern("band(3, 0)").num_pairs(96, 96)
    assert page.text("#counts").startswith(f"pairs{pairs:,} of 9,216of causal")
    page.type("#layer", "1")
    assert "4,656 of 9,216" in page.text("#counts")
    # the last layer is the third and reads three tokens back; the one before it reads everything before
    assert [page.text(f"#reach li:nth-child({layers})").partition(" ·")[0] for layers in (1, 2, 3)] == [
        "1 layer4",
        "2 layers49",
        "3 layers49",
    ]
    # three layers, of which the second is dense
    overall = (2 * pairs + 4656) / 3 / 96**2
    assert page.text("#overall") == f"{overall:.1%} in all layers and heads together."
    page.type("#expression", "bnd(3, 0)")
    assert page.text("#problem").startswith("No pattern is called bnd; there are band, bigbird")
    assert page.tab.get_attribute("#expression", "aria-invalid") == "true"
    assert "4,656 of 9,216" in page.text("#counts")
    # of the last pattern that could be read, and shown so
    assert page.tab.eval_on_selector("#counts", "counts => getComputedStyle(counts).opacity") == "0.35"


def test_backends_are_said_by_python_alone(page: Page, capsys: pytest.CaptureFixture[str]) -> None:
    explained = page.text("#backend")
    assert "inference" in explained
    assert "not reference: reference keeps all scores in memory" in explained
    assert page.tab.locator("#backend pre").count() == 0
    page.type("#tokens", "5000")
    nearest = page.text("#backend")
    assert "Not this length, but the nearest that is known here" in nearest
    assert "4,096 tokens. Estimates" in nearest
    assert "not reference" in nearest
    page.type("#expression", "bigbird(8, 1, plan='authors')")
    page.tab.check("#causal")
    page.wait()
    command = shlex.split(page.text("#backend pre"))
    assert command[0] == "hf-efficient-attn"
    main(command[1:])
    assert "backend" in capsys.readouterr().out


@pytest.mark.thorough
def test_backends_are_said_at_every_length(tmp_path: Path) -> None:
    """That each is right is in tests/attention/test_explain.py."""
    path = tmp_path / "page.html"
    main(["explore", "--tokens", "96", "--output", str(path)])
    data = data_of(path)
    assert data["lengths"] == [96, *LENGTHS]
    for offered in data["presets"]:
        for line in offered["expressions"]:
            said = {each["tokens"] for each in data["explanations"] if each["expression"] == line}
            assert said == set(data["lengths"])


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
        (["bnd(4, 4)"], "No pattern is called 'bnd'"),
        (["missing.json"], "There is no file 'missing.json'"),
        (["band(4, 4)", "--tokens", "0"], "--tokens is 0"),
        (["per_head([full(), causal(), full()])"], "cannot share 8 heads evenly"),
        (["--output", "{folder}/page.pdf"], "give a file that ends with .html"),
        (["--device", "abacus"], "is not one that torch knows"),
        (["--tokens", "10000000"], "--tokens 10,000,000: the page shows at most 262,144 tokens"),
        (["--layers", "129"], "--layers 129: the page shows at most 128 layers"),
        (["--num-rows", "5"], "--num-rows 5 is for a model on a text: give --model and --text"),
        (["--rows", "3"], "--rows 3 is for a model on a text"),
        (["--causal"], "--causal is for the patterns that are given"),
        (["{folder}"], "is a folder, not a pattern"),
        (["{folder}"], "hf-efficient-attn explore --model {folder} --text FILE"),
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


def test_layers_of_a_config(few_lengths: None, tmp_path: Path) -> None:
    band, full = {"kind": "band", "left": 4, "right": 4}, {"kind": "full"}
    tiled = {"tile": "BF", "patterns": {"B": band, "F": full}}
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 6, "attention_pattern": tiled}))
    path = tmp_path / "page.html"
    main(["explore", str(tmp_path / "config.json"), "--tokens", "32", "--output", str(path)])
    data = data_of(path)
    assert data["presets"][0]["expressions"] == ["band(4, 4)", "full()"]
    assert data["presets"][0]["layers"] == 6
