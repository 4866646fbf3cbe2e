"""Start an example as its users do, in a folder of its own and without a network."""

import json
import multiprocessing
import os
import runpy
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def start_example(folder: Path, script: str, *arguments: str) -> subprocess.Popen:
    """Start a script of `examples` with `--output_dir run`; it finds no package and no Hub."""
    words = [sys.executable, str(EXAMPLES / script), "--output_dir", "run", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(words, cwd=folder, env={**os.environ, **own_environment(folder)}, **pipes)


def own_environment(folder: Path) -> dict[str, str]:
    """Return the variables of the environment that an example is started with."""
    return {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_EFFICIENT_ATTN_CACHE": str(folder / "cache")}


class Forked:
    """An example in a process that has imported everything already: for those that refuse their input at once."""

    def __init__(self, folder: Path, script: str, arguments: tuple[str, ...]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["example_imports"])
        self.printed = folder / "printed.txt"
        self.process = context.Process(target=run_forked, args=(folder, script, arguments))
        self.process.start()

    def communicate(self, timeout: float) -> tuple[str, None]:
        """Return what it printed, once it has ended; as of `subprocess.Popen`."""
        self.process.join(timeout)
        return self.printed.read_text(), None

    @property
    def returncode(self) -> int | None:
        """Exit status; None: it runs."""
        return self.process.exitcode


def start_forked(folder: Path, script: str, *arguments: str) -> Forked:
    """Start an example as `start_example` does, in seconds less."""
    return Forked(folder, script, arguments)


def run_forked(folder: Path, script: str, arguments: tuple[str, ...]) -> None:
    """Run an example in this process, which is its own."""
    os.chdir(folder)
    os.environ.update(own_environment(folder))
    with open("printed.txt", "w") as printed:
        for stream in (1, 2):
            os.dup2(printed.fileno(), stream)
    sys.argv = [str(EXAMPLES / script), "--output_dir", "run", *arguments]
    sys.path.insert(0, str(EXAMPLES))
    runpy.run_path(sys.argv[0], run_name="__main__")


def finish_example(process: subprocess.Popen | Forked, exit_code: int = 0) -> str:
    """Return what it printed, once it has ended as expected."""
    output, _ = process.communicate(timeout=280)
    assert process.returncode == exit_code, output
    return output


def refusal(process: subprocess.Popen | Forked) -> str:
    """Return the one line by which it refused its input."""
    output = finish_example(process, exit_code=2)
    assert "Traceback" not in output, output
    (line,) = [line for line in output.splitlines() if line.startswith("error: ")]
    return line


def write_rows(file: Path, rows: list[dict]) -> None:
    """Write a .jsonl file."""
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
