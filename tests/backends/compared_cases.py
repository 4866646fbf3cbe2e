"""The cases on which backends are compared with `reference`, in lists by what they vary."""

import torch
from backends_cases import BOTH_SIDES, GRID, MEMORY, PATTERNS, SPAN_TREE, Case

from hf_efficient_attn.layout.score_terms import Distance, InterleavedRelation, Slope, SoftSpan, SpanRelation

TREE_TOKENS, TREE_POSITIONS = 64, 127
GRID_TOKENS = 101
SOFT_SPAN = SoftSpan(ramp=20, num_inner=5)
LENGTHS = (1, 2, 63, 64, 65, 127, 340, 256)
MASKS = ("none", "left", "right", "holes", "documents", "globals")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# query heads, key heads
HEADS = ((2, 2), (4, 2), (6, 1))


def pairwise_cases() -> list[Case]:
    """Return cases in which every pattern meets every length, mask, dtype and number of heads, and not all at once."""
    cases = []
    for number, pattern in enumerate(PATTERNS):
        for turn, num_keys in enumerate(LENGTHS):
            mask = MASKS[(number + turn) % len(MASKS)]
            dtype = DTYPES[(number + 2 * turn + turn // 3) % len(DTYPES)]
            cases.append(Case(pattern, num_keys, mask, dtype, HEADS[(number // 2 + turn) % len(HEADS)]))
    # what longer texts have more of is blocks
    longer = (("band", 530, "left"), ("random", 530, "documents"), ("causal", 512, "holes"), ("key table", 530, "none"))
    return cases + [Case(*each, DTYPES[turn % len(DTYPES)]) for turn, each in enumerate(longer)]


def in_turns(*masks: str) -> list[tuple[str, str]]:
    """Return every pattern with one of the masks, which take turns; lengths meet all of them in `pairwise_cases`."""
    return [(pattern, masks[number % len(masks)]) for number, pattern in enumerate(PATTERNS)]


def memory_cases() -> list[Case]:
    """Return every memory order of each of q, k, v and the gradient of the output, and gradients of some of them."""
    masks, patterns = ("none", "holes", "none", "documents"), ("full", "band", "dilated", "random", "causal")
    cases = []
    for number, name in enumerate(MEMORY):
        for place in range(4):
            memory = tuple(name if index == place else "plain" for index in range(4))
            pattern, dtype = patterns[(number + place) % len(patterns)], DTYPES[(number + 2 * place) % len(DTYPES)]
            cases.append(Case(pattern, 10 if number % 2 else 90, masks[place], dtype, memory=memory))
        cases.append(
            Case("band", 90, "holes", num_queries=1 + number, memory=(name, name, "plain", name), label=Distance(-3, 6))
        )
    cases += [Case("globals", 90, mask, learned=learned) for mask in masks[:2] for learned in ((0,), (1,), (2,))]
    cases += [Case("globals", 90, label=Distance(-3, 6), learned=learned) for learned in ((3,), (0, 3), (1,))]
    return cases


def huge_score_cases() -> list[Case]:
    """Return scores beyond what can be exponentiated, of masked tokens too."""
    patterns = ("full", "band", "dilated", "random", "earlier keys", "keyless blocks")
    return [
        *(Case(pattern, 90, "holes", DTYPES[i % 3], score_factor=100) for i, pattern in enumerate(patterns)),
        *(Case(pattern, 90, "holes", score_factor=100, label=SOFT_SPAN) for pattern in ("band", "earlier keys")),
        Case("band", 90, "documents", score_factor=1000, value_dim=24),
        Case("causal", 90, "left", torch.float16, score_factor=100, num_queries=40),
    ]


def special_cases() -> list[Case]:
    """Return cached decoding, learned terms, values of another width."""
    clipped = Distance(-3, 6)
    return [
        *(Case(pattern, 200, mask, num_queries=1) for pattern, mask in in_turns("none", "left")),
        *(Case(pattern, 200, "left", torch.bfloat16, heads, 1) for pattern in ("full", "globals") for heads in HEADS),
        *(Case("causal", 200, mask, torch.bfloat16, num_queries=1, needs_grad=False) for mask in MASKS),
        *(Case(pattern, 200, mask, num_queries=70) for pattern, mask in in_turns("documents", "none")),
        *(Case(pattern, 90, mask, label=clipped) for pattern, mask in in_turns("none", "documents", "left")),
        *(Case(pattern, 90, mask, label=SOFT_SPAN) for pattern, mask in in_turns("holes", "none")),
        *(Case(pattern, 90, label=SOFT_SPAN, has_own_values=True) for pattern in PATTERNS),
        Case("causal band", 300, "documents", label=SOFT_SPAN, num_queries=150, has_own_values=True),
        Case("causal", 300, "left", torch.bfloat16, label=SOFT_SPAN, has_own_values=True),
        Case("band", 300, dtype=torch.float16, label=SOFT_SPAN),
        Case("globals", 90, "documents", label=clipped, has_own_values=True),
        Case("globals", 90, "holes", torch.bfloat16, label=clipped),
        Case("globals", 90, "documents", label=Slope()),
        Case("causal", 300, "left", torch.bfloat16, label=Slope(), has_own_values=True),
        Case("causal band", 300, label=Slope(), num_queries=150, has_own_values=True),
        Case("causal", 90, "left", torch.float16, num_queries=40, label=clipped),
        Case("globals", 90, "right", value_dim=24),
        *(Case(pattern, 90, mask, has_sinks=True) for pattern, mask in in_turns("none", "holes")),
        *(Case("causal band", 200, "left", dtype, has_sinks=True, num_queries=70) for dtype in DTYPES),
        *(Case(pattern, 90, mask, softcap=1.5) for pattern in ("full", "dilated", "globals") for mask in MASKS[:2]),
        Case("earlier keys", 90, "documents", torch.bfloat16, has_sinks=True, softcap=2.0, label=clipped),
        Case("causal", 90, "left", has_sinks=True, softcap=1.0, label=SOFT_SPAN),
        *(Case(pattern, 90, "left", needs_grad=False, has_sinks=True) for pattern in ("full", "causal", "globals")),
        Case("causal", 90, needs_grad=False, has_sinks=True, num_queries=1),
        *(Case(pattern, 90, scale=scale) for pattern in ("full", "causal", "band") for scale in (-0.5, 0.0)),
        Case("causal", 90, value_dim=8),
        *(Case(GRID, GRID_TOKENS, dtype=dtype) for dtype in DTYPES),
        Case(GRID, GRID_TOKENS, label=Distance(-3, 6), has_sinks=True),
        *(Case(GRID, 2 * GRID_TOKENS + 6, "two texts", dtype) for dtype in DTYPES),
        *(Case(GRID, 2 * GRID_TOKENS + 6, "two texts", num_queries=queries) for queries in (1, 70)),
        Case(GRID, 2 * GRID_TOKENS + 6, "two texts", label=Distance(-3, 6), has_sinks=True),
        Case(SPAN_TREE, 2 * TREE_POSITIONS + 6, "two texts"),
        Case(BOTH_SIDES, 2 * 72 + 7, "two texts"),
        Case(SPAN_TREE, TREE_POSITIONS),
        Case(SPAN_TREE, TREE_POSITIONS, label=SpanRelation(TREE_TOKENS, 2, clip_distance=3)),
        *(Case(BOTH_SIDES, 2 * tokens, label=InterleavedRelation(2, 2), has_own_values=True) for tokens in (1, 5, 75)),
        *(
            Case("interleaved tree", 150, mask, label=InterleavedRelation(3, 2, left_only=True), has_own_values=own)
            for mask in ("none", "left", "documents", "holes")
            for own in (True, False)
        ),
    ]


def cross_cases() -> list[Case]:
    """Return queries on an axis of their own, shorter and longer than that of the keys, and in the middle of it."""
    patterns = [name for name, pattern in PATTERNS.items() if not pattern.depends_on_length]
    places = ((90, 40, 0), (40, 90, 0), (1, 70, 60), (200, 12, 3))
    masks = ("none", "left", "right", "holes", "documents")
    return [
        *(
            Case(
                pattern,
                num_keys,
                masks[(number + turn) % 5],
                DTYPES[turn % 3],
                (4, 2),
                num_queries,
                cross_offset=offset,
            )
            for number, pattern in enumerate(patterns)
            for turn, (num_queries, num_keys, offset) in enumerate(places)
        ),
        Case("band", 40, "documents", num_queries=90, label=Distance(-3, 6), has_own_values=True, cross_offset=0),
        Case("full", 12, "left", num_queries=90, has_sinks=True, softcap=2.0, cross_offset=5),
        Case("compressed keys", 20, "documents", num_queries=90, label=SOFT_SPAN, value_dim=24, cross_offset=0),
    ]
