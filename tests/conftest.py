"""Shared by all tests: one thread per process, since tiny models on many threads mostly wait for each other."""

import importlib.util
import os
from pathlib import Path

import torch

torch.set_num_threads(1)


def _let_children_find_the_same() -> None:
    """Let processes that tests start import this package, also where it is not installed, and what lies in tests/."""
    package = importlib.util.find_spec("hf_efficient_attn")
    assert package is not None
    assert package.origin is not None
    wanted = [str(Path(package.origin).parents[1]), str(Path(__file__).parent)]
    known = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    os.environ["PYTHONPATH"] = os.pathsep.join([*known, *(path for path in wanted if path not in known)])


_let_children_find_the_same()
