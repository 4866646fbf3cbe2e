"""Every file in examples/launch is one that accelerate reads, and means what it says; on CPUs as far as these go."""

import json
import os
import re
import socket
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
from safetensors.torch import load_file

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
@pytest.mark.parametrize("example", SMALL)
def test_two_processes_train_in_shards(example: str, folder: Path) -> None:
    """As from a shell, with accelerate told that there were GPUs: weights and optimizer are in shards and all learn."""
    script = [Path(__file__).parent / "fsdp_on_cpus.py", folder, f"{example}.py"]
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", EXAMPLES / "launch" / "fsdp.yaml"]
    command = [*launch, "--num_processes", "2", *script, "--output_dir", "run", *TINY, *SMALL[example]]
    # the first step has no learning rate yet, and queries of simplified blocks begin with zeros
    command += ["--max_steps", "3"]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **environment(folder)}, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        report = json.loads((folder / f"shards_{rank}.json").read_text())
        assert set(report["in_shards"]) == {"DTensor"}
        assert all(report["is_held"])
        assert min(report["moved"]) > 0
        # as in `optimizer_groups`: not all weights decay
        assert 0.0 in report["decays"]
    saved = load_file(folder / "run" / "model.safetensors")
    assert all(each.isfinite().all() for each in saved.values())


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


@pytest.mark.neighbours
@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        # the sixteen processes of the file are missed once both machines have met
        ((), "Mesh should not be bigger than default world size 2, but found 16 ranks"),
        # as many as there are: accelerate has no such layout for CPUs
        (
            ("--parallelism_config_dp_replicate_size", "1", "--parallelism_config_dp_shard_size", "2"),
            "ParallelismConfig is only compatible DistributedType.FSDP .* but got DistributedType.MULTI_CPU",
        ),
    ],
)
def test_two_machines_meet(sizes: tuple[str, ...], message: str, folder: Path) -> None:
    """Two launches as on two machines, over loopback; on CPUs they go as far as the mesh."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = ["--main_process_ip", "127.0.0.1", "--main_process_port", str(free.getsockname()[1])]
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", *address, *sizes]
    launch += ["--config_file", EXAMPLES / "launch" / "fsdp_nodes.yaml"]
    script = [EXAMPLES / "run_clm.py", "--output_dir", "run", *TINY, *SMALL["run_clm"]]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    variables = {**os.environ, **environment(folder)}
    machines = [
        subprocess.Popen([*launch, "--machine_rank", str(rank), *script], cwd=folder, env=variables, **pipes)
        for rank in range(2)
    ]
    try:
        printed = [machine.communicate(timeout=280)[0] for machine in machines]
    finally:
        for machine in machines:
            machine.kill()
    for rank, each in enumerate(printed):
        assert re.search(rf"\[rank{rank}\]: \w+Error: {message}", each), each
