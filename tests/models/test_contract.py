"""Run the family contract for every case of every family."""

import pytest
from models.contract import FamilyContract, GenerationContract
from models_cases import CASES, Case


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    is_generation = metafunc.cls is TestGenerationContract
    cases = [case for case in CASES if case.is_causal or not is_generation]
    if "auto_class" in metafunc.fixturenames:
        pairs = [(case, name) for case in cases for name in case.heads]
        ids = [f"{case.name}-{name.removeprefix('AutoModel') or 'Base'}" for case, name in pairs]
        metafunc.parametrize(("case", "auto_class"), pairs, ids=ids)
    elif "case" in metafunc.fixturenames:
        metafunc.parametrize("case", cases, ids=[case.name for case in cases])


class TestFamilyContract(FamilyContract): ...


class TestGenerationContract(GenerationContract): ...


def test_case_names_are_unique() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    assert all(isinstance(case, Case) for case in CASES)
