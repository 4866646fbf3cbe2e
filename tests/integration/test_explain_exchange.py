"""What `explain` says that processes which share a text send; `sharded_attention_script.py` measures the same."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import transformers

import hf_efficient_attn as hea
from hf_efficient_attn.cli import main
from hf_efficient_attn.patterns import Band, BlockLocal, Full, GlobalTokens, Pattern

FOUR = SimpleNamespace(ndim=1, size=lambda: 4, get_group=None)
SIZES = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}


def gemma() -> Any:
    kinds = ["sliding_attention", "full_attention"]
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    config = transformers.Gemma3TextConfig(**SIZES, **heads, sliding_window=64, layer_types=kinds)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="efficient")


def test_a_model_on_shards_is_explained_layer_by_layer() -> None:
    model = hea.shard_sequence(gemma(), FOUR)
    window, full = (hea.explain(model, 4096, layer=layer) for layer in (0, 1))
    # 63 keys before each shard, keys and values of four heads, in float32; the first shard has no neighbour before it
    assert window.exchange is not None
    assert window.exchange.mode == "halo"
    assert window.exchange.forward_bytes == (63 * 4 * 16 * 4,) * 3 + (0,)
    assert window.exchange.backward_bytes == (0,) + (63 * 4 * 16 * 4,) * 3
    assert window.exchange.gathered_bytes == 3 * 1024 * 4 * 16 * 4
    assert full.exchange is not None
    assert full.exchange.mode == "heads"
    assert "exchange" in str(window)
    three = ", ".join(["15.75 KiB"] * 3)
    line = f"halo among 4 processes, which send forward {three}, 0 bytes; backward 0 bytes, {three} (with all keys"
    assert line in window.to_text(400)
    hea.shard_sequence(model, None)
    assert hea.explain(model, 4096).exchange is None
    # as if it were shared
    exchange = hea.explain(model, 4096, sequence_ranks=4).exchange
    assert exchange == window.exchange


@pytest.mark.parametrize("num_processes", [2, 4, 8])
def test_a_window_against_all_keys(num_processes: int) -> None:
    """At 131,072 tokens: 64, 96 and 112 times fewer keys than each process would send of its own to all others."""
    exchange = hea.explain(Band(1024, 0), 131072, sequence_ranks=num_processes).exchange
    assert exchange is not None
    assert exchange.gathered_bytes == 128 * (num_processes - 1) / num_processes * max(exchange.forward_bytes)


def test_what_is_added_up_is_said() -> None:
    exchange = hea.explain(Band(8, 8) | GlobalTokens([0]), 1024, num_heads=2, head_dim=16, sequence_ranks=2).exchange
    assert exchange is not None
    # one query in two heads: forward its output, and twice a number; backward the gradient of the output
    assert exchange.reduced_bytes == (2 * (16 + 2) * 4, 2 * 16 * 4)
    assert "each adds up 272 bytes with all" in str(exchange)
    assert hea.explain(BlockLocal(64), 1024, sequence_ranks=2).exchange.forward_bytes == (0, 0)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("pattern", "options", "error", "message"),
    [
        (Full(), {"cross": True}, hea.InputError, "of another sequence. Leave out sequence_ranks"),
        (Band(2, 0), {"query_tokens": 1, "key_tokens": 64}, hea.InputError, "there are 1 queries and 64 keys"),
        (Band(2, 0), {"sequence_ranks": 0}, hea.InputError, "sequence_ranks is 0"),
        (Band(2, 0), {"query_tokens": 3}, hea.InputError, "A text of 3 tokens cannot be split over 4 processes"),
    ],
)
def test_refusals(pattern: Pattern, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        hea.explain(pattern, **{"query_tokens": 64, "sequence_ranks": 4, **options})


def test_an_encoder_decoder_is_not_shared() -> None:
    config = transformers.T5Config(vocab_size=32, d_model=16, d_ff=16, d_kv=8, num_layers=1, num_heads=2)
    with pytest.raises(hea.UnsupportedBackendError, match="sequence_ranks=2, but .* it combines several models"):
        hea.explain(config, 64, sequence_ranks=2)


SMALL = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4}


def test_a_family_that_needs_whole_texts_is_not_explained_on_shards() -> None:
    config = hea.EtcTransformerConfig(**SMALL, num_hidden_layers=2)
    model = transformers.AutoModel.from_config(config)
    with pytest.raises(hea.UnsupportedBackendError, match="cannot compute a text that several"):
        hea.shard_sequence(model, FOUR)
    for each in (model, config):
        with pytest.raises(hea.UnsupportedBackendError, match="models of the family etc_transformer need whole"):
            hea.explain(each, 4096, sequence_ranks=2)


CENTERED = hea.SimplifiedTransformerConfig(**SMALL, num_hidden_layers=1, centering_gain=1.0)
GLOBALS = hea.SparseTransformerConfig(**SMALL, num_hidden_layers=1, attention_pattern=Band(4, 4), global_tokens="first")
GLOBALS.global_projections = True


@pytest.mark.parametrize("config", [CENTERED, GLOBALS])
def test_layers_that_exchange_more_are_not_forecast(config: Any) -> None:
    explanation = hea.explain(config, 64, sequence_ranks=2)
    assert explanation.exchange is None
    assert any("not estimated" in note for note in explanation.notes)


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    main(["explain", "band(1024, 0)", "--tokens", "131072", "--sequence-ranks", "8", "--json"])
    exchange = json.loads(capsys.readouterr().out)["exchange"]
    assert exchange["mode"] == "halo"
    assert len(exchange["forward_bytes"]) == 8
    assert exchange["gathered_bytes"] == 112 * max(exchange["forward_bytes"])
