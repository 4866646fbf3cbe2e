"""Signal propagation: closed forms of the measures, of the blocks at their start, and the command line."""

import argparse
import json
import math
import sys

import pytest
import torch
from transformers import AutoModel, BertConfig, GPT2Config, PreTrainedTokenizerFast, T5Config

from hf_efficient_attn import SimplifiedTransformerConfig, cli
from hf_efficient_attn.analysis import signal
from hf_efficient_attn.analysis.signal import analyze_signal, attention_entropy, read_gains, rms, token_cosine
from hf_efficient_attn.analysis.signal_sources import NAMED_BLOCKS, OTHER_GAINS, label, load_model
from hf_efficient_attn.errors import InputError

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "position_embedding_type": "learned",
}
GPT2 = GPT2Config(vocab_size=64, n_embd=32, n_layer=3, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0)
BERT = BertConfig(**{name: SHAPE[name] for name in SHAPE if name != "position_embedding_type"})


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def build(config):
    return AutoModel.from_config(config).eval()


def simplified(**fields):
    return build(SimplifiedTransformerConfig(**{**SHAPE, **fields}))


def tokens(batch=2, length=16):
    return torch.randint(SHAPE["vocab_size"], (batch, length))


def cosines(report):
    return [layer.token_cosine for layer in report.layers]


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


class TestReport:
    def test_json_holds_the_numbers(self):
        report = analyze_signal(simplified(block="sas_p"), tokens())
        data = report.to_dict()
        assert json.loads(json.dumps(data)) == data
        assert [layer["layer"] for layer in data["layers"]] == [0, 1, 2, 3]
        assert [layer["token_cosine"] for layer in data["layers"]] == cosines(report)
        assert {"name": "centering_gain", "symbol": "γ", "values": [1.0] * 4, "initial": 1.0, "is_trained": True} in (
            data["layers"][2]["gains"]
        )

    def test_the_table_has_a_row_for_every_layer(self):
        lines = str(analyze_signal(simplified(block="sas"), tokens())).splitlines()
        assert lines[0].startswith("SimplifiedTransformerModel: 2 sequences, 32 tokens")
        assert len(lines) == 1 + 1 + 4 + 1
        assert lines[-1] == "trained: a_V, b_V, α, β, γ, β_SA, β_FF, α_FF; constant: α_SA (means over heads)"

    @pytest.mark.parametrize("suffix", ["png", "svg"])
    def test_pictures(self, tmp_path, suffix):
        path = tmp_path / "new" / f"signal.{suffix}"
        analyze_signal(simplified(block="sas_p"), tokens()).plot(path)
        assert path.read_bytes().startswith(b"\x89PNG" if suffix == "png" else b"<?xml")

    def test_a_diverged_model_still_has_a_picture(self, tmp_path):
        model = simplified(block="sas_p_no_norm")
        model.layers[1].mlp.up_proj.weight.data.fill_(math.nan)
        report = analyze_signal(model, tokens())
        assert [math.isnan(cosine) for cosine in cosines(report)] == [False, False, True, True]
        report.plot(tmp_path / "signal.png")

    def test_a_missing_matplotlib_is_named(self, tmp_path, monkeypatch):
        report = analyze_signal(build(GPT2), tokens())
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        with pytest.raises(ImportError, match=r"pip install 'hf-efficient-attn\[plot\]'"):
            report.plot(tmp_path / "signal.png")


def run(*arguments):
    parser = argparse.ArgumentParser()
    signal.add_arguments(parser)
    signal.main(parser.parse_args([str(argument) for argument in arguments]))


def save_checkpoint(folder, with_tokenizer=True):
    from tokenizers import Tokenizer, models, pre_tokenizers

    model = simplified(block="sas_p")
    model.layers[2].mlp_gain.gain.data.fill_(0.75)
    model.save_pretrained(folder)
    if with_tokenizer:
        words = Tokenizer(models.WordLevel({"[UNK]": 0, "self": 1, "the": 2, "=": 3}, unk_token="[UNK]"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(folder)


class TestCommandLine:
    def test_checkpoint_config_and_name_in_one_picture(self, tmp_path, capsys):
        save_checkpoint(tmp_path / "checkpoint")
        BERT.to_json_file(tmp_path / "config.json")
        sources = [tmp_path / "checkpoint", tmp_path / "config.json", "sas_unshaped"]
        run("--model", *sources, "--tokens", 8, "--batch-size", 2, "--output", tmp_path / "out")
        results = json.loads((tmp_path / "out" / "signal.json").read_text(encoding="utf-8"))
        assert results["settings"] == {"tokens": 8, "batch_size": 2, "seed": 0}
        assert [model["model"] for model in results["models"]] == [
            f"{tmp_path.name}/checkpoint",
            f"{tmp_path.name}/config.json",
            NAMED_BLOCKS["sas_unshaped"].title,
        ]
        trained = next(gain for gain in results["models"][0]["layers"][3]["gains"] if gain["name"] == "mlp_gain")
        assert trained["values"] == [0.75]
        assert trained["initial"] != 0.75
        assert (tmp_path / "out" / "signal.png").stat().st_size > 10_000
        printed = capsys.readouterr().out
        assert printed.count("token cosine") == 3
        assert "Wrote" in printed

    @pytest.mark.parametrize("name", NAMED_BLOCKS)
    def test_every_named_block(self, name):
        model = load_model(name, seed=0)
        assert len(analyze_signal(model, torch.randint(1024, (1, 4))).layers) == 13

    def test_the_same_seed_gives_the_same_report_and_leaves_the_global_one_alone(self, tmp_path):
        state = torch.get_rng_state()
        for folder in ("first", "second"):
            run("--model", "sas_p", "--tokens", 4, "--batch-size", 1, "--output", tmp_path / folder)
        first, second = ((tmp_path / folder / "signal.json").read_bytes() for folder in ("first", "second"))
        assert first == second
        assert torch.equal(torch.get_rng_state(), state)

    def test_it_is_a_subject_of_the_command(self, tmp_path):
        cli.main(["analyze", "signal", "--model", "sas_p", "--tokens", "4", "--output", str(tmp_path / "out")])
        assert {path.name for path in (tmp_path / "out").iterdir()} == {"signal.json", "signal.png"}

    def test_picture_path_and_text(self, tmp_path):
        save_checkpoint(tmp_path / "checkpoint")
        (tmp_path / "text.txt").write_text("the self " * 20, encoding="utf-8")
        picture = tmp_path / "docs" / "picture.png"
        files = ("--text", tmp_path / "text.txt", "--picture", picture, "--output", tmp_path / "out")
        run("--model", tmp_path / "checkpoint", "--tokens", 5, "--batch-size", 2, *files)
        assert picture.exists()
        assert not (tmp_path / "out" / "signal.png").exists()

    def test_a_checkpoint_without_tokenizer_takes_random_tokens_if_told(self, tmp_path):
        save_checkpoint(tmp_path / "checkpoint", with_tokenizer=False)
        options = ("--model", tmp_path / "checkpoint", "--tokens", 5, "--output", tmp_path / "out")
        with pytest.raises(InputError, match="--random-tokens"):
            run(*options)
        run(*options, "--random-tokens")
        assert (tmp_path / "out" / "signal.json").exists()

    def test_wrong_arguments_are_named(self, tmp_path):
        save_checkpoint(tmp_path / "checkpoint")
        (tmp_path / "short.txt").write_text("the self the self", encoding="utf-8")
        (tmp_path / "empty").mkdir()
        for arguments, message in (
            (["sas", "--tokens", 1], "at least 2 tokens"),
            (["sas", "--batch-size", 0], "at least 1 sequence"),
            ([tmp_path / "nowhere"], "no such file or folder"),
            ([tmp_path / "nowhere.json"], "no such file or folder"),
            ([tmp_path / "empty"], "holds no config.json"),
            ([tmp_path / "checkpoint", "--text", tmp_path / "nowhere.txt"], "no such file"),
            ([tmp_path / "checkpoint", "--text", tmp_path / "short.txt"], "too short for 8 sequences of 128 tokens"),
        ):
            with pytest.raises(InputError, match=message):
                run("--model", *arguments, "--output", tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def test_labels(self):
        assert label("sas_p") == "SAS-P (no skip, shaped)"
        assert label("runs/sas_p/checkpoint-500") == "sas_p/checkpoint-500"
        assert label("openai-community/gpt2") == "openai-community/gpt2"
