"""What training scripts refuse; tests/examples/test_copied_examples.py has the examples refuse it."""

from types import SimpleNamespace

import pytest
from datasets import Dataset, DatasetDict
from transformers import AutoConfig, BartConfig, BertConfig, LEDConfig, RobertaConfig, T5Config

from hf_efficient_attn.errors import InputError
from hf_efficient_attn.training.script_inputs import check_arguments, check_lengths, num_positions


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (BertConfig(max_position_embeddings=512), 512),
        (RobertaConfig(max_position_embeddings=514), 512),
        (BartConfig(max_position_embeddings=1024), 1024),
        (LEDConfig(max_encoder_position_embeddings=16384), 16384),
        (T5Config(), None),
        (AutoConfig.for_model("gpt2", n_positions=64), 64),
        (AutoConfig.for_model("sparse_transformer", max_position_embeddings=4096), 4096),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_positions_of_configs(config: object, expected: int | None) -> None:
    assert num_positions(config) == expected


def encoded(length: int) -> DatasetDict:
    return DatasetDict(train=Dataset.from_dict({"input_ids": [[0], [0] * length]}))


NO_LIMIT = SimpleNamespace(model_max_length=10**30)


def test_texts_are_as_long_as_the_model_reads() -> None:
    model = SimpleNamespace(config=BertConfig(max_position_embeddings=16, name_or_path="bert"))
    check_lengths(encoded(16), model, NO_LIMIT)
    with pytest.raises(InputError, match=r"^The longest text has 17 tokens, bert reads 16: make it longer by `hf-eff"):
        check_lengths(encoded(17), model, NO_LIMIT)
    check_lengths(encoded(17), SimpleNamespace(config=T5Config()), SimpleNamespace(model_max_length=16))


def test_targets_are_as_long_as_the_decoder_writes() -> None:
    model = SimpleNamespace(config=LEDConfig(max_decoder_position_embeddings=8, name_or_path="led"))
    check_lengths(encoded(20), model, NO_LIMIT, "max_source_length", 8)
    with pytest.raises(InputError, match="max_target_length"):
        check_lengths(encoded(20), model, NO_LIMIT, "max_source_length", 9)


def test_a_left_of_zero_is_allowed() -> None:
    args = SimpleNamespace(model_name_or_path=None, left=0, num_first=0)
    check_arguments(args)
    args.left = -3
    with pytest.raises(InputError, match=r"^--left -3: it must be at least 0\."):
        check_arguments(args)
