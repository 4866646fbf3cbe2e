"""The clusters and buckets on the page of `explore`: those by which the model reads, marked and named in the text."""

import base64
from pathlib import Path
from typing import Any

import attention_models
import numpy
import pytest
import torch
from analysis.browser import Page, chromium
from analysis.explore_pages import data_of, explore, save_pieces
from models_cases import TINY, randomize

import hf_efficient_attn as hea
from hf_efficient_attn.analysis.explore_model import membership_data, read_rows

# chunks and clusters hold the whole text, so that a token reads all tokens of its groups
CLUSTERS = {"num_routing_heads": 3, "num_clusters": 5, "cluster_tokens": 40}
HASHES = {"num_hashes": 2, "num_buckets": 8, "lsh_attn_chunk_length": 64, "attend_across_buckets": False}
CHOOSING: dict[str, Any] = {
    "causal": lambda: hea.RoutingTransformerForCausalLM(
        hea.RoutingTransformerConfig(**TINY, **CLUSTERS, layers_with_routing=[1])
    ),
    "balanced": lambda: hea.RoutingTransformerForMaskedLM(
        hea.RoutingTransformerConfig(**TINY, **{**CLUSTERS, "cluster_tokens": 12}, is_causal=False)
    ),
    "hashed": lambda: hea.EfficientReformerForCausalLM(
        hea.EfficientReformerConfig(**TINY, **HASHES, is_causal=True, attn_layers=["local", "lsh"])
    ),
}
ROUTED = {"causal": [0, 3], "balanced": [3, 3], "hashed": [0, 4]}


def groups_of(side: dict[str, Any], num_tokens: int) -> list[list[set[int]]]:
    """Return the numbers of the groups that hold each token, for each head."""
    numbers = numpy.frombuffer(base64.b64decode(side["numbers"]), "<i4").reshape(-1, num_tokens, side["most"])
    return [[{int(each) for each in token if each >= 0} for token in head] for head in numbers]


@pytest.mark.parametrize("name", CHOOSING)
def test_tokens_read_those_of_their_clusters_or_buckets(name: str) -> None:
    """The numbers of the page against the weights of the same model."""
    torch.manual_seed(0)
    model = randomize(CHOOSING[name]()).base_model.eval()
    read = read_rows(model, attention_models.token_ids(1, 40)[0].tolist(), range(40))
    shown = membership_data(read.memberships, 2, 40, read.rows)
    assert shown is not None
    assert [layer["heads"] if layer else 0 for layer in shown["layers"]] == ROUTED[name]
    for number, layer in enumerate(shown["layers"]):
        if layer is None:
            continue
        queries = groups_of(layer["queries"], 40)
        keys = groups_of(layer["keys"] or layer["queries"], 40)
        assert (layer["keys"] is None) == (name != "balanced")
        assert max(max(each, default=0) for each in queries[0]) < layer["count"] * (2 if name == "hashed" else 1)
        for head in range(layer["heads"]):
            weights = torch.zeros(40, 40).scatter(1, read.keys[number, head], read.weights[number, head])
            pairs = [[bool(queries[head][q] & keys[head][k]) for k in range(40)] for q in range(40)]
            expected = torch.tensor(pairs) if name == "balanced" else torch.tensor(pairs).tril()
            # a Reformer's tokens read themselves only if they may read nothing else
            counts = ~torch.eye(40, dtype=torch.bool) if name == "hashed" else torch.tensor(True)
            assert torch.equal((weights > 0) & counts, expected & counts)


def test_memberships_of_many_tokens_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    model = randomize(CHOOSING["hashed"]()).base_model.eval()
    read = read_rows(model, attention_models.token_ids(1, 40)[0].tolist(), [0, 7, 39])
    monkeypatch.setattr("hf_efficient_attn.analysis.explore_model.MAX_NUMBERS", 4 * 2 * 4)
    shown = membership_data(read.memberships, 2, 40, read.rows)
    assert shown is not None
    assert shown["tokens"] == (0, 7, 13, 26, 39)
    (whole,) = read.memberships.values()
    taken = whole.queries[0][:, list(shown["tokens"])].tolist()
    assert [[set(token) for token in head] for head in taken] == groups_of(shown["layers"][1]["queries"], 5)
    assert membership_data({}, 2, 40, read.rows) is None


@pytest.fixture
def written(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    randomize(CHOOSING["causal"]()).save_pretrained(tmp_path)
    save_pieces(tmp_path)
    return explore(tmp_path, "a text whose letters <b> choose </b> what they read")


def test_the_page_of_clusters(written: Path) -> None:
    with chromium() as browser:
        page = Page(browser, written)
        check_clusters(page, data_of(written)["model"])
        check_local_head(page)
        assert page.complaints == []


def check_clusters(page: Page, shown: dict[str, Any]) -> None:
    layer, num_tokens = shown["memberships"]["layers"][1], len(shown["tokens"])
    # the first head that routes is shown, and round cells are those that do
    assert page.text("#head-title") == "Layer 1, head 0 (5 clusters)"
    assert page.tab.locator("#heads-map button.chooses").count() == 3
    assert str(page.tab.get_attribute("#heads-map [aria-selected=true]", "aria-label")).endswith("tokens; 5 clusters")
    assert [page.text(f"#heads-map [role=row]:nth-child({row})") for row in (1, 2)] == ["head", "layer0123"]
    assert page.text("#scale span:first-child") == "0"
    # tokens of the chosen token's cluster are marked, and it is named
    page.tab.click("#token-9")
    page.wait()
    groups = groups_of(layer["queries"], num_tokens)[0]
    (cluster,) = groups[9]
    mates = [token for token in range(num_tokens) if groups[token] == {cluster}]
    marked = "[...document.querySelectorAll('#text .mate')].map((each) => Number(each.dataset.token))"
    assert page.tab.evaluate(marked) == mates
    assert page.text("#row-title").endswith(f"in layer 1, head 0: cluster {cluster}.")
    assert page.text("#membership-facts") == f"cluster {cluster}{len(mates)} tokens"
    page.tab.hover("#token-3")
    (other,) = groups[3]
    assert page.tab.get_attribute("#token-3", "title") == f"token 3: cluster {other}"


def check_local_head(page: Page) -> None:
    """Its tokens have no cluster, and no bar reaches into the caption above it."""
    page.tab.focus("#heads-map [aria-selected=true]")
    page.tab.keyboard.press("ArrowUp")
    page.wait()
    assert page.tab.locator("#text .mate").count() == 0
    assert not page.tab.is_visible("#membership")
    highest_bar = """() => {
      const canvas = element("text-ribbon");
      const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, 40).data;
      const cell = rgbOf("--cell").join();
      const places = Array.from({ length: pixels.length / 4 }, (_, place) => 4 * place);
      const found = places.filter((at) => pixels.slice(at, at + 3).join() === cell);
      return Math.floor(found[0] / 4 / canvas.width);
    }"""
    assert page.tab.evaluate(highest_bar) >= 14
