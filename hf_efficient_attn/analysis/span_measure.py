"""What `analyze spans` measures in one model: spans, attention by distance, spans along a text, and costs.

Source: the analyses are those of Sukhbaatar et al., "Adaptive Attention Span in Transformers" (arXiv:1905.07799),
figures 1, 3, 4 and 5. The paper does not say which heads its figure 1 shows, nor over what it averages.
"""

import warnings
from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.analysis.span_report import HeadWeights, LayerSpans, SpanCost, SpanReport, TextSpans
from hf_efficient_attn.analysis.span_sources import TextTokens
from hf_efficient_attn.errors import InputError
from hf_efficient_attn.models.spans.config import span_window
from hf_efficient_attn.models.spans.costs import average_span, max_span, span_flops
from hf_efficient_attn.models.spans.module import DYNAMIC, span_modules

# attention by distance is the mean over at least so many queries, or what a short text has of them
NUM_QUERIES = 256


def measure_spans(name: str, model: Any, text: TextTokens) -> SpanReport:
    """Return everything `analyze spans` shows of a model.

    Args:
        name: what tables call the model.
        model: a backbone in evaluation mode, as `load_span_model` returns it.
        text: the tokens to read, as many as `tokens_needed` at best; all weights of all layers are held at once,
            layers · heads · tokens² numbers.

    Raises:
        InputError: the model returns no attention weights.
    """
    weights, token_spans = _read(model, text.ids)
    modules, window = span_modules(model), span_window(model.config)
    layers = []
    for module in modules:
        spans = module.head_spans().tolist()
        layers.append(LayerSpans(module.layer_idx, tuple(spans), tuple(map(window.num_keys, spans))))
    longest = [float(spans.max()) for spans in token_spans] or [max(layer.spans) for layer in layers]
    reach = window.shift + window.num_keys(max(longest)) - 1
    farthest = min(reach, farthest_distance(len(text.ids), window.is_causal))
    distances = range(window.shift, farthest + 1)
    heads = [
        HeadWeights(layer.layer, head, layer.spans[head], layer.keys[head], window.shift, tuple(profile))
        for layer in layers
        for head, profile in enumerate(weights_by_distance(weights[layer.layer], distances, window.is_causal).tolist())
    ]
    heads.sort(key=lambda head: (head.span, head.mean_distance))
    along = None
    if token_spans:
        along = TextSpans(text.symbols, tuple(torch.stack(token_spans).mean((0, 1)).tolist()))
    num_queries = len(query_range(len(text.ids), farthest, window.is_causal))
    return SpanReport(
        measure_cost(name, model),
        window.ramp,
        window.is_causal,
        tuple(layers),
        heads[0],
        heads[-1],
        num_queries,
        reach,
        along,
    )


def measure_cost(name: str, model: Any) -> SpanCost:
    """Return what the spans of a model cost; dynamic ones are those of the text it read last."""
    span = average_span(model)
    kind, limit = span_modules(model)[0].kind, model.config.span_limit
    return SpanCost(name, kind, limit, span, max_span(model), span_flops(model.config, span))


def read_silently(model: Any, ids: tuple[int, ...], **options: Any) -> Any:
    """Return the outputs of a model for one text, without the warning that all attention weights are many."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="output_attentions=True", category=UserWarning)
        return model(input_ids=torch.tensor([ids]), **options)


def tokens_needed(config: Any, longest_keys: int) -> int:
    """Return how long a text lets `NUM_QUERIES` tokens see everything within their spans, in tokens.

    Args:
        longest_keys: the keys, on one side, that the longest head reads; of dynamic spans the limit.
    """
    return longest_keys * (1 if config.is_causal else 2) + NUM_QUERIES


def longest_keys(model: Any) -> int:
    """Return how many keys on one side any head of a model can read; dynamic spans can grow to the limit."""
    is_dynamic = any(module.kind == DYNAMIC for module in span_modules(model))
    return model.config.span_limit if is_dynamic else max_span(model)


def farthest_distance(num_tokens: int, is_causal: bool) -> int:
    """Return up to which distance a text shows what its tokens read.

    `NUM_QUERIES` tokens have all distances before them (and behind them, if not causal); in a short text as many as
    it shows distances.

    >>> farthest_distance(1000, is_causal=True), farthest_distance(300, is_causal=True), farthest_distance(300, False)
    (744, 150, 100)
    """
    num_sides = 1 if is_causal else 2
    num_queries = min(NUM_QUERIES, max(1, num_tokens // (num_sides + 1)))
    return (num_tokens - num_queries) // num_sides


def query_range(num_tokens: int, farthest: int, is_causal: bool) -> range:
    """Return the queries that have a token at every distance up to the farthest, on each side they read.

    >>> query_range(10, 3, is_causal=True), query_range(10, 3, is_causal=False)
    (range(3, 10), range(3, 7))
    """
    return range(farthest, num_tokens if is_causal else num_tokens - farthest)


def weights_by_distance(weights: Tensor, distances: range, is_causal: bool) -> Tensor:
    """Return the attention weight that a query gives to each distance, the mean over queries, float64 [H, distances].

    Distances of both sides are added up where both are read. Shapes: weights [H, T, T].

    >>> nearest = torch.eye(6).roll(-1, 1)[None]
    >>> weights_by_distance(nearest, range(3), is_causal=False).tolist()
    [[0.0, 1.0, 0.0]]
    """
    queries = query_range(weights.shape[-1], distances[-1], is_causal)
    means = []
    for distance in distances:
        # the entries of a diagonal below the main one are counted by their keys, above it by their queries
        columns = [weights.diagonal(-distance, 1, 2)[:, queries.start - distance : queries.stop - distance]]
        if distance and not is_causal:
            columns.append(weights.diagonal(distance, 1, 2)[:, queries.start : queries.stop])
        means.append(torch.stack([column.double().mean(1) for column in columns]).sum(0))
    return torch.stack(means, 1)


def _read(model: Any, ids: tuple[int, ...]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the weights of each layer, [H, T, T], and the spans of each token, [H, T] for each layer if dynamic."""
    token_spans: list[Tensor] = []

    def record(module: Any, args: Any, spans: Tensor | None) -> None:
        if module.kind == DYNAMIC and spans is not None:
            token_spans.append(spans[0])

    hooks = [module.register_forward_hook(record) for module in span_modules(model)]
    try:
        weights = read_silently(model, ids, output_attentions=True).get("attentions")
    finally:
        for hook in hooks:
            hook.remove()
    if not weights:
        raise InputError(f"{type(model).__name__} returned no attention weights, so there is nothing to measure.")
    return [weight[0] for weight in weights], token_spans
