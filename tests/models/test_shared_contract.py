"""Run the contract of heads, inputs, dropout and training for every case of every family, encoder-decoders included."""

from typing import Any

import pytest
from families import BY_NAME, CASES, SEQ2SEQ_CASES
from models.shared_contract import SharedContract
from models_cases import case_param, parametrize_cases


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    cases = [*CASES, *SEQ2SEQ_CASES]
    if "is_shared" in metafunc.fixturenames:
        routed = [case for case in cases if case.shows_a_route]
        ways = [
            case_param(
                case,
                is_shared,
                name=f"{case.name}-{'its config' if is_shared else 'a config around it'}",
                # families take turns
                is_thorough=case not in routed[is_shared::2],
            )
            for case in cases
            for is_shared in (True, False)
        ]
        metafunc.parametrize(("case", "is_shared"), ways)
    else:
        parametrize_cases(metafunc, cases, others_are_thorough=True)


class TestSharedContract(SharedContract): ...


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("sparse-longformer", "AutoModelForMultipleChoice"),
        ("seq2seq-led", "AutoModelForSequenceClassification"),
    ],
)
def test_heads_refuse_no_examples_and_no_tokens(name: str, head: str) -> None:
    """That read their inputs themselves: three axes, or a source as target."""
    contract: Any = TestSharedContract()
    contract.test_no_examples_and_no_tokens_are_refused(BY_NAME[name], head)


def test_case_names_are_unique() -> None:
    names = [case.name for case in [*CASES, *SEQ2SEQ_CASES]]
    assert len(set(names)) == len(names)
