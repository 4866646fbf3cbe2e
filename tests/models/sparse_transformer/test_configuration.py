"""The presets against the papers' numbers."""

import pytest
import torch
from models_cases import TINY

import hf_efficient_attn as hea
from hf_efficient_attn.patterns import Band, Dilated, Pattern, PerHead

Config = hea.SparseTransformerConfig


def parameters_of(config: Config, head: str) -> int:
    with torch.device("meta"):
        return getattr(hea, f"SparseTransformer{head}")(config).num_parameters()


@pytest.mark.parametrize(("size", "millions"), [("small", 41), ("large", 102)])
def test_char_lm_has_the_papers_parameters(size: str, millions: int) -> None:
    count = parameters_of(Config.longformer_char_lm(size), "ForCausalLM")
    assert round(count / 1e6) == pytest.approx(millions, abs=2)


def test_char_lm_windows_and_dilation_grow() -> None:
    patterns = [Pattern.from_dict(entry) for entry in Config.longformer_char_lm().attention_pattern]
    reads = [[head.num_keys_of(20_000, 40_000) - 1 for head in pattern.heads(8)] for pattern in patterns]
    assert [row[0] for row in reads] == [32] * 2 + [64] * 2 + [128] * 2 + [256] * 3 + [512] * 3
    spans = [pattern.heads(8)[7].key_intervals(20_000, 20_000, 40_000)[0][0] for pattern in patterns]
    steps = [(20_000 - first) // row[7] for first, row in zip(spans, reads, strict=True)]
    assert steps == [1] * 6 + [2] * 2 + [3] * 2 + [4] * 2
    last_phase = Pattern.from_dict(Config.longformer_char_lm(phase=5).attention_pattern[-1])
    assert last_phase.heads(8)[0].num_keys_of(20_000, 40_000) - 1 == 8192


def test_dilation_by_layer_and_head() -> None:
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Config.longformer(**shape, attention_window=8, attention_dilation=[[1, 1, 2, 4], [3, 3, 3, 3]])
    first, second = (Pattern.from_dict(entry) for entry in config.attention_pattern)
    assert [head.key_intervals(50, 50, 100)[0][0] for head in first.heads(4)] == [46, 46, 42, 34]
    assert second == Dilated(12, 12, 3)
    assert Config.longformer(**shape, attention_dilation=[1, 2], num_dilated_heads=1).attention_pattern[1] == (
        PerHead([Band(256, 256)] * 3 + [Dilated(512, 512, 2)]).to_dict()
    )
    with pytest.raises(hea.ConfigurationError, match=r"the steps \[1, 2\] for the 4 heads of a layer"):
        Config.longformer(**shape, attention_dilation=[[1, 2], [1, 1, 1, 1]])


def test_longformer_base_reads_what_the_paper_says() -> None:
    config = Config.longformer()
    pattern = Pattern.from_dict(config.attention_pattern[0])
    # 12.1% of all pairs at 4,096 tokens
    assert pattern.num_pairs(4096, 4096) == 2_035_456
    # RoBERTa-base with 4,096 positions and three more projections a layer
    local = parameters_of(Config.longformer(global_projections=False), "ForMaskedLM")
    assert parameters_of(config, "ForMaskedLM") - local == 12 * 3 * (768 * 768 + 768)


def test_bigbird_itc_reads_what_the_paper_says() -> None:
    config = Config.bigbird_itc(plan="seeded")
    pattern = Pattern.from_dict(config.attention_pattern).resolve(4096, 0, 0, 12)
    # 622 blocks of 64
    assert pattern.num_pairs(4096, 4096) == 622 * 64 * 64


def test_sparsify_changes_the_pattern_of_a_sparse_model() -> None:
    torch.manual_seed(0)
    model = hea.SparseTransformerModel(Config.sliding(**TINY, left=1)).eval()
    ids = torch.randint(3, 60, (1, 30))
    with torch.no_grad():
        narrow = model(ids).last_hidden_state
        wide = hea.sparsify(model, hea.patterns.Band(8, 8))(ids).last_hidden_state
        again = hea.sparsify(model, hea.patterns.Band(1, 1))(ids).last_hidden_state
    assert not torch.allclose(narrow, wide, atol=1e-3)
    torch.testing.assert_close(again, narrow)
