"""Run the contract of heads, inputs, dropout and training for every case of every family, encoder-decoders included."""

import pytest
import seq2seq_cases
from models.shared_contract import SharedContract
from models_cases import CASES, parametrize_cases


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrize_cases(metafunc, [*CASES, *seq2seq_cases.CASES])


class TestSharedContract(SharedContract): ...
