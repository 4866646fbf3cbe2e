"""examples/train_clm.py, run as its users run it, at a tiny size."""

import json
import math
import signal
import subprocess
from pathlib import Path

import pytest
from datasets import Dataset
from run_example import finish_example, start_example, start_forked
from safetensors.torch import load_file
from transformers import AutoTokenizer

SCRIPT = "train_clm.py"
TINY_SHAPE = ["--config_overrides", "hidden_size=32,num_hidden_layers=2,num_attention_heads=2", "--vocab_size", "400"]
TINY = [
    *TINY_SHAPE,
    "--max_train_bytes",
    "150000",
    "--max_eval_samples",
    "8",
    "--max_steps",
    "12",
    "--block_size",
    "32",
]
BLOCKS = ("pre_ln", "sas_p")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder and the output of a run from start to end."""
    folder = tmp_path_factory.mktemp("finished")
    return folder / "run", finish_example(start_forked(folder, SCRIPT, *TINY))


def test_every_promised_file_is_there(finished: tuple[Path, str]) -> None:
    folder, output = finished
    assert {"results.json", "results.md", "loss_curves.png"} <= {file.name for file in folder.iterdir()}
    for block in BLOCKS:
        names = {file.name for file in (folder / block).iterdir()}
        assert {"config.json", "model.safetensors", "generation_config.json", "tokenizer.json", "README.md"} <= names
        assert block in (folder / block / "README.md").read_text()
    assert "bits per byte" in output
    assert str(Path("run") / "results.json") in output


def test_results_are_consistent(finished: tuple[Path, str]) -> None:
    folder, _ = finished
    results = json.loads((folder / "results.json").read_text())
    assert tuple(results["blocks"]) == BLOCKS
    for block, result in results["blocks"].items():
        history = json.loads((folder / block / "history.json").read_text())
        assert result["eval_loss"] == pytest.approx(min(entry.get("eval_loss", math.inf) for entry in history))
        assert result["bits_per_byte"] == pytest.approx(bits_per_byte(folder, result["eval_loss"]), rel=1e-9)
        assert result["num_steps"] == 12
        assert result["train_tokens"] == pytest.approx(12 * result["tokens_per_step"], rel=0.01)
        assert result["max_logit_difference"] <= 1e-6
        seconds = [entry["train_seconds"] for entry in history]
        assert seconds == sorted(seconds)
    assert results["blocks"]["sas_p"]["parameters"] < results["blocks"]["pre_ln"]["parameters"]


def bits_per_byte(folder: Path, loss: float) -> float:
    """Count bytes another way: a character of a byte-level token stands for one byte, the end of a file for none."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "data" / "tokenizer")
    rows = Dataset.load_from_disk(str(folder / "data" / "validation"))["input_ids"]
    predicted = [token for row in rows for token in row[1:]]
    spelled = tokenizer.convert_ids_to_tokens([token for token in predicted if token != tokenizer.eos_token_id])
    return loss * len(predicted) / (math.log(2) * sum(map(len, spelled)))


def test_interrupted_and_resumed_run_ends_with_the_same_weights(finished: tuple[Path, str], tmp_path: Path) -> None:
    uninterrupted, _ = finished
    # not forked, so that what depends on the order of sets would differ, too
    process = start_example(tmp_path, SCRIPT, *TINY)
    interrupt_after_step(process, block="sas_p", step=4)
    output = finish_example(process, exit_code=130)
    assert "--resume_from_checkpoint" in output.splitlines()[-2]
    assert not (tmp_path / "run" / "sas_p" / "result.json").exists()

    output = finish_example(start_forked(tmp_path, SCRIPT, *TINY, "--resume_from_checkpoint"))
    assert "pre_ln at learning rate 0.001: already finished" in output
    for block in BLOCKS:
        expected = load_file(uninterrupted / block / "model.safetensors")
        weights = load_file(tmp_path / "run" / block / "model.safetensors")
        assert all((weights[name] - expected[name]).abs().max() <= 1e-6 for name in expected)
        losses, expected_losses = (
            [entry["eval_loss"] for entry in json.loads(file.read_text()) if "eval_loss" in entry]
            for file in (folder / block / "history.json" for folder in (tmp_path / "run", uninterrupted))
        )
        assert losses == pytest.approx(expected_losses, abs=1e-5)

    other_seed = start_forked(tmp_path, SCRIPT, *TINY, "--seed", "1", "--resume_from_checkpoint")
    assert "seed (was 42, now 1)" in finish_example(other_seed, exit_code=2)
    assert "already holds a run" in finish_example(start_forked(tmp_path, SCRIPT, *TINY), exit_code=2)


def interrupt_after_step(process: subprocess.Popen, block: str, step: int) -> None:
    reached_block = False
    for line in process.stdout:
        reached_block |= line.startswith(f"{block}: ")
        if reached_block and f"step {step:>6,}" in line:
            process.send_signal(signal.SIGINT)
            return
    process.kill()
    raise AssertionError(f"{block} never reached step {step}")


def test_own_text_file_and_learning_rate_grid(tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text("Ein Wort, naïve Größen; 日本語のテキスト.\n" * 400, encoding="utf-8")
    files = ["--train_file", "own.txt", "--block_size", "32", "--max_steps", "4", "--validation_split_percentage", "10"]
    grid = ["--blocks", "v_skipinit", "--learning_rate_grid", "1e-4,3e-3"]
    finish_example(start_forked(tmp_path, SCRIPT, *TINY_SHAPE, *files, *grid))
    folder = tmp_path / "run"
    result = json.loads((folder / "results.json").read_text())["blocks"]["v_skipinit"]
    assert [tried["learning_rate"] for tried in result["tried"]] == [1e-4, 3e-3]
    assert result["eval_loss"] == min(tried["eval_loss"] for tried in result["tried"])
    assert result["bits_per_byte"] == pytest.approx(bits_per_byte(folder, result["eval_loss"]), rel=0.02)
    assert "Learning rates tried" in (folder / "v_skipinit" / "README.md").read_text()


BAD_INPUTS = {
    "unknown block": (["--blocks", "pre_ln,sasp"], "'sasp'. Allowed: pre_ln, parallel"),
    "unknown config field": (["--config_overrides", "hiden_size=64"], "num_hidden_layers"),
    "wrong config value": (["--config_overrides", "hidden_size=wide"], "hidden_size"),
    "missing file": (["--train_file", "nowhere.txt"], "nowhere.txt: no such file"),
    "unknown option": (["--steps", "5"], "error: Unknown option --steps."),
    "no network": (["--dataset_name", "wikitext"], "--dataset_name wikitext could not be loaded"),
    "corpus too small": (["--train_file", "small.txt"], "fewer tokens than one block of --block_size 128"),
}


def test_bad_inputs_are_refused_with_a_reason(tmp_path: Path) -> None:
    processes = {}
    for name, (arguments, _) in BAD_INPUTS.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "small.txt").write_text("one\ntwo\n" * 10)
        processes[name] = start_forked(folder, SCRIPT, *arguments)
    outputs = {name: process.communicate(timeout=240)[0] for name, process in processes.items()}
    for name, output in outputs.items():
        assert processes[name].returncode == 2, output
        assert BAD_INPUTS[name][1] in output, name
        assert "Traceback" not in output, name
    assert not list(tmp_path.rglob("checkpoint-*"))
