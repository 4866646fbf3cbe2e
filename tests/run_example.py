"""Start an example as its users do, in a folder of its own and without a network."""

import json
import os
import subprocess
import sys
from pathlib import Path

from distributed import Script, start_script

EXAMPLES = Path(__file__).parents[1] / "examples"


def start_example(folder: Path, script: str, *arguments: str) -> subprocess.Popen:
    """Start a script of `examples` with `--output_dir run`; it finds no package and no Hub."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command(script, arguments), cwd=folder, env=environment(folder), **pipes)


def start_forked(folder: Path, script: str, *arguments: str) -> Script:
    """Start an example as `start_example` does, in seconds less."""
    return start_script(command(script, arguments), folder / "printed.txt", folder, environment(folder))


def command(script: str, arguments: tuple[str, ...]) -> list[str]:
    return [sys.executable, str(EXAMPLES / script), "--output_dir", "run", *arguments]


def environment(folder: Path) -> dict[str, str]:
    own = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    return {**os.environ, **own, "HF_EFFICIENT_ATTN_CACHE": str(folder / "cache")}


def finish_example(process: subprocess.Popen | Script, exit_code: int = 0) -> str:
    """Return what it printed, once it has ended as expected."""
    output, _ = process.communicate(timeout=280)
    assert process.returncode == exit_code, output
    return output


def refusal(process: subprocess.Popen | Script) -> str:
    """Return the sentence by which it refused its input."""
    output = finish_example(process, exit_code=1)
    assert "Traceback" not in output, output
    return output.strip().splitlines()[-1]


def write_rows(file: Path, rows: list[dict]) -> None:
    """Write a .jsonl file."""
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
