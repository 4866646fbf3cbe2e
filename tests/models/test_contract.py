"""Run the family contract for every case of every family."""

import pytest
from models.contract import FamilyContract, GenerationContract
from models_cases import CASES, Case, parametrize_cases


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    is_generation = metafunc.cls is TestGenerationContract
    cases = [case for case in CASES if case.is_causal or not is_generation]
    parametrize_cases(metafunc, cases)


class TestFamilyContract(FamilyContract): ...


class TestGenerationContract(GenerationContract): ...


def test_case_names_are_unique() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    assert all(isinstance(case, Case) for case in CASES)
