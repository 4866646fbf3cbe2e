"""Arguments that there are not, of other attention functions or misspelt, are refused with the word to write."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hf_efficient_attn as hea
from hf_efficient_attn.patterns import Band

X = torch.randn(1, 2, 8, 4)
GIVEN = {hea.attention: (X, X, X, Band(1, 1)), hea.explain: (Band(1, 1),), hea.join_attention: ([(X, X[..., 0])],)}
CASES = [
    (hea.attention, "attention_mask", "For padding, use key_mask=mask.bool"),
    (hea.attention, "is_causal", "Give a causal pattern"),
    (hea.attention, "qery_offset", "Allowed are: q, k, .* Did you mean 'query_offset'?"),
    (hea.explain, "is_causal", "Give a causal pattern"),
    (hea.explain, "dropout_p", "Use dropout.$"),
    (hea.explain, "num_key_value_heads", ".* Did you mean 'num_key_heads'?"),
    # these have none of what would be written instead
    (hea.explain, "attention_mask", "Allowed are: what, query_tokens, .*, chosen.$"),
    (hea.join_attention, "dropout_p", "Allowed are: parts.$"),
]


@pytest.mark.parametrize(("function", "name", "answer"), CASES)
def test_refusals(function: Callable[..., Any], name: str, answer: str) -> None:
    with pytest.raises(hea.InputError, match=f"There is no argument {name!r}. {answer}"):
        function(*GIVEN[function], **{name: 1})


@pytest.mark.parametrize(
    ("name", "answer"),
    [pytest.param(*case[1:], marks=[pytest.mark.thorough] * (number < 2)) for number, case in enumerate(CASES[:3])],
)
def test_compilers_repeat_them(name: str, answer: str) -> None:
    torch.compiler.reset()
    compiled = torch.compile(hea.attention, fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match=f"There is no argument {name!r}. {answer}"):
        compiled(*GIVEN[hea.attention], **{name: 1})
