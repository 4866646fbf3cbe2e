"""`hf-efficient-attn bench blocks`: what it writes, counts and refuses. No timing is asserted."""

import argparse
import json

import pytest
import torch

from hf_efficient_attn.bench.blocks.counts import paper_counts
from hf_efficient_attn.bench.blocks.models import Shape, build_model, random_tokens, run_layers
from hf_efficient_attn.bench.blocks.report import MEASURES
from hf_efficient_attn.bench.harness import report
from hf_efficient_attn.bench.harness.report import resolve_device
from hf_efficient_attn.cli import main
from hf_efficient_attn.models.simplified_transformer.gains import BLOCK_STYLES

SHAPE = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "intermediate_size": 32, "vocab_size": 64}
LENGTHS = {"batch_size": 2, "tokens": 8, "prompt_tokens": 4, "decode_tokens": 3, "decode_batch_size": 2, "repeats": 2}
TINY = [word for name, value in {**SHAPE, **LENGTHS}.items() for word in (f"--{name.replace('_', '-')}", str(value))]
MODELS = [*BLOCK_STYLES, "gpt2"]
SUMMARY = {"median", "first_quartile", "third_quartile"}


def bench(*options):
    """Run the command on a CPU at a tiny size; later options win."""
    main(["bench", "blocks", "--device", "cpu", *TINY, *map(str, options)])


def bench_refuses(message, capsys, *options):
    """Check that the command ends with exit code 2 and `message`, and return all that it said."""
    with pytest.raises(SystemExit) as stop:
        bench(*options)
    said = capsys.readouterr().err
    assert stop.value.code == 2
    assert message in said
    return said


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """The folder that a run over all models in two dtypes wrote."""
    folder = tmp_path_factory.mktemp("bench") / "new" / "folder"
    bench("--dtype", "float32", "bfloat16", "--no-memory", "--output", folder)
    return folder


@pytest.fixture(scope="module")
def results(output):
    return json.loads((output / "blocks.json").read_text())


def test_a_row_per_model_and_dtype(results):
    assert set(results) == {"machine", "settings", "reference", "results", "pre_ln_against_gpt2"}
    rows = [(row["dtype"], row["model"]) for row in results["results"]]
    assert rows == [(dtype, model) for dtype in ("float32", "bfloat16") for model in MODELS]
    assert set(results["pre_ln_against_gpt2"]) == {"float32", "bfloat16"}


def test_quick_compares_two_blocks_with_gpt2(tmp_path):
    bench("--quick", "--output", tmp_path)
    rows = json.loads((tmp_path / "blocks.json").read_text())["results"]
    assert [row["model"] for row in rows] == ["pre_ln", "sas_p", "gpt2"]
    assert {row["peak_memory_bytes"] for row in rows} == {None}


def test_every_row_has_every_measure(results):
    for row in results["results"]:
        speeds = [row[f"{measure}_tokens_per_second"] for measure in ("training", "layers", "prefill")]
        ratios = row["speed_against_reference"]
        assert set(ratios) == set(MEASURES)
        for summary in [*speeds, row["decode_milliseconds_per_token"], *ratios.values()]:
            assert set(summary) == SUMMARY
            assert 0 < summary["first_quartile"] <= summary["median"] <= summary["third_quartile"]
        assert row["peak_memory_bytes"] is None


def test_the_reference_is_as_fast_as_itself(results):
    assert results["reference"] == "pre_ln"
    for row in results["results"]:
        if row["model"] == "pre_ln":
            assert all(set(ratio.values()) == {1.0} for ratio in row["speed_against_reference"].values())


def test_machine_and_settings(results, output):
    machine, settings = results["machine"], results["settings"]
    assert machine["device"] == "cpu"
    assert machine["torch"] == torch.__version__
    assert all(machine[name] for name in ("cpu", "cpu_cores", "torch_threads", "transformers", "date"))
    assert {name: settings[name] for name in (*SHAPE, *LENGTHS)} == {**SHAPE, **LENGTHS}
    assert str(output) not in json.dumps(results)


def test_parameters(results):
    hidden, layers, inner, vocab, positions = 16, 2, 32, 64, 8
    embedding, mlp = vocab * hidden, 2 * hidden * inner
    matrices = {row["model"]: row["parameters"]["weight_matrices"] for row in results["results"]}
    assert matrices["pre_ln"] == matrices["gpt2"] == embedding + layers * (4 * hidden**2 + mlp)
    assert matrices["sas"] == matrices["sas_p"] == embedding + layers * (2 * hidden**2 + mlp) + hidden**2
    for row in results["results"]:
        assert row["parameters"]["all"] > row["parameters"]["weight_matrices"] + positions * hidden


def test_table_and_picture(output):
    markdown = (output / "blocks.md").read_text()
    for model in MODELS:
        assert markdown.count(f"\n| {model} ") == 2
    assert markdown.count("`pre_ln` against transformers' GPT-2: ") == 2
    assert "2 interleaved rounds" in markdown
    assert (output / "blocks.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.usefixtures("measured_in_forks")
def test_memory_without_gpt2_and_without_pre_ln(tmp_path, capsys):
    bench("--blocks", "sas_p", "sas_p", "--no-gpt2", "--output", tmp_path)
    results = json.loads((tmp_path / "blocks.json").read_text())
    assert [row["model"] for row in results["results"]] == ["sas_p"]
    assert results["results"][0]["peak_memory_bytes"] is not None
    assert results["reference"] == "sas_p"
    assert results["pre_ln_against_gpt2"] == {}
    assert "× sas_p" in capsys.readouterr().out


@pytest.mark.parametrize("name", MODELS)
def test_layers_alone_are_those_of_the_model(name):
    """Between the embedding and the final norm of the model, `run_layers` is all that happens."""
    model = build_model(name, Shape(**SHAPE, num_positions=8, hidden_act="relu"), "float32", torch.device("cpu")).eval()
    input_ids = random_tokens(model, 2, 8)
    backbone = model.base_model
    with torch.no_grad():
        states = backbone(input_ids, output_hidden_states=True)
        final_norm = backbone.ln_f if name == "gpt2" else backbone.norm
        torch.testing.assert_close(final_norm(run_layers(model, states.hidden_states[0])), states.last_hidden_state)


def test_counts_of_the_paper():
    counts = [(row["model"], row["block"], row["all"], row["weight_matrices"]) for row in paper_counts()]
    assert counts == [
        ("GPT, 18 layers", "pre_ln", 166_742_016, 165_801_984),
        ("GPT, 18 layers", "sas", 146_072_000, 145_158_144),
        ("BERT, 16 layers", "pre_ln", 119_588_353, 119_537_664),
        ("BERT, 16 layers", "sas", 101_304_435, 101_253_120),
        ("GPT, 72 layers, MLP 2d", "pre_ln", 379_424_256, 378_138_624),
        ("GPT, 72 layers, MLP 2d", "sas", 294_972_410, 293_793_792),
    ]
    for row in paper_counts():
        millions = row[row["counted"]] / 1e6
        assert row["paper"] in (f"{millions:.0f}M", f"{millions:.1f}M")


def test_counts_option_prints_the_table_only(capsys):
    main(["bench", "blocks", "--counts"])
    printed = capsys.readouterr().out
    for figure in ("166.74M", "146.07M", "119.54M", "101.25M", "378.14M", "293.79M", "12.4%", "15.3%", "22.3%"):
        assert figure in printed
    assert "weight matrices only" in printed
    assert "tokens" not in printed


@pytest.mark.parametrize("option", ["tokens", "batch-size", "repeats", "decode-tokens", "num-layers"])
def test_refuses_counts_below_one(option, capsys):
    bench_refuses(f"{option.replace('-', '_')}=0 must be at least 1", capsys, f"--{option}", 0)


def test_refuses_heads_that_do_not_divide_the_width(capsys):
    bench_refuses("num_attention_heads=3 does not divide hidden_size=16", capsys, "--num-heads", 3)


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [("--blocks", "post_ln", "sas_p"), ("--dtype", "float64", "bfloat16"), ("--device", "tpu", "cuda")],
)
def test_refuses_unknown_names(option, value, allowed, capsys):
    message = bench_refuses(value, capsys, option, value)
    assert allowed in message


def test_refuses_cuda_without_cuda(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    bench_refuses("sees no CUDA device. Use 'cpu' or 'auto'", capsys, "--device", "cuda")
    with pytest.raises(ValueError, match="device='cuda', but torch"):
        resolve_device("cuda")
    assert resolve_device("auto") == torch.device("cpu")


def test_without_matplotlib_only_the_picture_is_missing(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(report, "can_draw", lambda: False)
    args = argparse.Namespace(output=tmp_path, json=False)
    report.publish(args, "blocks", {"a": 1}, "| a |", draw=lambda results: pytest.fail("drawn"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["blocks.json", "blocks.md"]
    assert "pip install matplotlib" in capsys.readouterr().out


def test_json_is_all_that_is_printed(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(report, "can_draw", lambda: False)
    report.publish(argparse.Namespace(output=tmp_path, json=True), "blocks", {"a": 1}, "| a |")
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"a": 1} == json.loads((tmp_path / "blocks.json").read_text())
    assert f"Written: {tmp_path / 'blocks.json'}" in printed.err
    main(["bench", "blocks", "--counts", "--json"])
    assert json.loads(capsys.readouterr().out) == paper_counts()
