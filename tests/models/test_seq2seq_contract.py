"""Run the encoder-decoders' contract for every case of every family."""

import pytest
from families import SEQ2SEQ_CASES as CASES
from models.seq2seq_contract import Seq2SeqContract, Seq2SeqGenerationContract
from models_cases import parametrize_cases

# which are about caches and batches, which all cases of a route get alike: what a case keeps, the others say
BY_ROUTE = (
    "test_assisted_generation_equals_greedy",
    "test_batch_mates_change_nothing",
    "test_cache_made_by_the_caller_is_used",
    "test_cached_generation_equals_uncached",
    "test_prompts_padded_on_the_left_generate_the_same",
    "test_offloaded_layers_compute_the_same",
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrize_cases(metafunc, CASES, metafunc.function.__name__ in BY_ROUTE)


class TestSeq2SeqContract(Seq2SeqContract): ...


class TestSeq2SeqGenerationContract(Seq2SeqGenerationContract): ...
