"""What ways to read a text cost: counts against the models' own words, and their caches."""

import json
from dataclasses import replace

import pytest

import hf_efficient_attn as hea
from hf_efficient_attn.analysis.choice import FACTS, KINDS, ways_to_read
from hf_efficient_attn.bench.mechanisms import cases, models
from hf_efficient_attn.cli import main
from hf_efficient_attn.models.compressed_transformer.slot_cache import SPARE

WAYS = [(name, direction) for name, mechanism in cases.ALL.items() for direction in mechanism.directions]


def shape(tokens: int, is_causal: bool, layers: int = 1) -> cases.Shape:
    return cases.Shape(tokens, 1, 64, 4, 16, is_causal, "float32", "cpu", layers)


def test_every_mechanism_is_known() -> None:
    assert list(FACTS) == list(cases.ALL)
    assert {facts.kind for facts in FACTS.values()} == set(KINDS)


def cache_bytes(name: str, sizes: cases.Shape) -> int:
    """Return the bytes of the cache of one layer behind a text."""
    held = models.read_prompt(models.build_model(name, sizes), sizes.states())[1]
    if name not in cases.LAYERED:
        return held
    # one more layer, which reads with those below
    longer = replace(sizes, layers=2)
    return models.read_prompt(models.build_model(name, longer), sizes.states())[1] - held


@pytest.mark.parametrize("tokens", [96, 160])
@pytest.mark.parametrize("name", [name for name, direction in WAYS if direction])
def test_what_is_kept_is_what_a_cache_holds(name: str, tokens: int) -> None:
    sizes = shape(tokens, is_causal=True)
    held = cache_bytes(name, sizes)
    kept = FACTS[name].kept
    assert kept is not None
    expected = kept(sizes)
    if name == "memory_compressed":
        # tokens that wait for their slot and spare places, keys and values of 16; the number of tokens, of eight bytes
        assert expected == pytest.approx(2 * 16 * (tokens // 3), abs=2 * 16)
        expected = 2 * 16 * (tokens // 3 + 2 + SPARE) + 2 / sizes.heads
    assert held / 4 / sizes.heads == pytest.approx(expected, rel=0)


# explain counts the others' pairs, see tests/attention/test_explain.py
COUNTED = ("star", "tree", "linformer", "nystrom", "memory_compressed", "linear", "performer", "average")


@pytest.mark.parametrize(("name", "is_causal"), [way for way in WAYS if way[0] in COUNTED])
def test_scores_are_those_that_models_tell(name: str, is_causal: bool) -> None:
    sizes = shape(192, is_causal)
    scores = FACTS[name].scores(sizes) * sizes.tokens
    if name in ("linear", "performer", "average"):
        # numbers that a head of 16 adds up for a token
        scores *= 16 / sizes.tokens
    if name == "memory_compressed" and is_causal:
        # those of both directions are told
        scores *= 2 * 192 / 193
    with pytest.raises(hea.errors.UnsupportedBackendError) as refused:
        hea.explain(cases.config_of(name, sizes), query_tokens=sizes.tokens)
    assert f" {scores:,.0f} " in str(refused.value)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("name", "times_as_wide"), [("dense", 1), ("sas_p", 1), ("prior", 1), ("collaborative_heads", 2.5)]
)
def test_dense_attention_reads_all_keys(name: str, times_as_wide: float, is_causal: bool) -> None:
    """With keys of 4 heads and values of one a score is (4 + 1) / 2 times as wide."""
    sizes = shape(192, is_causal)
    told = hea.explain(cases.config_of(name, sizes), query_tokens=sizes.tokens)
    assert FACTS[name].scores(sizes) * 192 * sizes.heads == told.allowed_pairs * times_as_wide


@pytest.mark.parametrize("is_causal", [False, True])
def test_talking_heads_compute_and_mix_all_scores(is_causal: bool) -> None:
    sizes = shape(192, is_causal)
    with pytest.raises(
        hea.errors.UnsupportedBackendError, match=r"computes all 36,864 scores .* mixes those of 4 heads twice"
    ):
        hea.explain(cases.config_of("talking_heads", sizes), query_tokens=sizes.tokens)
    # a product with a key and one with a value, 16 numbers each, and four heads twice
    assert FACTS["talking_heads"].scores(sizes) * 192 == 36_864 * (2 * 16 + 2 * 4) / (2 * 16)


@pytest.mark.parametrize("is_causal", [False, True])
def test_layers_that_read_with_others_read_all_keys(is_causal: bool) -> None:
    """Weights that are there cost no product with a key: half of a score."""
    dense = FACTS["dense"].scores(shape(192, is_causal))
    assert FACTS["residual_scores"].scores(shape(192, is_causal)) == dense
    assert FACTS["reused_weights"].scores(shape(192, is_causal)) == dense / 2


def test_an_encoder_and_a_decoder_read_the_text() -> None:
    sizes = shape(192, False, layers=2)
    encoder = hea.explain(cases.config_of("seq2seq", sizes), query_tokens=192).allowed_pairs / sizes.heads
    assert encoder == 192 * 192
    # the decoder reads to its left, and all of the text
    assert FACTS["seq2seq"].scores(sizes) * 2 * 192 == encoder + 192 * 193 / 2 + 192 * 192


def test_heads_read_as_far_as_their_spans() -> None:
    assert [FACTS["adaptive_span"].scores(shape(tokens, True)) for tokens in (4, 4096)] == [2.5, 16 + 32]


def test_etc_reads_its_band_and_its_global_tokens() -> None:
    # 192 / 32 = 6 global tokens, which read 192 + 6 tokens, and are read by all
    assert FACTS["etc"].scores(shape(192, False)) * 192 == pytest.approx(192 * 17 + 2 * 6 * 192 + 36)


def test_the_cheapest_is_first(capsys: pytest.CaptureFixture[str]) -> None:
    main(["families", "--tokens", "512", "--causal", "--json"])
    rows = json.loads(capsys.readouterr().out)
    assert rows == ways_to_read(512, True, 256)
    assert [row["scores"] for row in rows] == sorted(row["scores"] for row in rows)
    assert {row["mechanism"] for row in rows} == {name for name, direction in WAYS if direction}
    main(["families", "--tokens", "512", "--keys", "8"])
    printed = capsys.readouterr().out
    assert "| linformer " in printed
    assert "block_top_k" not in printed
    assert "kept" not in printed


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--tokens", "0"], "tokens=0 must be at least 1"),
        (["--tokens", "8", "--keys", "-1"], "keys=-1 must be at least 1"),
        (["--causal"], "give its length by --tokens"),
    ],
)
def test_numbers_that_are_no_lengths(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["families", *words])
    assert stop.value.code == 2
    assert told in capsys.readouterr().err
