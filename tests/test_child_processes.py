"""Processes that tests start import what the tests do, wherever they run, also where the package is not installed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hf_efficient_attn

CODE = """
from importlib.util import find_spec
for name in ("hf_efficient_attn", "torchrun"):
    print(find_spec(name).origin)
"""
FORKED = "import forked, json, sys; forked.run_to_the_end(json.loads(sys.argv[1]), None)"


def test_children_find_the_same_package_and_the_files_of_the_tests(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", CODE], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [hf_efficient_attn.__file__, str(Path(__file__).with_name("torchrun.py"))]


@pytest.mark.parametrize(("code", "expected", "said"), [("'a sentence'", 1, "a sentence\n"), ("3", 3, ""), ("", 0, "")])
def test_forked_scripts_exit_as_python_does(tmp_path: Path, code: str, expected: int, said: str) -> None:
    script, *files = (tmp_path / name for name in ("script.py", "stdout", "stderr"))
    script.write_text(f"raise SystemExit({code})")
    order = {"start": [script], "files": files, "folder": tmp_path, "environment": dict(os.environ)}
    done = subprocess.run([sys.executable, "-c", FORKED, json.dumps(order, default=str)], check=False)
    assert (done.returncode, files[1].read_text()) == (expected, said)
