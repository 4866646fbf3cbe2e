"""Pairs of long patterns are counted by closed forms and ranges, not one by one."""

import pytest

from hf_efficient_attn.errors import InputError
from hf_efficient_attn.patterns import Band, BlockLocal, Blocks, Causal, Dilated, Full, GlobalTokens, Strided, intervals


def test_long_counts_are_closed_forms() -> None:
    tokens = 131_072
    assert Band(256, 256).num_pairs(tokens, tokens) == tokens * 513 - 256 * 257
    assert GlobalTokens([0, -1]).resolve(tokens).num_pairs(tokens, tokens) == 4 * tokens - 4
    assert BlockLocal(64).num_pairs(tokens, tokens) == 64 * tokens


def test_long_compositions_are_counted_by_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = 1 << 20
    band = tokens * 129 - 64 * 65
    # a global token reads and is read by all, but for the 129 of its own row and column that the band has, and itself
    inner = 2 * (tokens - 129)
    expected = {
        Full(): tokens**2,
        Strided(8): tokens * tokens // 8,
        ~Band(64, 64): tokens**2 - band,
        Band(64, 64) | GlobalTokens([500]): band + inner,
        ~(Band(64, 64) | GlobalTokens([500])): tokens**2 - band - inner,
        (Band(64, 64) | GlobalTokens([500])) & Causal(): (band + tokens + inner) // 2,
        Blocks(Band(1, 1), 64) | GlobalTokens([128]): (3 * tokens - 128) * 64 + 2 * (tokens - 192),
        Dilated(640, 640, 320) | GlobalTokens([5000]): 5 * tokens - 1920 + 2 * (tokens - 5),
    }
    assert {pattern: pattern.num_pairs(tokens, tokens) for pattern in expected} == expected
    assert Full().num_pairs(2**31 - 1, 2**31 - 1) == (2**31 - 1) ** 2
    monkeypatch.setattr(intervals, "MAX_STEPS", 1000)
    with pytest.raises(InputError, match=r"union pattern would take more than 1,000 steps.*explain"):
        (Strided(8) | GlobalTokens([0])).num_pairs(900, 900)
