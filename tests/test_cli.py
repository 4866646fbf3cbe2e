"""The command line: every command explains itself, and wrong ones say what exists."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from distributed import run_script
from transformers import LlamaConfig, LlamaForCausalLM

import hf_efficient_attn
from hf_efficient_attn.cli import COMMANDS, main
from hf_efficient_attn.convert.hub import HTTP_ERROR, find_on_hub
from hf_efficient_attn.models.register import FAMILIES
from hf_efficient_attn.patterns import Pattern


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help(command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*command, "--help"])
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    assert f"hf-efficient-attn {' '.join(command)} [-h]" in printed
    # and an example of its own
    examples = [line.split() for line in printed.splitlines() if line.split()[:1] == ["hf-efficient-attn"]]
    assert any(example[1 : len(command) + 1] == list(command) for example in examples)


@pytest.mark.parametrize("verb", sorted({verb for verb, *rest in COMMANDS if rest}))
def test_help_of_a_group(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([verb, "--help"])
    printed = capsys.readouterr().out
    assert "\nMeasure " in printed
    assert f"    hf-efficient-attn {verb} " in printed
    assert "in tokens" in printed
    assert all(rest[0] in printed for first, *rest in COMMANDS if first == verb)


@pytest.mark.parametrize("arguments", ["--help", "bench --help"])
def test_help_imports_neither_torch_nor_transformers(arguments: str) -> None:
    script = f"""
import atexit, sys
import hf_efficient_attn_cli
sys.argv[1:] = {arguments.split()}
slow = {{"torch", "transformers", "hf_efficient_attn"}}
atexit.register(lambda: print("imported:", *slow & set(sys.modules)))
hf_efficient_attn_cli.main()
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "attention" in result.stdout
    assert result.stdout.strip().endswith("imported:")


@pytest.mark.parametrize("module", ["hf_efficient_attn", "hf_efficient_attn_cli"])
def test_modules_run_commands(module: str) -> None:
    """The second is the console script."""
    result = run_script([sys.executable, "-m", module, "draw", "causal()", "--tokens", "2"])
    assert result.stdout.startswith("■⬚\n■■\n"), result.stderr


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["benchmark"])
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert all(command in message for command, *_ in COMMANDS)


def test_errors_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["analyze", "signal", "--model", "sas", "--tokens", "1"])
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("hf-efficient-attn: error: ")


# a command that needs a library, whose sentence comes before anything is measured
NEED_MATPLOTLIB = [
    ["draw", "full()", "--tokens", "4", "--picture", "{folder}/a.png"],
    ["analyze", "signal", "--model", "sas", "--tokens", "8", "--output", "{folder}"],
]


@pytest.mark.parametrize("arguments", NEED_MATPLOTLIB, ids=lambda arguments: arguments[0])
def test_without_the_extras(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`test_replaced.py` imports the package where nothing optional is installed."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit) as stop:
        main([argument.format(folder=tmp_path) for argument in arguments])
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hf-efficient-attn: error: ")
    assert "needs matplotlib, which is not installed. Run: pip install" in line


def test_any_missing_library(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever a command imports, the sentence is the same; what is missing of our own stays an error of ours."""

    def draw(*arguments: object) -> None:
        raise ModuleNotFoundError("No module named 'evaluate.metrics'", name=missing)

    monkeypatch.setattr("hf_efficient_attn.analysis.draw.patterns_figure", draw)
    missing = "evaluate.metrics"
    with pytest.raises(SystemExit) as stop:
        main(["draw", "full()", "--tokens", "4", "--picture", "a.png"])
    assert stop.value.code == 2
    assert "This command needs evaluate, which is not installed. Run: pip install evaluate" in capsys.readouterr().err
    missing = "hf_efficient_attn.nothing"
    with pytest.raises(ModuleNotFoundError):
        main(["draw", "full()", "--tokens", "4", "--picture", "a.png"])


OWN = """
from dataclasses import dataclass

from hf_efficient_attn.patterns import Pattern


@dataclass(frozen=True)
class EveryThird(Pattern, kind="every_third"):
    def allowed(self, query, key):
        return (query - key) % 3 == 0

    def key_intervals(self, first_query, last_query, num_keys):
        queries = range(first_query, last_query + 1)
        return [(key, key + 1) for key in range(num_keys) if any(self.allowed(query, key) for query in queries)]
"""


def test_a_module_with_own_patterns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(Pattern, "kinds", {**Pattern.kinds})
    (tmp_path / "own_patterns.py").write_text(OWN)
    main(["draw", "every_third()", "--tokens", "4", "--import", "own_patterns"])
    assert capsys.readouterr().out.split()[:4] == ["■⬚⬚■", "⬚■⬚⬚", "⬚⬚■⬚", "■⬚⬚■"]
    with pytest.raises(SystemExit) as stop:
        main(["draw", "every_third()", "--import", "own_pattern"])
    assert stop.value.code == 2
    assert "--import own_pattern: no such module" in capsys.readouterr().err
    config = LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    LlamaForCausalLM(config).save_pretrained("dense")
    main(["sparsify", "dense", "sparse", "--pattern", "every_third()", "--import", "own_patterns"])
    assert "    import own_patterns" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"hf-efficient-attn {hf_efficient_attn.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["draw", "{folder}"], "{folder} is a folder without config.json"),
        (["draw", ""], "The pattern is empty"),
        (["draw", "full()", "--tokens", "100000"], "100000 × 100000 signs"),
        (["draw", "full()", "--tokens", "0"], "--tokens is 0; it must be an integer of at least 1"),
        (
            ["draw", "full()", "--tokens", "4", "--picture", "{folder}/a.xyz"],
            "does not end with the suffix of a picture",
        ),
        (["draw", "{folder}/deep.json"], "nested too deeply"),
        (["draw", "{folder}/number.json"], "not valid JSON"),
        (["draw", "full()", "--layer", "-1"], "layer=-1 must be at least 0"),
        (["explain", "{folder}/damaged"], "transformers cannot read {folder}/damaged"),
        (["explain", "full()", "--tokens", "-3"], "query_tokens is -3"),
        (["explain", "full()", "--heads", "0"], "num_heads is 0"),
        (["explain", "full()", "--heads", "4", "--key-heads", "3"], "num_key_heads=3"),
        (["explain", "no/model"], "'no/model'"),
        (["draw", "bigbird"], "write bigbird()"),
        (["draw", "full()", "--titles", "hi"], "--titles"),
        (["explain", "full()", "--part", "decoder"], "--part decoder"),
        (["explain", "{folder}/file"], "{folder}/file"),
        (["explore", "--model", "{folder}/unknown", "--text", "{folder}/file", "--output", "/proc/x.html"], "written"),
        (["explain", "{folder}/llama.json", "--causal"], "--causal is for patterns"),
        (["export-code", "{folder}/nothing"], "{folder}/nothing has no config.json"),
        (["analyze", "signal", "--model", "{folder}/unknown"], "transformers cannot read {folder}/unknown"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_paths_and_values(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("no folder")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "number.json").write_text("[" + "9" * 5000 + "]")
    (tmp_path / "unknown").mkdir()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "config.json").write_text("{")
    (tmp_path / "unknown" / "config.json").write_text('{"model_type": "unknown to transformers"}')
    (tmp_path / "llama.json").write_text('{"model_type": "llama", "num_hidden_layers": 1}')
    with pytest.raises(SystemExit) as stop:
        main([argument.format(folder=tmp_path) for argument in arguments])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("hf-efficient-attn: error: ")
    assert message.format(folder=tmp_path) in error
    assert len(error.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["analyze", "signal", "--model", "sas", "--text", "book.txt"], "--text book.txt is only used by saved models"),
        (["analyze", "signal", "--model", "sas", "--output", "{folder}/file"], "{folder}/file/signal.png cannot be"),
        (["analyze", "spans", "{folder}", "--picture", "{folder}/file/a.png"], "{folder}/file/a.png cannot be written"),
        (["bench", "models", "--output", "{folder}/file"], "{folder}/file: File exists."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_written_or_read_is_not_measured(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(SystemExit) as stop:
        main([argument.format(folder=tmp_path) for argument in arguments])
    assert stop.value.code == 2
    # nothing else: no progress, and no word of what is measured
    (line,) = capsys.readouterr().err.splitlines()
    assert message.format(folder=tmp_path) in line


@pytest.mark.parametrize(
    "arguments",
    [
        ["convert", "nosuch", "{folder}/new"],
        ["sparsify", "nosuch", "{folder}/new", "--pattern", "band(2, 0)"],
        ["explore", "--model", "nosuch", "--text", "{folder}/text", "--output", "{folder}/page.html"],
        ["analyze", "spans", "nosuch", "--output", "{folder}"],
        ["analyze", "signal", "--model", "nosuch", "--output", "{folder}"],
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_a_model_that_is_nowhere_is_asked_for_once(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One sentence for all commands, and one question to the Hub: transformers, which asks again and again, is not."""
    asked = []

    def refuse(url: str, **options: object) -> None:
        asked.append(url.rpartition("/")[2])
        raise HTTP_ERROR("no network")

    monkeypatch.setattr(sys.modules[find_on_hub.__module__], "get_hf_file_metadata", refuse)
    monkeypatch.setattr(transformers.AutoModel, "from_pretrained", lambda *given, **options: pytest.fail("was asked"))
    (tmp_path / "text").write_text("some text")
    with pytest.raises(SystemExit) as stop:
        main([argument.format(folder=tmp_path) for argument in arguments])
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "nosuch is neither a folder here nor in the cache, and the Hub (" in line
    assert ("pre_ln" in line) == (arguments[1] == "signal")
    assert len(asked) == 1


def test_families_are_those_that_are_registered(capsys: pytest.CaptureFixture[str]) -> None:
    main(["families", "--json"])
    listed = json.loads(capsys.readouterr().out)
    assert len(listed) == len(FAMILIES)
    for facts in listed:
        config_class = type(transformers.AutoConfig.for_model(facts["model_type"]))
        for head in facts["heads"]:
            assert config_class in getattr(transformers, head)._model_mapping
        # a paper is named where the config is explained
        assert all(f"arXiv:{paper}" in " ".join(config_class.__doc__.split()) for paper in facts["papers"])
        assert all(callable(getattr(config_class, preset)) for preset in facts["presets"])
        assert facts["papers"]
        assert all(config_class(block=block).block == block for block in facts["blocks"])
        assert re.search(r"\bn(\b|²)", facts["cost"])
    main(["families"])
    printed = capsys.readouterr().out
    assert "\n  blocks  pre_ln, parallel, v_skipinit, sas, sas_p, sas_p_no_norm\n" in printed
    assert all(f"{facts['model_type']}\n  config  {facts['config']}\n" in printed for facts in listed)


def test_analyses_print_what_they_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 16}
    hf_efficient_attn.AdaptiveSpanConfig(**sizes, span_limit=8).save_pretrained(tmp_path)
    config, tokens = str(tmp_path / "config.json"), ["--tokens", "16"]
    for name, arguments in {"spans": [config], "signal": ["--model", config, "--batch-size", "1"]}.items():
        main(["analyze", name, *arguments, *tokens, "--output", str(tmp_path), "--json"])
        printed = capsys.readouterr()
        assert json.loads(printed.out) == json.loads((tmp_path / f"{name}.json").read_text())
        assert f"Measuring {config}" in printed.err


def test_a_reader_may_stop_reading(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As `| head` does: no traceback, and no message about it."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        with pytest.raises(SystemExit) as stop:
            main(["families"])
    assert stop.value.code == 1
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("file", ["", "config.json"])
def test_explain_a_saved_model(file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Learned spans are read from the weights of a folder; a config alone knows their limit."""
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 16}
    config = hf_efficient_attn.AdaptiveSpanConfig(**sizes, span_limit=512, span_init=0.25)
    hf_efficient_attn.AdaptiveSpanForCausalLM(config).save_pretrained(tmp_path)
    capsys.readouterr()
    main(["explain", str(tmp_path / file), "--tokens", "1024", "--json"])
    explanation = json.loads(capsys.readouterr().out)
    assert explanation["pattern"]["left"] == (512 if file else 128 + config.span_ramp)
    assert (explanation["call"]["num_heads"], explanation["baseline"]) == (2, "dense causal attention")
