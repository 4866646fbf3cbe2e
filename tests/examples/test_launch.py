"""Every file in examples/launch is one that accelerate reads, and means what it says; on CPUs as far as these go."""

import os
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
from accelerate import FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env
from distributed import start_script
from run_example import EXAMPLES, environment, finish_example, write_rows

# processes by name of the file
FILES = {"one_gpu": 1, "ddp": 2, "fsdp": 8, "fsdp_nodes": 16, "deepspeed": 2}
TINY = ["--max_train_samples", "16", "--max_steps", "2", "--logging_steps", "1", "--use_cpu"]
TINY += ["--train_file", "train.jsonl"]
# the shortest texts and a small model, in each example's own words
SMALL = {
    "run_clm": ["--block_size", "32", "--config_overrides", "hidden_size=24,num_hidden_layers=2"],
    "run_mlm": ["--max_seq_length", "32", "--model_type", "sparse_transformer"],
}


def launched(name: str, *words: str) -> Any:
    """Return what `accelerate launch` makes of a file, and of options that stand before the script."""
    arguments = ["--config_file", str(EXAMPLES / "launch" / f"{name}.yaml"), *words, str(EXAMPLES / "run_clm.py")]
    return _validate_launch_command(launch_command_parser().parse_args(arguments))[0]


def test_every_file_is_tested() -> None:
    assert {path.stem for path in (EXAMPLES / "launch").glob("*.yaml")} == FILES.keys()


@pytest.mark.parametrize("name", FILES)
def test_accelerate_reads_every_field(name: str) -> None:
    args = launched(name)
    assert (args.num_processes, args.mixed_precision) == (FILES[name], "bf16")
    assert args.use_fsdp is name.startswith("fsdp")
    assert args.use_deepspeed is (name == "deepspeed")
    assert args.num_machines == (2 if name == "fsdp_nodes" else 1)


@pytest.mark.parametrize("name", ["fsdp", "fsdp_nodes"])
def test_shards_are_of_layers_and_of_version_2(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in prepare_multi_gpu_env(launched(name)).items():
        monkeypatch.setenv(variable, value)
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2
    assert plugin.reshard_after_forward
    assert plugin.activation_checkpointing
    assert "FULL_STATE_DICT" in str(plugin.state_dict_type)
    assert "transformer_auto_wrap_policy" in str(plugin.auto_wrap_policy)
    if name == "fsdp_nodes":
        layout = ParallelismConfig()
        assert (layout.dp_replicate_size, layout.dp_shard_size) == (2, 8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With texts to train on."""
    words = ("the", "list", "of", "a", "file", "path", "returns", "opens", "value")
    texts = [" ".join(Random(number).choices(words, k=60)) for number in range(40)]
    write_rows(tmp_path / "train.jsonl", [{"text": text} for text in texts])
    return tmp_path


def test_one_process_trains(folder: Path) -> None:
    args = launched("one_gpu")
    args.training_script_args = ["--output_dir", "run", *TINY, *SMALL["run_clm"]]
    command, variables = prepare_simple_launcher_cmd_env(args)
    process = start_script(command, folder / "printed.txt", folder, {**environment(folder), **variables})
    assert finish_example(process).count("'grad_norm'") == 2


@pytest.mark.neighbours
@pytest.mark.parametrize("name", ["ddp", "fsdp", "deepspeed"])
def test_two_processes_train(name: str, folder: Path) -> None:
    """As from a shell; with `--use_cpu` on CPUs, where accelerate makes DDP of FSDP, and DeepSpeed an operator."""
    if name == "deepspeed":
        pytest.importorskip("deepspeed")
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", EXAMPLES / "launch" / f"{name}.yaml"]
    command = [*launch, "--num_processes", "2", EXAMPLES / "run_clm.py", "--output_dir", "run", *TINY]
    command += [*SMALL["run_clm"], *(["--bf16"] if name == "deepspeed" else [])]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **environment(folder)}, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("'grad_norm'") == 2
    assert (folder / "run" / "model.safetensors").exists()
