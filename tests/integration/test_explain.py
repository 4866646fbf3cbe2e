"""`explain` and its command: what is chosen and why, and counts that agree with the closed forms."""

import importlib
import json
from typing import Any

import pytest
import torch
import transformers

import hf_efficient_attn as hea
from hf_efficient_attn.attention import dispatch, functional
from hf_efficient_attn.attention.explain_call import allowed_pairs
from hf_efficient_attn.attention.select import BACKENDS
from hf_efficient_attn.backends import sdpa
from hf_efficient_attn.backends.flex import backend as flex
from hf_efficient_attn.cli import main
from hf_efficient_attn.errors import EfficientAttentionError, UnsupportedBackendError
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.patterns import Band, Blocks, Causal, Full, GlobalTokens, PerHead, RandomBlocks, bigbird

PATTERNS = [
    Band(3, 2) | GlobalTokens([0, 9]),
    bigbird(4, 1),
    Band(5, 0) | Blocks(Band(1, 0), 4),
    PerHead([Causal(), Blocks(Full(), 8)]),
    RandomBlocks(2, 4, seed=1),
]


def test_names_at_the_top_are_functions() -> None:
    """`attention` is a sub-package too; importing its modules must not bind it again."""
    importlib.import_module("hf_efficient_attn.attention.select")
    assert callable(hea.attention)
    assert hea.attention is functional.attention
    assert callable(hea.explain)


def test_dtypes_are_those_of_torch() -> None:
    with pytest.raises(hea.InputError, match=r"dtype='bf16' must be one of torch.float32"):
        hea.explain(Band(1, 1), dtype="bf16")


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.kind)
@pytest.mark.parametrize(("num_queries", "num_keys"), [(24, 24), (5, 32), (1, 20)])
def test_allowed_pairs(pattern: hea.patterns.Pattern, num_queries: int, num_keys: int) -> None:
    layout = Layout(pattern, 2, num_queries, num_keys, num_keys - num_queries)
    queries = range(num_keys - num_queries, num_keys)
    counted = sum(
        bool(one.allowed(query, key)) for one in layout.head_patterns() for query in queries for key in range(num_keys)
    )
    assert allowed_pairs(layout) == counted


@pytest.mark.parametrize("backend", ["auto", *sorted(set(BACKENDS) - {"gathered", "flash"})])
@pytest.mark.parametrize("pattern", [Band(256, 256), bigbird(64, 3), Causal()], ids=lambda pattern: pattern.kind)
def test_every_other_backend_has_a_reason(pattern: hea.patterns.Pattern, backend: str) -> None:
    explanation = hea.explain(pattern, 1024, backend=backend)
    assert {explanation.backend, *explanation.reasons} == set(BACKENDS)
    assert explanation.backend not in explanation.reasons
    assert all(reason.endswith(".") for reason in explanation.reasons.values())
    assert 0 < explanation.allowed_pairs <= explanation.computed_pairs <= explanation.total_pairs == 8 * 1024**2
    assert 0 < explanation.density <= explanation.block_density <= 1
    assert explanation.memory_bytes > 8 * 1024 * 64 * 4
    assert explanation.relative_cost > 0


def test_the_choice() -> None:
    assert hea.explain(Band(256, 256), 8192).backend == "blocked"
    assert hea.explain(Band(256, 256), 64).backend == "sdpa"
    assert hea.explain(Full(), 8192).backend == "sdpa"
    with hea.use_backend("reference"):
        assert hea.explain(Band(256, 256), 8192).backend == "reference"


def test_it_is_the_choice_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    for name, module in BACKENDS.items():
        original = module.attend
        monkeypatch.setattr(
            module,
            "attend",
            lambda *args, _name=name, _own=original, **kw: (called.append(_name), _own(*args, **kw))[1],
        )
    for tokens in (16, 512, 2048):
        q = torch.randn(1, 2, tokens, 8)
        hea.attention(q, q, q, Band(8, 8), return_lse=True)
        assert hea.explain(Band(8, 8), tokens, num_heads=2, head_dim=8).backend == called.pop()


def test_refusals() -> None:
    with pytest.raises(UnsupportedBackendError, match="no backward pass on cpu"):
        hea.explain(Band(1, 1), training=True, backend="flex")
    with pytest.raises(UnsupportedBackendError, match="does not exist"):
        hea.explain(Band(1, 1), backend="triton")
    with pytest.raises(EfficientAttentionError, match="at least one key per query"):
        hea.explain(Band(1, 1), 8, key_tokens=4)


@pytest.mark.parametrize("tokens", [64, 2048])
def test_a_causal_pattern_is_compared_with_causal_attention(tokens: int) -> None:
    """Pairs and costs agree: what kernels skip above the diagonal is neither computed nor paid."""
    dense, causal, band = (hea.explain(pattern, tokens) for pattern in (Full(), Causal(), Band(16, 0)))
    assert (dense.baseline, dense.relative_cost, dense.block_density) == ("dense attention", 1.0, 1.0)
    assert (causal.baseline, causal.relative_cost) == (band.baseline, 1.0) == ("dense causal attention", 1.0)
    assert causal.density < causal.block_density <= 1.0
    assert (causal.block_density < 1.0) is (tokens > sdpa.TRIANGLE_BLOCK_TOKENS)
    assert band.relative_cost == BACKENDS[band.backend].cost(band.call) / sdpa.cost(causal.call)


LLAMA = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
SMALL = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 32}
SINKS = Band(8, 0) | GlobalTokens([0])


def sparse_llama() -> transformers.LlamaConfig:
    return hea.sparsify(transformers.LlamaConfig(**LLAMA), [None, SINKS])


# (model or config, options, pattern, heads, key heads, head_dim, whether it is causal)
MODELS: dict[str, tuple[Any, dict[str, Any], hea.patterns.Pattern, int, int, int, bool]] = {
    "its own": (transformers.LlamaConfig(**LLAMA), {}, Causal(), 4, 2, 8, True),
    "None for a layer": (sparse_llama(), {"layer": 0}, Causal(), 4, 2, 8, True),
    "causal form": (sparse_llama(), {"layer": 1}, SINKS.causal(), 4, 2, 8, True),
    "the sparse layer by default": (sparse_llama(), {}, SINKS.causal(), 4, 2, 8, True),
    "sliding": (transformers.MistralConfig(**LLAMA, sliding_window=16), {}, Band(15, 0), 4, 2, 8, True),
    "encoder": (hea.sparsify(transformers.BertConfig(**SMALL), Band(8, 0)), {}, Band(8, 0), 4, 4, 8, False),
    "no layer_idx": (transformers.ViTConfig(**SMALL), {"layer": 1}, Full(), 4, 4, 8, False),
    "text of a composite": (
        transformers.LlavaConfig(text_config=sparse_llama()),
        {"layer": 0},
        Causal(),
        4,
        2,
        8,
        True,
    ),
    "family": (hea.SparseTransformerConfig(**SMALL, attention_pattern=Band(8, 8)), {}, Band(8, 8), 4, 4, 8, False),
    "global tokens": (
        hea.SparseTransformerConfig(**SMALL, attention_pattern=Band(8, 8), global_tokens="first"),
        {},
        Band(8, 8) | GlobalTokens([0]),
        4,
        4,
        8,
        False,
    ),
    "shaped": (hea.sparsify(hea.SimplifiedTransformerConfig(**SMALL), Band(8, 8)), {}, Band(8, 0), 4, 4, 8, True),
    "span limit": (hea.AdaptiveSpanConfig(**SMALL, span_limit=64), {}, Band(64, -1), 4, 4, 8, True),
    "encoder part": (
        hea.SparseSeq2SeqConfig(hidden_size=32, encoder_layers=1, decoder_layers=1, num_attention_heads=4),
        *({}, Full(), 4, 4, 8, False),
    ),
    "decoder part": (
        transformers.BartConfig(d_model=32, encoder_layers=1, decoder_layers=1, decoder_attention_heads=4),
        *({"part": "decoder"}, Causal(), 4, 4, 8, True),
    ),
}


@pytest.mark.parametrize("case", MODELS.values(), ids=MODELS.keys())
def test_a_config(case: tuple[Any, dict[str, Any], hea.patterns.Pattern, int, int, int, bool]) -> None:
    config, options, pattern, *heads, is_causal = case
    explanation = hea.explain(config, 128, **options)
    layout, inputs = explanation.call.layout, explanation.call.inputs
    assert layout.pattern == pattern
    assert [layout.num_heads, inputs.num_key_heads, inputs.head_dim] == heads
    assert explanation.baseline == ("dense causal attention" if is_causal else "dense attention")
    assert f"({config.model_type})" in explanation.to_text(200)
    json.dumps(explanation.to_dict())


T5 = transformers.T5Config(num_layers=1, d_model=32, num_heads=4, d_kv=8)
ALIBI = hea.SimplifiedTransformerConfig(**SMALL, position_embedding_type="alibi")


@pytest.mark.parametrize("config", [T5, ALIBI])
def test_a_position_bias_takes_all_pairs_whatever_the_pattern(config: Any) -> None:
    explanation = hea.explain(hea.sparsify(config, Band(8, 8)), 2048)
    assert explanation.density < 0.01
    assert (explanation.backend, explanation.block_density, explanation.relative_cost) == ("sdpa", 1.0, 1.0)
    assert all("position_bias" in reason for reason in explanation.reasons.values())


def test_notes_say_what_the_numbers_leave_out() -> None:
    capped = hea.explain(transformers.Gemma2Config(num_hidden_layers=1), 64)
    assert capped.call.softcap == 50
    assert "has no caps" in capped.to_text(200)
    # the head that a config was saved with decides which tokens are global
    config = hea.SparseTransformerConfig.longformer(**SMALL)
    heads = ["SparseTransformerForQuestionAnswering", "SparseTransformerForSequenceClassification"]
    question, first = (hea.explain(saved_with(config, [head]), 64) for head in heads)
    assert "depend on the text" in question.to_text(200)
    assert "depend on the text" not in first.to_text(200)
    assert len(first.call.layout.pattern.members()) == 1 + len(question.call.layout.pattern.members())
    short = transformers.BartConfig(max_position_embeddings=1024)
    assert any("1,024 positions" in note and "1,025 tokens" in note for note in hea.explain(short, 1025).notes)
    assert not any("positions" in note for note in hea.explain(short, 1024).notes)
    (missing,) = hea.explain("global(0, 99, -41)", 40).notes
    assert "-41, 99" in missing


def test_model_that_keeps_no_cache_is_explained_and_sparsified() -> None:
    """Trainer switches the cache of a model's config off."""
    sizes = {"vocab_size": 13, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, use_cache=False)
    model = hea.sparsify(transformers.LlamaForCausalLM(config), Band(left=3, right=0))
    assert hea.explain(model, 64).call.layout.pattern == Band(left=3, right=0)
    assert model.config.use_cache is False


def saved_with(config: Any, architectures: list[str]) -> Any:
    return type(config)(**{**config.to_dict(), "architectures": architectures})


def test_an_expression_is_the_pattern_that_it_writes() -> None:
    said, given = hea.explain("band(8, 8) | global(0)", 64), hea.explain(Band(8, 8) | GlobalTokens([0]), 64)
    assert str(said) == str(given)


def test_the_whole_pattern_is_printed_and_can_be_given_again() -> None:
    pattern = PerHead([Band(left, 0) | GlobalTokens(range(8)) for left in (8, 16, 32, 64)])
    assert hea.patterns.parse_pattern(row_of(hea.explain(pattern, 64), "pattern")) == pattern
    long = row_of(hea.explain(Band(8, 8) | GlobalTokens(range(0, 4096, 8)), 4096), "pattern")
    assert "global([0, 8, 16, " in long
    assert "all of it in to_dict(), and with --json" in long
    assert len(long) < 1100


def row_of(explanation: Any, name: str) -> str:
    (line,) = [line for line in explanation.to_text(2000, why=True).splitlines() if line.startswith(f"{name} ")]
    return line.removeprefix(name).strip()


def test_lines_are_as_wide_as_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrapped is what one line would say, and every row but the first line of it is indented."""
    explanation = hea.explain(sparse_llama(), 4096)
    for columns in (60, 100):
        monkeypatch.setenv("COLUMNS", str(columns))
        lines = str(explanation).splitlines()
        assert max(map(len, lines)) <= columns
        assert " ".join(str(explanation).split()) == " ".join(explanation.to_text(2000).split())
    assert len(explanation.to_text(1).splitlines()) > len(lines)


def test_learned_spans_of_a_model() -> None:
    model = hea.AdaptiveSpanModel(hea.AdaptiveSpanConfig(**SMALL, span_limit=64, position_embedding_type="rope"))
    with torch.no_grad():
        model.layers[0].self_attn.spans.ratio.copy_(torch.tensor([0.0, 0.5, 0.4, 1.0]))
    # each head reads its span and a ramp of 32 tokens, in steps of 32, up to the limit; not the query itself
    bands = hea.explain(model, 100).call.layout.head_patterns()
    assert bands == (Band(32, -1), Band(64, -1), Band(64, -1), Band(64, -1))


def test_the_call_of_a_model_is_the_one_that_its_layer_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = transformers.AutoModelForCausalLM.from_config(sparse_llama()).to(torch.bfloat16).eval()
    made: list[Any] = []
    build_call = dispatch.build_call
    monkeypatch.setattr(dispatch, "build_call", lambda *args: (made.append(build_call(*args)), made[-1])[1])
    with torch.no_grad():
        model(torch.ones(1, 77, dtype=torch.long))
    explained = hea.explain(model, 77, layer=1).call
    (own,) = [each for each in made if each.layout.pattern != Causal()]
    assert (own.layout, own.inputs) == (explained.layout, explained.inputs)


@pytest.mark.parametrize(
    ("what", "options", "message"),
    [
        (transformers.LlamaConfig(**LLAMA), {"layer": 2}, r"layer=2 of LlamaModel has no attention.*\[0, 1\]"),
        (transformers.LlamaConfig(**LLAMA), {"num_heads": 4}, "num_heads=4 cannot be given for a LlamaConfig"),
        (transformers.LlamaConfig(**LLAMA), {"part": "decoder"}, "LlamaConfig is not one"),
        (transformers.LongformerConfig(), {}, "does not use the attention interface"),
        (transformers.T5GemmaConfig(), {}, "T5GemmaConfig combines two models"),
        (torch.nn.Linear(1, 1), {}, "not Linear"),
        (5, {}, "attention_pattern is 5"),
        ("band(", {}, "band"),
        ([Causal(), None], {"layer": 1}, "Layer 1 has no pattern"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_models(what: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(EfficientAttentionError, match=message):
        hea.explain(what, 64, **options)


def test_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    main(["explain", "band(2, 2) | global(0)", "--tokens", "64", "--heads", "1", "--training", "--dtype", "bfloat16"])
    lines = capsys.readouterr().out.splitlines()
    # the answer first, the other backends by name
    assert [line.split()[0] for line in lines[:5]] == ["backend", "cost", "memory", "pattern", "call"]
    assert lines[0].split()[1] == "sdpa"
    assert "1 heads, 64 queries, 64 keys, bfloat16 on cpu, with gradients" in lines[4]
    # a band of five without its ends, and the first token's row and column beyond what the band holds of them
    assert "436 pairs" in lines[5]
    assert all(name in lines[-1] for name in set(BACKENDS) - {"sdpa"})
    main(["explain", "band(2, 2) | global(0)", "--tokens", "64", "--why"])
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("not ") for line in lines) == len(BACKENDS) - 1


def test_command_for_a_decode_step_on_a_device_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    main(["explain", "causal()", "--tokens", "1", "--key-tokens", "4096", "--device", "cuda"])
    assert "1 queries, 4,096 keys, bfloat16 on cuda" in capsys.readouterr().out


@pytest.mark.parametrize("is_there", [True, False])
def test_a_forecast_for_a_gpu_says_what_is_missing_here(monkeypatch: pytest.MonkeyPatch, is_there: bool) -> None:
    monkeypatch.setattr(flex, "_compiler", lambda device: ("triton", is_there))
    options = {"device": "cuda", "dtype": torch.float32}
    explanation = hea.explain(Band(64, 64), 32_768, **options)
    note = "(on cuda, auto may choose flex if triton is installed; here it is not)"
    assert (explanation.backend == "flex", note in explanation.to_text(200)) == (is_there, not is_there)
    # head sizes of 8 are not for flex, whatever is installed
    assert note not in hea.explain(Band(64, 64), 32_768, **options, head_dim=8).to_text(200)


def test_layers_that_read_otherwise_are_named() -> None:
    config = transformers.LlamaConfig(**{**LLAMA, "num_hidden_layers": 4})
    assert hea.explain(hea.sparsify(config, SINKS), query_tokens=32).notes == ()
    for patterns, sparse, dense in (([SINKS, None] * 2, "0, 2", "1, 3"), ([None, None, SINKS, None], "2", "0–1, 3")):
        explanation = hea.explain(hea.sparsify(config, patterns), query_tokens=32)
        assert explanation.pattern == SINKS.causal()
        (note,) = explanation.notes
        assert f"of 4 layers have this pattern ({sparse})" in note
        assert f"({dense}) have causal(); layer={dense[0]} " in note
