"""Run the contract of mixed precision for every case of every family, encoder-decoders included."""

import pytest
from families import CASES, SEQ2SEQ_CASES
from models.precision_contract import PrecisionCacheContract, PrecisionContract
from models_cases import parametrize_cases


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    decoders = [case for case in CASES if case.is_causal]
    cases = decoders if metafunc.cls is TestPrecisionCacheContract else [*CASES, *SEQ2SEQ_CASES]
    parametrize_cases(metafunc, cases, others_are_thorough=True)


class TestPrecisionContract(PrecisionContract): ...


class TestPrecisionCacheContract(PrecisionCacheContract): ...
