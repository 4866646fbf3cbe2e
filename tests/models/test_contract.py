"""Run the family contract for every case of every family."""

from typing import Any

import pytest
import transformers
from families import BY_NAME, CASES
from models.contract import FamilyContract
from models.generation_contract import GenerationContract
from models_cases import parametrize_cases

import hf_efficient_attn as hea

# that are about masks and caches which all cases of a route get alike: what a case reads, and keeps, the others say
BY_ROUTE = (
    "test_padding_and_batch_mates_change_nothing",
    "test_four_dimensional_mask_equals_padding_mask",
    "test_cached_generation_equals_uncached",
    "test_cached_generation_equals_uncached_where_the_mask_has_holes",
    "test_cropped_cache_continues_exactly",
    "test_packed_documents_fill_a_static_cache",
    "test_future_tokens_do_not_leak",
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    is_generation = metafunc.cls is TestGenerationContract
    cases = [case for case in CASES if case.is_causal or not is_generation]
    parametrize_cases(metafunc, cases, metafunc.function.__name__ in BY_ROUTE)


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
