"""The presets against the numbers of the paper and of the authors' scripts, and how their networks start."""

import math

import pytest
import torch

import hf_efficient_attn as hea

Config = hea.AdaptiveSpanConfig
SMALL = {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 512, "span_limit": 256, "vocab_size": 200}


def parameters_of(config: Config) -> int:
    with torch.device("meta"):
        return hea.AdaptiveSpanForCausalLM(config).num_parameters()


@pytest.mark.parametrize(
    ("preset", "count"),
    [
        ("text8_small", 38_357_116),
        ("text8_large", 208_638_172),
        ("enwik8_small", 38_538_541),
        ("enwik8_large", 208_910_221),
        ("enwik8_demo", 6_480_621),
    ],
)
def test_parameters_are_the_authors(preset: str, count: int) -> None:
    """The spec's test 9, and the formula of its section 8."""
    config = getattr(Config, preset)()
    assert parameters_of(config) == count
    d, inner, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    layer = 4 * d * d + 2 * d * inner + inner + d + 4 * d + heads
    rest = 2 * config.vocab_size * d + config.vocab_size + d // heads * config.span_limit
    assert count == config.num_hidden_layers * layer + rest


def test_kinds_of_spans_differ_by_their_parameters() -> None:
    count = parameters_of(Config.enwik8_demo())
    assert parameters_of(Config.enwik8_demo(span="fixed")) == count - 8 * 4
    assert parameters_of(Config.enwik8_demo(span="dynamic")) == count + 8 * 4 * 256


@pytest.mark.parametrize(
    ("preset", "penalty", "dropout", "limit"),
    [
        ("text8_small", 5e-7, 0.3, 8192),
        ("text8_large", 5e-7, 0.4, 8192),
        ("enwik8_small", 5e-7, 0.3, 8192),
        ("enwik8_large", 5e-7, 0.4, 8192),
        ("enwik8_demo", 2e-6, 0.0, 1024),
    ],
)
def test_training_setup(preset: str, penalty: float, dropout: float, limit: int) -> None:
    config = getattr(Config, preset)()
    assert (config.span_penalty, config.span_limit, config.span_ramp, config.span_init) == (penalty, limit, 32, 0.0)
    assert (config.activation_dropout, config.attention_dropout) == (dropout, dropout)
    assert (config.hidden_dropout, config.embedding_dropout) == (0.0, 0.0)
    assert not config.include_self
    assert not config.tie_word_embeddings


def test_fields_on_top_of_a_preset() -> None:
    config = Config.text8_small(span_limit=1024, vocab_size=30)
    assert (config.span_limit, config.vocab_size, config.hidden_size) == (1024, 30, 512)
    assert Config.modern(num_hidden_layers=3).num_hidden_layers == 3


def test_the_authors_network_starts_as_theirs() -> None:
    """Embeddings and positions are N(0, 1), every linear map is as torch starts it, spans are 0."""
    torch.manual_seed(0)
    model = hea.AdaptiveSpanForCausalLM(Config.enwik8_demo(**SMALL))
    for table in (model.model.embed_tokens.weight, model.model.distances.weight):
        assert table.mean().item() == pytest.approx(0.0, abs=0.03)
        assert table.std().item() == pytest.approx(1.0, abs=0.03)
    maps = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    assert len(maps) == 2 * 6 + 1
    for module in maps:
        bound = 1 / math.sqrt(module.in_features)
        for weight in (module.weight, module.bias):
            if weight is not None:
                assert weight.abs().max() <= bound
                assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.15)
    for layer in model.model.layers:
        assert not layer.self_attn.spans.ratio.any()
        assert [layer.self_attn.q_proj.bias, layer.self_attn.o_proj.bias] == [None, None]
        assert layer.attention_norm.eps == 1e-5


def test_tied_embeddings_start_as_embeddings() -> None:
    torch.manual_seed(0)
    model = hea.AdaptiveSpanForCausalLM(Config.enwik8_demo(**SMALL, tie_word_embeddings=True))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.std().item() == pytest.approx(1.0, abs=0.03)


def test_blocks_are_the_authors() -> None:
    """h ← LN(h + attention(h)); h ← LN(h + MLP(h)); no norm after the last block."""
    torch.manual_seed(0)
    model = hea.AdaptiveSpanModel(Config.enwik8_demo(**SMALL)).eval()
    ids = torch.randint(0, 200, (2, 40))
    with torch.no_grad():
        hidden, table = model.embed_tokens(ids), model.distances()
        for layer in model.layers:
            hidden = layer.attention_norm(hidden + layer.self_attn(hidden, position_table=table)[0])
            inner = torch.relu(layer.mlp.up_proj(hidden))
            hidden = layer.mlp_norm(hidden + layer.mlp.down_proj(inner))
        torch.testing.assert_close(model(ids).last_hidden_state, hidden)


@pytest.mark.filterwarnings("ignore:output_attentions")
def test_a_token_reads_neither_itself_nor_what_follows() -> None:
    """The spec's test 7: a changed token changes no output before its place, and of its own only the query."""
    torch.manual_seed(0)
    attention = hea.AdaptiveSpanModel(Config.enwik8_demo(**SMALL)).layers[0].self_attn.eval()
    hidden, table = torch.randn(1, 40, 128), torch.randn(256, 32)
    changed = hidden.clone()
    changed[0, 17] += 1
    with torch.no_grad():
        before, after = (attention(states, position_table=table)[0][0] for states in (hidden, changed))
        _, weights, _ = attention(hidden, position_table=table, output_attentions=True)
    assert torch.equal(before[:17], after[:17])
    # a span of 0 reads the 32 tokens before
    assert (before[18:] != after[18:]).any(-1).all()
    assert torch.equal(weights[0, 0] > 0, torch.ones(40, 40).tril(-1).triu(-32).bool())
    # without any key, the first token gets what no value gives
    assert not before[0].any()
