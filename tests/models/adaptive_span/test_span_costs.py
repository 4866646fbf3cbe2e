"""FLOPs and spans as the paper reports them."""

import pytest
from models.adaptive_span.tiny_models import set_spans, tiny

import hf_efficient_attn as hea
from hf_efficient_attn.models.spans.training import average_span, max_span, span_flops

Config = hea.AdaptiveSpanConfig
# Transformer-XL of 24 layers, by the same formula
TRANSFORMER_XL = {"num_hidden_layers": 24, "hidden_size": 1024, "intermediate_size": 3072}


@pytest.mark.parametrize(
    ("config", "span", "millions"),
    [
        (Config.text8_small(), 314, 41.607),
        (Config.text8_small(span="fixed"), 8192, 138.412),
        (Config(**TRANSFORMER_XL), 3800, 438.436),
        # the paper prints 179 for the large network, which is what an inner width of 4 * 768 gives
        (Config.text8_large(), 245, 216.6),
        (Config.text8_large(intermediate_size=3072), 245, 178.9),
    ],
)
def test_flops_of_the_paper(config: Config, span: float, millions: float) -> None:
    """The spec's test 9."""
    assert span_flops(config, span) / 1e6 == pytest.approx(millions, abs=0.05 if millions in (216.6, 178.9) else 5e-4)


def test_share_of_the_mlp_and_what_short_spans_save() -> None:
    config = Config.text8_small()
    mlp = config.num_hidden_layers * 2 * config.hidden_size * config.intermediate_size
    assert mlp / span_flops(config, 256) == pytest.approx(0.615, abs=5e-4)
    assert 1 - span_flops(config, 314) / span_flops(config, 8192) == pytest.approx(0.699, abs=5e-4)


def test_a_gated_mlp_has_three_maps() -> None:
    plain, gated = (Config(gated_mlp=gated) for gated in (False, True))
    one_map = plain.num_hidden_layers * plain.hidden_size * plain.intermediate_size
    assert span_flops(gated, 100) - span_flops(plain, 100) == one_map


def test_average_and_longest_span_count_the_ramp() -> None:
    model = tiny(span_limit=1024, span_ramp=32, spans=[[0.0, 1.0, 2.0, 2.5], [0.0, 0.0, 900.0, 1000.0]])
    # ⌈1.375⌉ + 32 and ⌈475⌉ + 32; the longest head reads all of the limit
    assert average_span(model) == (34 + 507) / 2
    assert max_span(model) == 1024
    set_spans(model, [[0.0] * 4, [3.25] * 4])
    assert (average_span(model), max_span(model)) == ((32 + 36) / 2, 36)
    set_spans(model, [[1024.0] * 4, [1010.0] * 4])
    assert average_span(model) == 1024


def test_fixed_spans_cost_the_limit() -> None:
    model = tiny(span="fixed")
    assert (average_span(model), max_span(model)) == (40, 40)


def test_an_encoder_reads_both_sides() -> None:
    fields = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    causal, encoder = (Config.modern(is_causal=is_causal, **fields) for is_causal in (True, False))
    assert span_flops(encoder, 50) - span_flops(causal, 50) == 2 * 2 * 50 * 64
    assert span_flops(encoder, 0) == span_flops(causal, 0)


@pytest.mark.parametrize("block", ["pre_ln", "sas", "sas_p", "v_skipinit"])
def test_simplified_blocks_count_the_matrices_they_have(block: str) -> None:
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    model = hea.SimplifiedTransformerModel(hea.SimplifiedTransformerConfig(block=block, span="adaptive", **shape))
    matrices = {name: weight.numel() for name, weight in model.layers.named_parameters() if weight.ndim == 2}
    assert span_flops(model.config, 0) == sum(matrices.values())
    assert (span_flops(model.config, 9) - span_flops(model.config, 0)) / (3 * 2 * 9 * 32) == (
        1 + model.config.is_centered
    )
