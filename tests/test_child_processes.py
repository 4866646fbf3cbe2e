"""Processes that tests start import what the tests do, wherever they run, also where the package is not installed."""

import subprocess
import sys
from pathlib import Path

import pytest
from distributed import run_script

import hf_efficient_attn

CODE = """
from importlib.util import find_spec
for name in ("hf_efficient_attn", "distributed"):
    print(find_spec(name).origin)
"""


def test_children_find_the_same_package_and_the_files_of_the_tests(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", CODE], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [hf_efficient_attn.__file__, str(Path(__file__).with_name("distributed.py"))]


@pytest.mark.parametrize(("code", "expected", "said"), [("'a sentence'", 1, "a sentence\n"), ("3", 3, ""), ("", 0, "")])
def test_scripts_exit_as_python_does(code: str, expected: int, said: str) -> None:
    done = run_script([sys.executable, "-c", f"raise SystemExit({code})"])
    assert (done.returncode, done.stderr) == (expected, said)
