"""What each way to read a text costs at a length, and what it keeps to write the next token: a table to choose by."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hf_efficient_attn.analysis.explain import explain
from hf_efficient_attn.bench.harness.report import markdown_table
from hf_efficient_attn.bench.mechanisms.cases import ALL, Shape, config_of
from hf_efficient_attn.errors import InputError

# of a model as large as BERT's smaller siblings
WIDTH, HEADS = 512, 8
# by how a layer's output compares with that of full attention
KINDS = {
    "full": "full attention",
    "sparse": "exact softmax over the keys that are read",
    "approximate": "an approximation of full attention",
    "other": "another function of all tokens, which has to be learned as such",
}


@dataclass(frozen=True)
class Facts:
    """What is known about one of `ALL` mechanisms.

    Attributes:
        kind: of `KINDS`.
        scores: returns how many scores a head computes for a token, in the mean.
        kept: returns how many numbers a head keeps behind a text to write the next token; None: it does not write.
    """

    kind: str
    scores: Callable[[Shape], float]
    kept: Callable[[Shape], float] | None = None


def ways_to_read(tokens: int, is_causal: bool, keys: int) -> list[dict[str, Any]]:
    """Return what every way to read a text of that length costs, the cheapest first, in JSON types.

    A row holds `mechanism`, as in `bench mechanisms`; `reads`, in words; `computes`, of `KINDS`; `scores` that a head
    computes for a token in the mean; `of_dense`, their share of full attention's; and `kept_numbers`, which a head
    keeps behind the text to write the next token, None if it is not causal.

    keys: how many keys a token reads, about, where that can be chosen.

    Raises:
        InputError: no tokens, or no keys.
    """
    for name, count in (("tokens", tokens), ("keys", keys)):
        if count < 1:
            raise InputError(f"{name}={count} must be at least 1.")
    shape = Shape(tokens, 1, WIDTH, HEADS, min(keys, tokens), is_causal, "float32", "cpu")
    able = [name for name, mechanism in ALL.items() if is_causal in mechanism.directions]
    return sorted((_way(name, shape) for name in able), key=lambda row: row["scores"])


def _way(name: str, shape: Shape) -> dict[str, Any]:
    """Return the row of one of `ALL` mechanisms."""
    facts = FACTS[name]
    scores = facts.scores(shape)
    return {
        "mechanism": name,
        "reads": ALL[name].about.format(keys=shape.keys),
        "computes": facts.kind,
        "scores": scores,
        "of_dense": scores / _dense_scores(shape),
        "kept_numbers": facts.kept(shape) if shape.is_causal and facts.kept else None,
    }


def ways_text(rows: list[dict[str, Any]], tokens: int, is_causal: bool) -> str:
    """Return the table of `ways_to_read` as text."""
    header = ["mechanism", "scores a token", "of dense", "computes", *(["kept"] if is_causal else []), "reads"]
    lines = [
        [
            row["mechanism"],
            f"{row['scores']:,.0f}",
            f"{row['of_dense']:.1%}",
            row["computes"],
            *([f"{row['kept_numbers']:,.0f}"] if is_causal else []),
            row["reads"],
        ]
        for row in rows
    ]
    kept = " Kept: numbers of a head and layer behind the text, to write the next token." if is_causal else ""
    direction = "to their left" if is_causal else "both sides"
    kinds = "\n".join(f"  {kind.ljust(12)}{what}" for kind, what in KINDS.items())
    return (
        f"{tokens:,} tokens that read {direction}, heads of {WIDTH // HEADS}:\n\n{markdown_table(header, lines)}\n\n"
        f"Scores are of a head, in the mean, wider ones counted as more; what finds, projects or convolves keys is not "
        f"counted.{kept}\n"
        f"All take padding on either side. Computes:\n{kinds}\n"
        "performer and average are mechanism='linear' of a compressed_transformer, with feature_map='positive_random' "
        "and 'constant'.\nWhat they cost in time, which has another order, and in memory: "
        "hf-efficient-attn bench mechanisms"
    )


def _head_dim(shape: Shape) -> int:
    return shape.hidden_size // shape.heads


def _dense_scores(shape: Shape) -> float:
    return (shape.tokens + 1) / 2 if shape.is_causal else shape.tokens


def _explained(name: str) -> Callable[[Shape], float]:
    def scores(shape: Shape) -> float:
        found: Any = explain(config_of(name, shape), query_tokens=shape.tokens)
        return found.allowed_pairs / shape.heads / shape.tokens  # type: ignore[no-any-return]

    return scores


def _span_keys(shape: Shape) -> float:
    ramp, sides = config_of("adaptive_span", shape).span_ramp, 1 if shape.is_causal else 2
    return min(_dense_scores(shape), shape.keys + sides * ramp)


def _etc_scores(shape: Shape) -> float:
    config = config_of("etc", shape)
    num_global = -(-shape.tokens // config.chunk_tokens)
    return 2 * config.local_radius + 1 + 2 * num_global + num_global**2 / shape.tokens


def _tree_scores(shape: Shape) -> float:
    nodes = 2 * shape.tokens
    pattern = config_of("tree", shape).pattern
    return pattern.resolve(nodes).num_pairs(nodes, nodes) / shape.tokens  # type: ignore[no-any-return]


def _landmark_scores(shape: Shape) -> float:
    landmarks = shape.block_tokens()
    return shape.tokens if landmarks >= shape.tokens else 2 * landmarks + landmarks**2 / shape.tokens


def _sum_scores(name: str) -> Callable[[Shape], float]:
    # what a head adds up and reads for a token, in numbers of a score: two products of its width
    return lambda shape: _sums(name)(shape) / _head_dim(shape)


def _sums(name: str) -> Callable[[Shape], float]:
    return lambda shape: config_of(name, shape).features_of_head * (_head_dim(shape) + 1)


def _tokens_of_key(shape: Shape) -> int:
    return config_of("memory_compressed", shape).compression_tokens  # type: ignore[no-any-return]


def _all_keys(shape: Shape) -> float:
    return 2 * shape.tokens * _head_dim(shape)


def _mixed_scores(shape: Shape) -> float:
    # of all pairs, if causal, too; each is mixed from those of all heads, twice
    return shape.tokens * (1 + shape.heads / _head_dim(shape))


def _shared_key_scores(shape: Shape) -> float:
    # keys of the width of all heads, values of one: a score is a product of each
    return _dense_scores(shape) * (shape.heads + 1) / 2


def _seq2seq_scores(shape: Shape) -> float:
    encoder, decoder, across = shape.tokens, (shape.tokens + 1) / 2, shape.tokens
    return (encoder + decoder + across) / 2


FACTS: dict[str, Facts] = {
    "dense": Facts("full", _dense_scores, _all_keys),
    # a cache holds the sum of the values so far, too
    "sas_p": Facts("other", _dense_scores, lambda shape: _all_keys(shape) + _head_dim(shape)),
    "prior": Facts("other", _dense_scores, _all_keys),
    "talking_heads": Facts("other", _mixed_scores, _all_keys),
    "collaborative_heads": Facts("other", _shared_key_scores, _all_keys),
    "band": Facts("sparse", _explained("band"), lambda shape: 2 * (shape.keys - 1) * _head_dim(shape)),
    "bigbird": Facts("sparse", _explained("bigbird"), _all_keys),
    "block_top_k": Facts("sparse", _explained("block_top_k"), _all_keys),
    "adaptive_span": Facts("sparse", _span_keys, lambda shape: 2 * _span_keys(shape) * _head_dim(shape)),
    "etc": Facts("sparse", _etc_scores),
    "star": Facts("other", lambda shape: 6 + 1 / shape.tokens),
    "tree": Facts("other", _tree_scores, lambda shape: 2 * _all_keys(shape)),
    "reformer": Facts("sparse", _explained("reformer"), _all_keys),
    "routing": Facts("sparse", _explained("routing"), lambda shape: _all_keys(shape) + 2 * shape.tokens),
    "linformer": Facts("other", lambda shape: shape.keys),
    "nystrom": Facts("approximate", _landmark_scores),
    "memory_compressed": Facts(
        "other",
        lambda shape: _dense_scores(shape) / _tokens_of_key(shape),
        lambda shape: _all_keys(shape) / _tokens_of_key(shape),
    ),
    "linear": Facts("other", _sum_scores("linear"), _sums("linear")),
    # beside the sums, the largest exponent of their keys
    "performer": Facts("approximate", _sum_scores("performer"), lambda shape: _sums("performer")(shape) + 1),
    "average": Facts("other", _sum_scores("average"), _sums("average")),
    "residual_scores": Facts("other", _dense_scores, _all_keys),
    # of a layer that has no queries and keys: it weighs values alone
    "reused_weights": Facts(
        "other", lambda shape: _dense_scores(shape) / 2, lambda shape: shape.tokens * _head_dim(shape)
    ),
    # of a layer of the encoder and one of the decoder
    "seq2seq": Facts("full", _seq2seq_scores),
}
