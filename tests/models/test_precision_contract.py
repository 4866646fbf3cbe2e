"""Run the contract of mixed precision for every case of every family, encoder-decoders included."""

import pytest
import seq2seq_cases
from models.precision_contract import PrecisionCacheContract, PrecisionContract
from models_cases import CASES


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    decoders = [case for case in CASES if case.is_causal]
    cases = decoders if metafunc.cls is TestPrecisionCacheContract else [*CASES, *seq2seq_cases.CASES]
    if "auto_class" in metafunc.fixturenames:
        pairs = [(case, name) for case in cases for name in case.heads]
        ids = [f"{case.name}-{name.removeprefix('AutoModel') or 'Base'}" for case, name in pairs]
        metafunc.parametrize(("case", "auto_class"), pairs, ids=ids)
    elif "case" in metafunc.fixturenames:
        metafunc.parametrize("case", cases, ids=[case.name for case in cases])


class TestPrecisionContract(PrecisionContract): ...


class TestPrecisionCacheContract(PrecisionCacheContract): ...
