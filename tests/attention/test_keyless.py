"""Queries without keys, of which users are warned: the first is found, and looked for in short time."""

import pytest
from attention_models import build

import hf_efficient_attn as hea
from hf_efficient_attn.attention import build_call
from hf_efficient_attn.integration.layer_patterns import causal_form
from hf_efficient_attn.patterns import Band, BlockLocal, Dilated, GlobalTokens, KeyTable, Pattern, PerHead, intervals

PATTERNS: list[Pattern] = [
    Band(-1, 3),
    Band(2, -1),
    Band(3, 0),
    Band(-1, -1),
    Dilated(6, -1, 3),
    ~Band(2, 2),
    ~Band(None, 4),
    Dilated(None, -1, 2) & ~Band(4, 4),
    BlockLocal(4) & Band(-1, 3),
    Dilated(-1, 9, 9) | Band(9, -1),
]


def test_the_first_is_found() -> None:
    for pattern in PATTERNS:
        for start in (0, 1, 5):
            keyless = [q for q in range(start, 12) if not any(pattern.allowed(q, k) for k in range(12))]
            assert build_call.first_keyless(pattern, start, 11, 12) == (keyless or [None])[0]


ALONE = KeyTable([[query] for query in range(20_000)])


@pytest.mark.parametrize("pattern", [Dilated(None, None, 2), Dilated(None, None, 2) & ALONE], ids=["alike", "unlike"])
def test_looked_for_in_short_time(pattern: Pattern, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of a dilated pattern without limits has a span for every second key, and there are as many rows."""
    looks, intervals_of = [], Dilated.key_intervals

    def counted(*args: int) -> object:
        looks.append(intervals_of(*args))  # type: ignore[arg-type]
        return looks[-1]

    monkeypatch.setattr(Dilated, "key_intervals", counted)
    build_call.warn_of_keyless.function(pattern, 1, 20_000, 0)
    assert sum(map(len, looks)) < intervals.MAX_STEPS


def test_heads_that_a_causal_layer_leaves_alone_are_named(recwarn: pytest.WarningsRecorder) -> None:
    build_call.warn_once.cache_clear()
    # they read themselves alone anyway, tokens before them, or nothing, of which others warn
    for pattern in (Band(0, 0), Band(1, 3), Band(0, 3) | GlobalTokens([0]), Band(-1, 3)):
        causal_form(pattern)
    assert not recwarn
    with pytest.warns(UserWarning, match=r"has Dilated\(left=0, right=9, step=3\), .*attends only to itself"):
        hea.sparsify(build("llama"), PerHead([Band(3, 0), Dilated(0, 9, 3)]))
