"""Start an example as its users do, in a folder of its own and without a network."""

import json
import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def start_example(folder: Path, script: str, *arguments: str) -> subprocess.Popen:
    """Start a script of `examples` with `--output_dir run`; it finds no package and no Hub."""
    words = [sys.executable, str(EXAMPLES / script), "--output_dir", "run", *arguments]
    own = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_EFFICIENT_ATTN_CACHE": str(folder / "cache")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(words, cwd=folder, env={**os.environ, **own}, **pipes)


def finish_example(process: subprocess.Popen, exit_code: int = 0) -> str:
    """Return what it printed, once it has ended as expected."""
    output, _ = process.communicate(timeout=280)
    assert process.returncode == exit_code, output
    return output


def refusal(process: subprocess.Popen) -> str:
    """Return the one line by which it refused its input."""
    output = finish_example(process, exit_code=2)
    assert "Traceback" not in output, output
    (line,) = [line for line in output.splitlines() if line.startswith("error: ")]
    return line


def write_rows(file: Path, rows: list[dict]) -> None:
    """Write a .jsonl file."""
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
