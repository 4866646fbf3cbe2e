"""Run the contract of heads, inputs, dropout and training for every case of every family, encoder-decoders included."""

import pytest
from families import CASES, SEQ2SEQ_CASES
from models.shared_contract import SharedContract
from models_cases import parametrize_cases


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrize_cases(metafunc, [*CASES, *SEQ2SEQ_CASES], others_are_thorough=True)


class TestSharedContract(SharedContract): ...


def test_case_names_are_unique() -> None:
    names = [case.name for case in [*CASES, *SEQ2SEQ_CASES]]
    assert len(set(names)) == len(names)
