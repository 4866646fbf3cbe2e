"""Every numeric field of every config: numbers out of range, and other types, are refused with a sentence."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
from transformers import PreTrainedConfig

import hf_efficient_attn as hea
from hf_efficient_attn.errors import ConfigurationError

# one object for every number of this size, since Python does not write it
HUGE = 10**5000
CONFIGS = [
    config
    for config in vars(hea).values()
    if isinstance(config, type) and issubclass(config, PreTrainedConfig) and config.__module__.startswith(hea.__name__)
]


def numeric_fields() -> Iterator[tuple[type[PreTrainedConfig], str, list[str]]]:
    """Yield (config, name, types) of fields of our own that are a number, or a list of numbers."""
    for config in CONFIGS:
        own = {name for cls in config.__mro__ if cls.__module__.startswith(hea.__name__) for name in vars(cls)}
        for field in dataclasses.fields(config):
            text = getattr(field.type, "__name__", str(field.type))
            types = sorted({*text.replace("[", " ").replace("]", " ").replace("|", " ").split()})
            if field.name in own and {*types} <= {"int", "float", "None", "list"}:
                yield config, field.name, types


FIELDS = list(numeric_fields())


def put(value: Any, name: str) -> Any:
    """Return the value in the lists that the field wants around it."""
    return {"frozen_spans": [[value]], "rope_theta_per_layer": [value]}.get(name, value)


def test_all_configs_are_found() -> None:
    assert len(CONFIGS) == 11
    assert {("SparseTransformerConfig", "num_key_value_heads"), ("AdaptiveSpanConfig", "activation_dropout")} <= {
        (config.__name__, name) for config, name, _ in FIELDS
    }


@pytest.mark.parametrize(("config", "name", "types"), FIELDS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_numbers_out_of_range(config: type[PreTrainedConfig], name: str, types: list[str]) -> None:
    values: list[Any] = [10**18, -(10**18), HUGE, float("nan"), float("inf"), True, "1", [None], {}]
    values += [] if "None" in types else [None]
    values += [1.5, -0.5] if name.endswith("dropout") else []
    values += [0, 10**9] if name.endswith(("_layers", "_heads")) else []
    for value in values:
        with pytest.raises(ConfigurationError) as refusal:
            config(**{name: put(value, name)})
        assert len(str(refusal.value)) <= 500
        assert name in str(refusal.value)


@pytest.mark.parametrize("config", CONFIGS)
def test_heads_of_a_wide_model(config: type[PreTrainedConfig]) -> None:
    with pytest.raises(ConfigurationError, match="Nearest counts that do"):
        config(hidden_size=2**23, num_attention_heads=7)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.__name__)
def test_heads_that_do_not_rotate_may_have_an_odd_size(config: type[PreTrainedConfig]) -> None:
    assert config(hidden_size=20, num_attention_heads=4).head_dim == 5
