"""Signal propagation: closed forms of the measures, of the blocks at their start, and models of transformers."""

import copy
import math

import pytest
import torch
from analysis.signal_models import BERT, GPT2, build, cosines, simplified, tokens
from transformers import LlamaConfig, LlamaForCausalLM, T5Config

import hf_efficient_attn as hea
from hf_efficient_attn.analysis.model_sources import NAMED_BLOCKS, OTHER_GAINS, load_model
from hf_efficient_attn.analysis.signal import analyze_signal, attention_entropy, read_gains, rms, token_cosine
from hf_efficient_attn.errors import InputError


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def all_real(hidden):
    return torch.ones(hidden.shape[:2], dtype=torch.bool)


class TestMeasures:
    def test_cosine_equals_the_definition_by_pairs(self):
        hidden, real = torch.randn(3, 7, 5), torch.rand(3, 7) < 0.7
        real[:, :2] = True
        means = []
        for sequence, kept in zip(hidden, real, strict=True):
            unit = torch.nn.functional.normalize(sequence[kept], dim=-1)
            pairs = ~torch.eye(len(unit), dtype=torch.bool)
            means.append((unit @ unit.T)[pairs].mean())
        assert token_cosine(hidden, real) == pytest.approx(float(torch.stack(means).mean()), abs=1e-6)

    def test_cosine_leaves_out_sequences_of_one_token(self):
        hidden = torch.tensor([[[1.0, 0.0], [1.0, 0.0]], [[1.0, 0.0], [-1.0, 0.0]]])
        assert token_cosine(hidden, torch.tensor([[True, True], [True, False]])) == 1

    def test_causal_averaging_six_times_collapses(self):
        num_tokens = 64
        centring = torch.ones(num_tokens, num_tokens).tril() / torch.arange(1, num_tokens + 1).unsqueeze(1)
        hidden = torch.randn(8, num_tokens, 256)
        assert token_cosine(hidden, all_real(hidden)) == pytest.approx(0, abs=0.01)
        for _ in range(6):
            hidden = centring @ hidden
        assert token_cosine(hidden, all_real(hidden)) == pytest.approx(0.995, abs=0.003)

    def test_rms_of_real_tokens(self):
        hidden = torch.tensor([[[3.0, 4.0], [100.0, 100.0]]])
        assert rms(hidden, torch.tensor([[True, False]])) == pytest.approx(math.sqrt(12.5))

    def test_entropy_per_head(self):
        one_key, two_keys = [1.0, 0.0, 0.0], [0.5, 0.5, 0.0]
        weights = torch.tensor([[[one_key, one_key], [one_key, two_keys]]])
        nats, uniform = attention_entropy(weights, torch.ones(1, 2, dtype=torch.bool))
        assert nats == pytest.approx([0, math.log(2) / 2])
        assert uniform == pytest.approx(math.log(2) / 2)


class TestClosedForms:
    def test_bidirectional_softmax_without_skip_collapses_in_one_block(self):
        model = simplified(**NAMED_BLOCKS["sas_unshaped"].fields, query_init_std=0.0, is_causal=False)
        report = analyze_signal(model, tokens())
        assert abs(cosines(report)[0]) < 0.2
        assert cosines(report)[1:] == pytest.approx([1, 1, 1], abs=1e-6)

    @pytest.mark.parametrize("is_causal", [True, False])
    @pytest.mark.parametrize("block", ["v_skipinit", "sas", "sas_p", "sas_p_no_norm"])
    def test_shaped_attention_at_its_start_leaves_cosines_unchanged(self, block, is_causal):
        report = analyze_signal(simplified(block=block, is_causal=is_causal, mlp_gain=0.0), tokens())
        assert cosines(report) == pytest.approx([cosines(report)[0]] * 4, abs=1e-5)

    def test_value_skipinit_leaves_cosines_unchanged(self):
        report = analyze_signal(simplified(**NAMED_BLOCKS["value_skipinit"].fields, mlp_gain=0.0), tokens())
        assert cosines(report) == pytest.approx([cosines(report)[0]] * 4, abs=1e-5)

    def test_only_shaping_keeps_a_skipless_causal_block_from_collapse(self):
        last = {
            name: cosines(analyze_signal(load_model(name, seed=0), torch.randint(1024, (4, 64))))[-1]
            for name in ("sas", "sas_unshaped")
        }
        assert abs(last["sas"]) < 0.05
        assert last["sas_unshaped"] > 0.99

    @pytest.mark.parametrize(("is_causal", "keys"), [(True, range(1, 17)), (False, [16] * 16)])
    def test_entropy_of_zero_logits_is_log_of_allowed_keys(self, is_causal, keys):
        report = analyze_signal(simplified(block="sas", is_causal=is_causal), tokens())
        expected = sum(math.log(count) for count in keys) / 16
        for layer in report.layers[1:]:
            assert layer.entropy_nats == pytest.approx([expected] * 4, abs=1e-5)
            assert layer.entropy_relative == pytest.approx([1] * 4, abs=1e-5)
        assert report.layers[0].entropy_nats == ()


@pytest.mark.filterwarnings("ignore:output_attentions=True")
def test_a_sparsified_model_is_measured_with_its_pattern() -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    dense = LlamaForCausalLM(LlamaConfig(vocab_size=64, **shape))
    sparse = hea.sparsify(copy.deepcopy(dense), [hea.patterns.Band(0, 0), None])
    of_dense, of_sparse = (analyze_signal(model, tokens()) for model in (dense, sparse))
    assert sparse.config._attn_implementation == "efficient"
    # a token that reads itself alone has no choice
    assert of_sparse.layers[1].entropy_nats == pytest.approx([0] * 4, abs=1e-6)
    assert min(of_dense.layers[1].entropy_nats) > 0.5
    assert of_sparse.layers[2].entropy_nats == pytest.approx(of_dense.layers[2].entropy_nats, rel=0.05)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("is_causal", [True, False])
def test_padding_changes_nothing(side, is_causal):
    model = simplified(block="sas", is_causal=is_causal, query_init_std=1.0, identity_gain=0.5)
    ids, pads = tokens(batch=1, length=10), tokens(batch=1, length=6)
    order = (pads, ids) if side == "left" else (ids, pads)
    mask = torch.ones(1, 16, dtype=torch.long)
    mask[:, slice(0, 6) if side == "left" else slice(10, 16)] = 0
    alone, padded = analyze_signal(model, ids), analyze_signal(model, torch.cat(order, dim=1), mask)
    assert padded.num_tokens == alone.num_tokens == 10
    for one, other in zip(alone.layers, padded.layers, strict=True):
        assert other.token_cosine == pytest.approx(one.token_cosine, abs=1e-5)
        assert other.rms == pytest.approx(one.rms, abs=1e-5)
        assert other.entropy_nats == pytest.approx(one.entropy_nats, abs=1e-5)
        assert other.entropy_relative == pytest.approx(one.entropy_relative, abs=1e-5)


class TestGains:
    @pytest.mark.parametrize("block", ["pre_ln", "parallel", "v_skipinit", "sas", "sas_p", "sas_p_no_norm"])
    def test_start_values_are_those_of_the_config(self, block):
        model = simplified(block=block)
        report = analyze_signal(model, tokens())
        assert report.layers[0].gains == ()
        for number, layer in enumerate(report.layers[1:]):
            names = [gain.name for gain in layer.gains]
            assert {"attention_gain", "mlp_gain"} <= set(names)
            assert len(names) == len(set(names))
            for gain in layer.gains:
                assert gain.values == pytest.approx([model.config.gain(gain.name, number)] * len(gain.values))
                assert gain.is_trained == model.config.is_trainable(gain.name)
                is_per_head = gain.symbol in ("α", "β", "γ") and gain.is_trained
                assert len(gain.values) == (4 if is_per_head else 1)

    def test_trained_values_are_read_from_the_parameters(self):
        model = simplified(block="sas_p")
        model.layers[1].self_attn.centering_gain.gain.data = torch.tensor([1.0, 2.0, 3.0, 4.0])
        gain = next(gain for gain in read_gains(model)[1] if gain.symbol == "γ")
        assert (gain.values, gain.initial, gain.is_trained) == ((1, 2, 3, 4), 1, True)

    def test_the_matrix_gains_of_the_first_layer_have_their_letters(self):
        gains = read_gains(simplified(block="sas"))
        assert [gain.symbol for gain in gains[0]][:2] == ["a_V", "b_V"]
        assert "a_V" not in [gain.symbol for gain in gains[1]]

    def test_only_shaping_is_taken_from_the_unshaped_block(self):
        shaped, unshaped = (simplified(**NAMED_BLOCKS[name].fields) for name in ("sas", "sas_unshaped"))
        removed = {gain.name for gain in read_gains(shaped)[0]} - {gain.name for gain in read_gains(unshaped)[0]}
        assert removed == {"identity_gain", "softmax_gain", "centering_gain"}
        kept = {gain.name for gain in read_gains(unshaped)[0] if gain.is_trained}
        assert kept == {gain.name for gain in read_gains(shaped)[0] if gain.is_trained} - removed <= set(OTHER_GAINS)


class TestAnyModel:
    @pytest.mark.parametrize("config", [GPT2, BERT], ids=["gpt2", "bert"])
    def test_models_of_transformers(self, config):
        report = analyze_signal(build(config), tokens(), torch.ones(2, 16))
        assert len(report.layers) == 4
        assert report.gain_symbols == ()
        assert all(len(layer.entropy_nats) == 4 and 0.9 < layer.entropy_relative[0] <= 1 for layer in report.layers[1:])
        assert "token cosine" in str(report)

    def test_the_last_layer_is_read_before_the_final_norm(self):
        model = build(GPT2)
        report = analyze_signal(model, ids := tokens())
        model.ln_f = torch.nn.Identity()
        assert report == analyze_signal(model, ids)

    def test_the_model_is_left_as_it_was(self):
        model = simplified(block="sas_p", hidden_dropout=0.5).train()
        before = model.config._attn_implementation
        first, second = (analyze_signal(model, torch.arange(8).view(1, 8)) for _ in range(2))
        assert first == second
        assert model.training
        assert model.config._attn_implementation == before == "sdpa"
        assert len(model.layers[-1]._forward_hooks) == 1  # transformers' own

    def test_an_encoder_decoder_is_refused_and_its_encoder_accepted(self):
        config = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
        model = build(config)
        with pytest.raises(InputError, match="get_encoder"):
            analyze_signal(model, tokens())
        assert len(analyze_signal(model.get_encoder(), tokens()).layers) == 3

    def test_a_model_without_hidden_states_is_refused(self):
        model = build(GPT2)
        model.forward = lambda **kwargs: {"last_hidden_state": torch.zeros(2, 16, 32)}
        with pytest.raises(InputError, match="no hidden states"):
            analyze_signal(model, tokens())

    @pytest.mark.parametrize("shape", [(2, 1), (0, 4), (4,)])
    def test_inputs_without_two_tokens_are_refused(self, shape):
        with pytest.raises(InputError, match="input_ids has shape"):
            analyze_signal(build(GPT2), torch.zeros(shape, dtype=torch.long))

    def test_masks_that_do_not_fit_are_refused(self):
        with pytest.raises(InputError, match="attention_mask has shape"):
            analyze_signal(build(GPT2), tokens(2, 8), torch.ones(2, 7))
        with pytest.raises(InputError, match="nothing to compare"):
            analyze_signal(build(GPT2), tokens(2, 8), torch.eye(2, 8))
