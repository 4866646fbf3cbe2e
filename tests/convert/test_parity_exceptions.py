"""Inputs for which outputs differ even with `parity`: those that are listed, for the types listed, and no others."""

import copy
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from in_tree_models import FIELDS, in_tree, inputs_of, largest_difference

import hf_efficient_attn as hea
from hf_efficient_attn.convert import compare
from hf_efficient_attn.convert.registry import COUNTERPARTS

TOKENS = 61

pytestmark = pytest.mark.filterwarnings("ignore:Left out, because sparse")


@cache
def converted(model_type: str, head: str) -> tuple[Any, Any]:
    """Return a model and what it is converted to, which computes the same but for what is noted."""
    theirs = in_tree(model_type, head)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = hea.convert(theirs, parity=True)
    [note] = [str(each.message) for each in caught if "Even with parity" in str(each.message)]
    assert all(exception in note for exception in compare.EXCEPTIONS[model_type])
    assert largest_difference(theirs, ours, inputs_of(model_type, head, TOKENS)) < 1e-5
    return theirs, ours


def differs(model_type: str, change: Callable[[Any, dict[str, torch.Tensor]], None], head: str = "AutoModel") -> bool:
    """Return whether outputs differ for inputs that `change` has changed; it may call the model of transformers."""
    theirs, ours = copy.deepcopy(converted(model_type, head))
    inputs = inputs_of(model_type, head, TOKENS)
    change(theirs, inputs)
    difference = largest_difference(theirs, ours, inputs)
    assert difference < 1e-5 or difference > 1e-3
    return difference > 1e-3


def pad(inputs: dict[str, torch.Tensor], first: int, last: int) -> None:
    inputs["input_ids"][0, first:last] = 1
    inputs["attention_mask"][0, first:last] = 0


def padding_before(theirs: Any, inputs: dict[str, torch.Tensor]) -> None:
    pad(inputs, 0, 17)


def padding_between(theirs: Any, inputs: dict[str, torch.Tensor]) -> None:
    pad(inputs, 5, 17)


def padding_behind(theirs: Any, inputs: dict[str, torch.Tensor]) -> None:
    pad(inputs, TOKENS - 17, TOKENS)


def pad_ids(theirs: Any, inputs: dict[str, torch.Tensor]) -> None:
    inputs["input_ids"][0, -17:] = 1


def after_a_short_input(theirs: Any, inputs: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        theirs(**inputs_of(theirs.config.model_type, "AutoModel", 20))


def without_token_types(theirs: Any, inputs: dict[str, torch.Tensor]) -> None:
    inputs.pop("token_type_ids", None)


@pytest.mark.parametrize(
    ("change", "exceptions"),
    [
        (padding_before, {compare.PADDING_BEFORE, compare.PADDED}),
        (padding_between, {compare.PADDING_BEFORE, compare.PADDING_BETWEEN, compare.PADDED}),
        (padding_behind, {compare.SHORTER, compare.PADDED}),
        (pad_ids, {compare.PAD_IDS}),
        (after_a_short_input, {compare.AFTER_SHORT}),
    ],
)
@pytest.mark.parametrize("model_type", FIELDS)
def test_outputs_differ_where_it_is_said(model_type: str, change: Any, exceptions: set[str]) -> None:
    assert differs(model_type, change) == bool(exceptions & set(compare.EXCEPTIONS[model_type]))


@pytest.mark.parametrize("model_type", [name for name in FIELDS if "QuestionAnswering" in COUNTERPARTS[name].heads])
def test_token_types(model_type: str) -> None:
    found = differs(model_type, without_token_types, "AutoModelForQuestionAnswering")
    assert found == (compare.TOKEN_TYPES in compare.EXCEPTIONS[model_type])


def test_every_type_is_listed() -> None:
    """And the card, to which the help of the command points, has a row for each exception."""
    assert compare.EXCEPTIONS.keys() == COUNTERPARTS.keys() == FIELDS.keys()
    card = (Path(__file__).parents[2] / "model_cards" / "sparse_transformer.md").read_text(encoding="utf-8")
    for exception in {each for exceptions in compare.EXCEPTIONS.values() for each in exceptions}:
        types = [f"`{name}`" for name, exceptions in compare.EXCEPTIONS.items() if exception in exceptions]
        assert f"\n| {exception} | {', '.join(types)} |\n" in card


@pytest.mark.parametrize(
    "model_type", [name for name, each in COUNTERPARTS.items() if "TokenClassification" in each.heads]
)
def test_pooled_padding(model_type: str) -> None:
    found = differs(model_type, padding_before, "AutoModelForSequenceClassification")
    listed = {compare.PADDING_BEFORE, compare.POOLED_PADDING, compare.PADDED} & set(compare.EXCEPTIONS[model_type])
    assert found == bool(listed)


def test_what_is_not_compared_is_said() -> None:
    theirs = in_tree("longformer", attention_window=8)
    for asked, reason in {"pattern": "another pattern", "attention_window": "another window"}.items():
        value = "band(2, 2)" if asked == "pattern" else 4
        with pytest.warns(
            UserWarning, match=f"Outputs were not compared with the source's, because the result has {reason}"
        ):
            hea.convert(theirs, parity=True, **{asked: value})
    with pytest.warns(UserWarning, match=r"Compared .*: last_hidden_state differs by .* on 78 random tokens\."):
        hea.convert(theirs, parity=True)
