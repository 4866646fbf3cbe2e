"""`explain` of a model says what all layers cost together; of a pattern, which baseline it has and what else costs."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

import hf_efficient_attn as hea
from hf_efficient_attn.attention.explanation import AllLayers
from hf_efficient_attn.backends.machine_costs import machine_of, on_machine
from hf_efficient_attn.cli import main
from hf_efficient_attn.hub.card import attention_text
from hf_efficient_attn.integration import explain
from hf_efficient_attn.layout.block_layout import BlockCosts
from hf_efficient_attn.patterns import Band, Causal, Full, GlobalTokens, Pattern, PerHead

SINKS = Band(64, 0) | GlobalTokens([0, 1, 2, 3])
SIZES = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}


def llama(patterns: Any) -> transformers.LlamaConfig:
    return hea.sparsify(transformers.LlamaConfig(**SIZES), patterns)


def test_every_second_layer_of_a_llama() -> None:
    """Dense layers cost 1 each, sparse ones what `explain` says of one of them."""
    explanation = hea.explain(llama([SINKS, None] * 2), 8192)
    assert explanation.all_layers is not None
    assert explanation.all_layers.relative_cost == pytest.approx((2 * explanation.relative_cost + 2 * 1.0) / 4)
    assert 0.5 < explanation.all_layers.relative_cost < 0.55
    line = f"{explanation.all_layers.relative_cost:.3f} × dense causal attention (estimated), 4 layers"
    assert explanation.answer["all layers"] == line
    # of whichever layer it is asked
    assert hea.explain(llama([SINKS, None] * 2), 8192, layer=1).all_layers == explanation.all_layers


def test_it_is_the_mean_of_what_is_said_of_each_layer() -> None:
    config = llama([Band(31, 0), SINKS, None, Band(31, 0)])
    groups = explain.explain_layers(config, 2048)
    assert [layers for layers, _ in groups] == [[0, 3], [1], [2]]
    explanation = hea.explain(config, 2048).all_layers
    assert explanation is not None
    mean = sum(len(layers) * each.relative_cost for layers, each in groups) / 4
    assert (explanation.num_layers, explanation.relative_cost) == (4, pytest.approx(mean))


def test_it_is_for_the_inputs_that_were_asked_for() -> None:
    config = llama([SINKS, None] * 2)
    for options in ({"device": "cuda"}, {"training": True, "dropout": 0.1}, {"query_tokens": 1}, {"backend": "sdpa"}):
        options = {"query_tokens": 4096, "key_tokens": 4096, **options}
        sparse, dense = (hea.explain(config, layer=layer, **options) for layer in (0, 1))
        assert sparse.all_layers is not None
        mean = (sparse.relative_cost + dense.relative_cost) / 2
        assert sparse.all_layers.relative_cost == pytest.approx(mean), options


def test_a_matrix_added_to_scores_takes_all_pairs_in_all_layers() -> None:
    config = transformers.T5Config(num_layers=2, d_model=32, num_heads=4, d_kv=8)
    layers = hea.explain(hea.sparsify(config, Band(8, 8)), 2048, part="encoder").all_layers
    assert layers == AllLayers(2, 1.0, "dense attention")


def test_a_layer_that_cannot_be_computed_so_is_said_in_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise hea.UnsupportedBackendError("no such call.")

    monkeypatch.setattr(explain, "_all_layers", refuse)
    explanation = hea.explain(llama(SINKS), 64)
    assert explanation.all_layers is None
    assert "The cost of all layers cannot be estimated: no such call." in explanation.notes


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = llama([SINKS, None] * 2)
    config.save_pretrained(tmp_path)
    main(["explain", str(tmp_path), "--json"])
    explanation = json.loads(capsys.readouterr().out)
    expected = hea.explain(config, 8192).all_layers
    assert expected is not None
    assert explanation["all_layers"] == {
        "num_layers": 4,
        "relative_cost": expected.relative_cost,
        "baseline": "dense causal attention",
    }
    main(["explain", str(tmp_path)])
    assert f"{expected.relative_cost:.3f} × dense causal attention (estimated), 4 layers" in capsys.readouterr().out
    main(["explain", "band(2, 2)", "--json"])
    assert json.loads(capsys.readouterr().out)["all_layers"] is None


@pytest.mark.parametrize(
    ("pattern", "is_noted"),
    [
        ("band(64, 0) | global(0)", True),
        (PerHead([Causal(), Full()]), True),
        (SINKS.causal(), False),
        (Band(64, 0), False),
        (Band(64, 64) | GlobalTokens([0]), False),
    ],
)
def test_a_pattern_that_is_causal_in_part_says_so(pattern: str | Pattern, is_noted: bool) -> None:
    explanation = hea.explain(pattern, 1024)
    assert any("pattern.causal()" in note for note in explanation.notes) is is_noted
    if is_noted:
        assert explanation.baseline == "dense attention"
        assert hea.explain(explanation.call.layout.pattern.causal(), 1024).baseline == "dense causal attention"
        assert hea.explain(pattern, 1024, cross=True).notes == ()


@pytest.mark.parametrize(("pattern", "share"), [(Causal(), "98%"), (Full(), "100%")])
def test_dense_patterns_say_what_blocked_would_cost(pattern: Pattern, share: str) -> None:
    explanation = hea.explain(pattern, 8192)
    other = hea.explain(pattern, 8192, backend="blocked")
    assert explanation.reasons["blocked"].endswith(
        f"here {share} as many pairs as sdpa; its cost would be {other.relative_cost:.3f} × {explanation.baseline}."
    )
    assert other.relative_cost > explanation.relative_cost


def test_an_estimate_below_that_of_the_choice_is_not_given_as_a_reason() -> None:
    """However low the estimate of blocked is, sdpa needs no mask and is not compared."""
    machine = machine_of("cpu")
    forward = replace(machine.costs_in("float32").forward, blocks=BlockCosts.only(32, 0.5))
    cheap = replace(machine, costs=(("float32", replace(machine.costs_in("float32"), forward=forward)),))
    with on_machine(cheap):
        explanation = hea.explain(Causal(), 512)
        assert hea.explain(Causal(), 512, backend="blocked").relative_cost < explanation.relative_cost
    assert "its cost would be" not in explanation.reasons["blocked"]
    assert "sdpa is the fastest without masks" in explanation.reasons["blocked"]


def test_a_layer_of_hash_buckets_counts_the_chosen_keys() -> None:
    config = hea.EfficientReformerConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, attn_layers=["local", "lsh"], num_hashes=2,
        lsh_attn_chunk_length=16, is_causal=True,
    )  # fmt: skip
    explanation = hea.explain(config, 4096, layer=1)
    # two rounds of 31 other tokens; the first token reads itself
    assert explanation.allowed_pairs == 4 * (1 + sum(range(1, 62)) + (4096 - 62) * 62)
    assert explanation.computed_pairs == 4 * 2 * 4096 * 32
    assert explanation.backend == "gathered"
    assert explanation.relative_cost < 1 / 2
    assert hea.explain(config, 4096, layer=1, backend="gathered").relative_cost == explanation.relative_cost
    local = hea.explain(config, 4096)
    assert explanation.all_layers is not None
    assert explanation.all_layers.relative_cost == pytest.approx((explanation.relative_cost + local.relative_cost) / 2)
    assert hea.explain(config, 8, layer=1).allowed_pairs == 4 * (1 + sum(range(1, 8)))
    assert "(gathered)" in attention_text(config)
