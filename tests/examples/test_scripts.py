"""Every script of examples/ says what its options are."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from run_example import EXAMPLES

FILES = sorted([*EXAMPLES.glob("*.py"), *(EXAMPLES / "experiments").glob("*.py")])
SCRIPTS = [file for file in FILES if "__main__" in file.read_text(encoding="utf-8")]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_help(script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(script.parent))
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(script), run_name="__main__")
    assert stop.value.code in (0, None)
    printed = capsys.readouterr().out
    assert "usage:" in printed
    assert "--output_dir" in printed


def test_the_first_command_passes_its_arguments_on(tmp_path: Path) -> None:
    """`run.sh` with an environment that is there already; what the script makes of them, `test_help` says."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    # does as if everything were installed, and says what it is to run
    python.write_text('#!/bin/sh\ncase "$*" in *"-m pip"*|*"import torch"*) exit 0;; esac\necho run "$@"\n')
    python.chmod(0o755)
    done = subprocess.run(
        ["bash", EXAMPLES / "run.sh", "--help", "two words"],
        capture_output=True,
        text=True,
        env={**os.environ, "VENV": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    script, *given = done.stdout.splitlines()[-1].removeprefix("run ").split(maxsplit=1)
    assert EXAMPLES.parent / script in SCRIPTS
    assert given == ["--help two words"]
