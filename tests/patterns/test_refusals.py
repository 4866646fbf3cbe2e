"""What patterns refuse, with sentences: other values, heads that are not there, lengths not said."""

from typing import Any

import pytest
import torch
from transformers import BertConfig

from hf_efficient_attn import attention, explain, sparsify
from hf_efficient_attn.errors import ConfigurationError, InputError
from hf_efficient_attn.patterns import (
    Band,
    Blocks,
    Complement,
    GlobalTokens,
    Intersection,
    Pattern,
    PerHead,
    RandomBlocks,
    SpanTree,
    Union,
    bigbird,
)
from hf_efficient_attn.patterns.intervals import Intervals


@pytest.mark.parametrize("pattern", [RandomBlocks(1, 4), bigbird(4, 1), SpanTree(2), GlobalTokens([-1])])
def test_unresolved_patterns_say_so(pattern: Pattern) -> None:
    assert pattern.depends_on_length
    for call in (
        lambda: pattern.allowed(0, 0),
        lambda: pattern.key_intervals(0, 3, 8),
        lambda: pattern.num_pairs(8, 8),
    ):
        with pytest.raises(ConfigurationError, match="resolve\\(num_keys\\)"):
            call()


@pytest.mark.parametrize("bad", [(), [1], Band, "band"])
def test_compositions_refuse_what_is_no_pattern(bad: object) -> None:
    for make in (Union, Intersection, PerHead, Complement, lambda value: Blocks(value, 4)):
        with pytest.raises(ConfigurationError):
            make(bad)


class WithoutKind(Pattern):
    """As a newcomer writes a pattern."""

    def allowed(self, query: Any, key: Any) -> Any:
        return query == key

    def key_intervals(self, first_query: int, last_query: int, num_keys: int) -> Intervals:
        return ((first_query, last_query + 1),)


def test_a_class_without_a_kind_is_told_of_key_tables() -> None:
    states = torch.zeros(1, 1, 4, 8)
    for use in (
        lambda: WithoutKind() | Band(1, 1),
        lambda: ~WithoutKind(),
        lambda: PerHead([WithoutKind()]),
        lambda: WithoutKind().to_dict(),
        lambda: attention(states, states, states, WithoutKind()),
        lambda: explain(WithoutKind(), 64),
        lambda: sparsify(BertConfig(), WithoutKind()),
    ):
        with pytest.raises(ConfigurationError, match=r"WithoutKind is a subclass of Pattern without a kind.*KeyTable"):
            use()


@pytest.mark.parametrize("head", [-1, -3, 2**16, 1.0, True, None])
@pytest.mark.parametrize("pattern", [Band(1, 0), PerHead([Band(1, 0), Band(3, 0)])], ids=lambda each: each.kind)
def test_heads_that_no_model_has_are_refused(pattern: Pattern, head: Any) -> None:
    with pytest.raises(InputError, match="head is .* it must be an integer from 0 to 65535"):
        pattern.draw(4, head=head)


def test_a_head_beyond_those_of_the_model_is_refused() -> None:
    with pytest.raises(InputError, match="head is 2; it must be an integer from 0 to 1, of 2 heads"):
        PerHead([Band(1, 0), Band(3, 0)]).resolve(4, head=2, num_heads=2)
