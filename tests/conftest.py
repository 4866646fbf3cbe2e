"""Shared by all tests: one thread per process, since tiny models on many threads mostly wait for each other."""

import gc
import importlib.util
import os
from collections.abc import Generator
from pathlib import Path

import pytest
import torch
from _pytest.doctest import DoctestModule
from hypothesis import HealthCheck, settings

# until all is imported and collected
gc.disable()
torch.set_num_threads(1)
# a busy machine draws examples slowly, which is no fault of what is tested
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")
# the costs of one machine everywhere, so that tests compute alike on all
os.environ["HF_EFFICIENT_ATTN_MACHINES"] = str(Path(__file__).with_name("machines.json"))
if not torch.cuda.is_available():
    collect_ignore = ["backends/test_flex_on_cuda.py", "models/test_contract_on_cuda.py"]


def _let_children_find_the_same() -> None:
    """Let processes that tests start import this package, also where it is not installed, and what lies in tests/."""
    package = importlib.util.find_spec("hf_efficient_attn")
    assert package is not None
    assert package.origin is not None
    wanted = [str(Path(package.origin).parents[1]), str(Path(__file__).parent)]
    known = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    os.environ["PYTHONPATH"] = os.pathsep.join([*known, *(path for path in wanted if path not in known)])


_let_children_find_the_same()


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Leave out doctests, of which there are none here: to look for them, scripts would be imported, which act then."""
    return [each for each in (yield) if not isinstance(each, DoctestModule)]


@pytest.fixture
def machine_anew() -> Generator[None]:
    """Let a test find the machine and its costs anew, and the tests behind it, too."""
    from hf_efficient_attn.backends import machine_costs

    machine_costs._found.cache_clear()
    yield
    machine_costs._found.cache_clear()


@pytest.fixture(scope="session")
def thorough(pytestconfig: pytest.Config) -> list[str]:
    """What scripts are told beside their folder: "thorough" where tests that are marked so may be run."""
    return [] if "not thorough" in pytestconfig.option.markexpr else ["thorough"]


def pytest_collection_finish() -> None:
    """Leave what has been imported and collected out of garbage collections: every training of Trainer asks for one.

    Python's own come seldom: what tests import later would be searched over and over, a twentieth of the time.
    """
    gc.freeze()
    gc.enable()
    gc.set_threshold(50_000, 20, 100)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None]:
    """Leave what the tests of a file have kept, such as what was compiled, out of the garbage collections of others."""
    yield
    if nextitem is not None and item.path != nextitem.path:
        gc.collect()
        gc.freeze()
