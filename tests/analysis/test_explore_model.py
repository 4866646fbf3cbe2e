"""The page of `explore` with a model and a text: exact weights, tokens as they are written, and the page itself."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attention_models
import numpy
import pytest
import torch
from analysis.browser import Page, chromium
from analysis.explore_pages import data_of, explore, save_pieces
from analysis.span_models import adaptive
from models_cases import TINY, randomize

import hf_efficient_attn as hea
from hf_efficient_attn.analysis.explore_model import load_explored, read_rows, sampled_rows
from hf_efficient_attn.analysis.model_sources import read_tokens
from hf_efficient_attn.cli import main

SCRIPT = "a <script>document.title = 'no'</script> & </script> \u00e9\n" * 3


def longformer() -> Any:
    config = hea.SparseTransformerConfig.longformer(**{**TINY, "max_position_embeddings": 512}, attention_window=8)
    return randomize(hea.SparseTransformerForSequenceClassification(config))


def sparsified(name: str) -> Any:
    return hea.sparsify(attention_models.build(name), attention_models.PATTERN)


MODELS: dict[str, Any] = {
    "longformer": longformer,
    "seq2seq": lambda: randomize(hea.SparseSeq2SeqForConditionalGeneration(hea.SparseSeq2SeqConfig(**TINY))),
    "sas": lambda: randomize(hea.SimplifiedTransformerForCausalLM(hea.SimplifiedTransformerConfig(**TINY))),
    "spans": lambda: adaptive(vocab_size=61),
    "llama": lambda: sparsified("llama"),
    "bert": lambda: sparsified("bert"),
}


@pytest.mark.filterwarnings("ignore:output_attentions=True")
@pytest.mark.parametrize("name", MODELS)
def test_weights_of_the_page(name: str, tmp_path: Path) -> None:
    """Those of output_attentions=True, to the rounding of a text; what is left out is said."""
    MODELS[name]().save_pretrained(tmp_path)
    save_pieces(tmp_path)
    shown = data_of(explore(tmp_path, "who reads whom", "--num-rows", "5", "--rows", "3"))["model"]
    assert shown["rows"] == [0, 3, 4, 8, 11, 15]
    model = load_explored(str(tmp_path))
    ids = read_tokens(str(tmp_path), model.config.get_text_config(), (tmp_path / "text.txt").read_bytes(), None).ids
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([ids]), output_attentions=True).attentions

    def array(field: str, dtype: str) -> Any:
        numbers = numpy.frombuffer(base64.b64decode(shown[field]), dtype)
        return numbers.reshape(shown["layers"], shown["heads"], len(shown["rows"]), -1)

    keys, weights = array("keys", "<u4"), array("weights", "<f4")
    found = numpy.zeros((*weights.shape[:3], len(ids)), dtype="f4")
    numpy.put_along_axis(found, keys.astype("i8"), weights, -1)
    wanted = torch.stack([each[0, :, shown["rows"]] for each in expected]).numpy()
    # all tokens of a short text are kept
    numpy.testing.assert_allclose(found, wanted, atol=1e-6)
    numpy.testing.assert_array_equal(array("num_read", "<u4")[..., 0], (wanted > 0).sum(-1))
    away = abs(numpy.arange(len(ids)) - numpy.array(shown["rows"])[:, None])
    numpy.testing.assert_allclose(array("distance", "<f4")[..., 0], (wanted * away).sum(-1), atol=1e-4)


def test_weights_in_several_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of several forward passes come back in their order; of many tokens the strongest are kept."""
    model = sparsified("llama").base_model
    model.set_attn_implementation("efficient")
    ids = attention_models.token_ids(1, 40)[0].tolist()
    together = read_rows(model, ids, range(40))
    monkeypatch.setattr("hf_efficient_attn.analysis.explore_model.MAX_BYTES", 4 * 2 * 4 * 40 * 7)
    monkeypatch.setattr("hf_efficient_attn.analysis.explore_model.MAX_KEPT", 4 * 2 * 4 * 40)
    apart = read_rows(model, ids, range(40))
    assert apart.keys.shape[3] == 4
    torch.testing.assert_close(apart.weights, together.weights[..., :4])
    torch.testing.assert_close(apart.share, apart.weights.sum(-1), atol=1e-5, rtol=0)
    assert sampled_rows(3, 64, []) == (0, 1, 2)


def test_tokens_are_those_of_the_text(tmp_path: Path) -> None:
    longformer().save_pretrained(tmp_path)
    save_pieces(tmp_path)
    shown = data_of(explore(tmp_path, SCRIPT, "--tokens", "40"))
    tokens, special = shown["model"]["tokens"], shown["model"]["special"]
    assert (tokens[0], tokens[-1], special, len(tokens)) == ("[CLS]", "[SEP]", [0, 39], 40)
    assert SCRIPT.startswith("".join(tokens[1:-1]))
    assert shown["model"]["left_out"] > 0
    # the rule "auto" of a classifier, and the pattern with what it adds
    assert shown["model"]["global_tokens"] == [0]
    assert shown["presets"][0]["expressions"] == ["band(4, 4) | global([0])"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


def test_the_page(browser: Any, tmp_path: Path) -> None:
    adaptive(vocab_size=61).save_pretrained(tmp_path)
    save_pieces(tmp_path)
    written = explore(tmp_path, SCRIPT)
    page = Page(browser, written)
    shown = data_of(written)["model"]
    assert page.complaints == []
    assert page.requests == [written.as_uri()]
    # text stays text
    assert page.tab.title() == "Which tokens attend to which"
    assert page.tab.locator("#text script").count() == 0
    assert "<script>document.title = 'no'</script>" in page.text("#text")
    # a click on a token shows what it reads: as many as the page says, none of them after it
    row = shown["rows"][20]
    page.tab.click(f"#token-{row}")
    page.wait()
    assert page.text("#row-title").startswith(f"Token {row} ")
    read = page.tab.evaluate("[...document.querySelectorAll('#text .read')].map((each) => Number(each.dataset.token))")
    assert page.tab.locator("#read-table tbody tr").count() == len(read) > 0
    assert max(read) <= row
    assert page.tab.locator("#text .chosen").get_attribute("id") == f"token-{row}"
    # spans are those that the model has learned, and keys move among heads
    assert "8.0 tokens" in page.tab.get_attribute("#heads-map button:nth-of-type(2) >> nth=0", "title")
    page.tab.focus("#heads-map [aria-selected=true]")
    page.tab.keyboard.press("ArrowDown")
    page.tab.keyboard.press("ArrowRight")
    assert page.text("#head-title") == "Layer 1, head 1"
    assert "learned span1.0 tokens" in page.text("#head-facts")
    page.tab.focus("#text")
    page.tab.keyboard.press("ArrowRight")
    assert page.text("#row-title").startswith(f"Token {shown['rows'][21]} ")
    page.tab.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "{folder}/model"], "--model and --text"),
        (["--model", "{folder}/bytes", "--text", "{folder}/text.txt", "--tokens", "1"], "--tokens 1: attention"),
        (["--model", "{folder}/model", "--text", "{folder}/text.txt"], "has no tokenizer"),
        (["--model", "{folder}/model", "--text", "{folder}/text.txt", "--rows", "a"], "give the positions of tokens"),
        (
            ["--model", "{folder}/model", "--text", "{folder}/text.txt", "--heads", "9"],
            "--heads 9 applies only without --model",
        ),
    ],
)
def test_one_sentence(arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("a text")
    adaptive(vocab_size=61).save_pretrained(tmp_path / "model")
    adaptive().save_pretrained(tmp_path / "bytes")
    given = [each.format(folder=tmp_path) for each in arguments]
    with pytest.raises(SystemExit) as stop:
        main(["explore", "--output", str(tmp_path / "page.html"), *given])
    assert stop.value.code == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("hf-efficient-attn: error: ")
    assert message.format(folder=tmp_path) in line
    assert not (tmp_path / "page.html").exists()
