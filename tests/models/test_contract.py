"""Run the family contract for every case of every family."""

from typing import Any

import pytest
import transformers
from families import BY_NAME, CASES
from models.contract import FamilyContract
from models.generation_contract import GenerationContract
from models_cases import parametrize_cases

import hf_efficient_attn as hea


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    is_generation = metafunc.cls is TestGenerationContract
    cases = [case for case in CASES if case.is_causal or not is_generation]
    parametrize_cases(metafunc, cases)


class TestFamilyContract(FamilyContract): ...


class TestGenerationContract(GenerationContract): ...


@pytest.mark.filterwarnings("ignore:output_attentions=True")
def test_compiled_steps_in_a_static_cache_return_weights() -> None:
    """Of one case; of the others it is thorough."""
    contract: Any = TestGenerationContract()
    contract.test_compiled_steps_in_a_static_cache_compute_what_eager_ones_do(BY_NAME["simplified-pre_ln"], True)


def test_import_again_registers_nothing_new() -> None:
    before = len(transformers.AutoModel._model_mapping)
    hea.register_families()
    assert len(transformers.AutoModel._model_mapping) == before
