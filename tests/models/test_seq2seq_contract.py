"""Run the encoder-decoders' contract for every case of every family."""

import pytest
from models.seq2seq_contract import Seq2SeqContract, Seq2SeqGenerationContract
from seq2seq_cases import CASES


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "auto_class" in metafunc.fixturenames:
        pairs = [(case, name) for case in CASES for name in case.heads]
        ids = [f"{case.name}-{name.removeprefix('AutoModel') or 'Base'}" for case, name in pairs]
        metafunc.parametrize(("case", "auto_class"), pairs, ids=ids)
    elif "case" in metafunc.fixturenames:
        metafunc.parametrize("case", CASES, ids=[case.name for case in CASES])


class TestSeq2SeqContract(Seq2SeqContract): ...


class TestSeq2SeqGenerationContract(Seq2SeqGenerationContract): ...


def test_case_names_are_unique() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
