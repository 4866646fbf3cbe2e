"""Shared by all tests: one thread per process, since tiny models on many threads mostly wait for each other."""

import gc
import importlib.util
import os
from collections.abc import Generator
from functools import cache
from pathlib import Path
from typing import Any

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
# new files for a copy of the package, see test_extension.py
collect_ignore = ["extension"]
if not torch.cuda.is_available():
    collect_ignore += ["backends/test_flex_on_cuda.py", "models/test_contract_on_cuda.py"]


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


@pytest.fixture
def capability() -> Any:
    """Return the function by which a test says what a family can do with a neighbour, see capabilities.py.

    Imported here, with all families: the process that deals out the tests needs none of them.
    """
    from capabilities import capability

    return capability


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that fill the table of neighbours; put first what takes longest, lest one worker ends alone."""
    items.sort(key=lambda item: not _makes_something_once(item.path))
    for item in items:
        if "capability" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.capability)


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


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let the tests of a file that makes something once for all of them run in one worker, so that it is made once.

    Of other files, the cases of a function: to deal out thousands of them one by one takes seconds.
    """
    from xdist.scheduler import LoadScopeScheduling

    class BySharedFixtures(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return file if _makes_something_once(config.rootpath / file) else nodeid.partition("[")[0]

    # in the order of the tests, not those with most cases first
    config.option.loadscopereorder = False
    return BySharedFixtures(config, log)


@cache
def _makes_something_once(file: Path) -> bool:
    return 'scope="module"' in file.read_text()
