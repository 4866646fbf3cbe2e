"""Reports of signal propagation, their pictures, and the command line."""

import argparse
import json
import math
import sys

import pytest
import torch
from analysis.signal_models import BERT, GPT2, build, cosines, simplified, tokens
from transformers import PreTrainedTokenizerFast

from hf_efficient_attn import cli
from hf_efficient_attn.analysis import signal
from hf_efficient_attn.analysis.model_sources import NAMED_BLOCKS, label, load_model
from hf_efficient_attn.analysis.signal import analyze_signal
from hf_efficient_attn.analysis.signal_report import SignalReport
from hf_efficient_attn.errors import InputError


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


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

    def test_the_json_is_read_back(self):
        report = analyze_signal(simplified(block="sas_p"), tokens())
        assert report.layers[1].gains
        assert SignalReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report

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
        with pytest.raises(ImportError, match="pip install matplotlib"):
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
            (["sas", "--batch-size", 0], "at least 2 tokens and 1 sequence"),
            ([tmp_path / "nowhere"], "no such file or folder"),
            ([tmp_path / "nowhere.json"], "no such file or folder"),
            ([tmp_path / "empty"], "has no config.json"),
            ([tmp_path / "short.txt"], "is a file"),
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
