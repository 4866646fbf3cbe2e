"""Run the family contract for every case of every family."""

from typing import Any

import pytest
import torch
import transformers
from families import BY_NAME, CASES
from models.contract import FamilyContract
from models.generation_contract import GenerationContract
from models_cases import case_param, parametrize_cases

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


# what is the same of each case of a family, except of those that choose keys by content
BY_FAMILY, CHOOSING = ("test_rounding_of_projections_decides_nothing",), ("reformer", "routing")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function.__name__ in BY_FAMILY:
        first = {case.config_class: case for case in reversed(CASES)}
        often = [case for case in CASES if case in first.values() or case.name.startswith(CHOOSING)]
        metafunc.parametrize("case", [case_param(case, is_thorough=case not in often) for case in CASES])
        return
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


# compiling flex meets deprecations inside torch itself
@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:flex_attention called without:UserWarning")
def test_our_flex_compiles_in_a_model() -> None:
    """As it does alone: `tests/backends/test_contract.py`."""
    torch._dynamo.reset()
    TestFamilyContract().compare_kernels(BY_NAME["sparse-longformer"], "flex_attention")


def test_import_again_registers_nothing_new() -> None:
    before = len(transformers.AutoModel._model_mapping)
    hea.register_families()
    assert len(transformers.AutoModel._model_mapping) == before
