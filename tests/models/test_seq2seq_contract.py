"""Run the encoder-decoders' contract for every case of every family."""

import pytest
from families import SEQ2SEQ_CASES as CASES
from models.seq2seq_contract import Seq2SeqContract, Seq2SeqGenerationContract
from models_cases import parametrize_cases


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrize_cases(metafunc, CASES)


class TestSeq2SeqContract(Seq2SeqContract): ...


class TestSeq2SeqGenerationContract(Seq2SeqGenerationContract): ...
