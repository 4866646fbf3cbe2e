"""Show how far the heads of a model attend: spans, attention by distance, spans along a text, and their cost.

    hf-efficient-attn analyze spans outputs/adaptive --text book.txt --compare outputs/fixed-256 outputs/fixed-512

Spans and distances are in tokens, costs in multiply-adds for one token (`flops_per_token`). spans.json, which --json
prints, holds {"settings", "notes", "compared", ...}; the other keys are the report on the first model.

The pictures correspond to figures 1, 3 (without its training losses), 4 and 5 of Sukhbaatar et al., "Adaptive Attention
Span in Transformers" (arXiv:1905.07799).
"""

import argparse
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.analysis.model_sources import TEXT_NAME, TextTokens, label, load_span_model, read_text, tokenize
from hf_efficient_attn.analysis.span_report import (
    PIXELS_PER_INCH,
    HeadWeights,
    LayerSpans,
    SpanCost,
    SpanReport,
    TextSpans,
    cost_table,
    spans_figure,
)
from hf_efficient_attn.errors import InputError
from hf_efficient_attn.models.spans.config import span_window
from hf_efficient_attn.models.spans.module import DYNAMIC, span_modules
from hf_efficient_attn.models.spans.training import average_span, max_span, span_flops
from hf_efficient_attn.pictures import check_destination, check_picture, save_figure

# attention by distance is averaged over at least this many queries, or over fewer in a short text
NUM_QUERIES = 256


def measure_spans(name: str, model: Any, text: TextTokens) -> SpanReport:
    """Return everything that `analyze spans` shows of a model.

    Args:
        name: name of the model in tables.
        model: a backbone in evaluation mode, as `load_span_model` returns it.
        text: the tokens to measure, ideally `tokens_needed` of them; the weights of all layers are held at once,
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
    """Return the cost of a model's spans; dynamic spans are those of its last forward pass."""
    span = average_span(model)
    kind, limit = span_modules(model)[0].kind, model.config.span_limit
    return SpanCost(name, kind, limit, span, max_span(model), span_flops(model.config, span))


def read_silently(model: Any, ids: tuple[int, ...], **options: Any) -> Any:
    """Return the outputs of a model for one text, without the warning about the size of all attention weights."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="output_attentions=True", category=UserWarning)
        return model(input_ids=torch.tensor([ids]), **options)


def tokens_needed(config: Any, longest_keys: int) -> int:
    """Return the length of a text, in tokens, in which `NUM_QUERIES` tokens have all keys within their spans.

    Args:
        longest_keys: how many keys on one side the head with the longest span attends to; for dynamic spans, the limit.
    """
    return longest_keys * (1 if config.is_causal else 2) + NUM_QUERIES


def longest_keys(model: Any) -> int:
    """Return the most keys on one side that a head of a model can attend to; dynamic spans can grow to the limit."""
    is_dynamic = any(module.kind == DYNAMIC for module in span_modules(model))
    return model.config.span_limit if is_dynamic else max_span(model)


def farthest_distance(num_tokens: int, is_causal: bool) -> int:
    """Return the largest distance, in tokens, at which attention weights are measured in a text.

    `NUM_QUERIES` tokens have a token at every distance up to this one before them (and after them, if not causal). In a
    short text, the number of such tokens is the number of distances.

    >>> farthest_distance(1000, is_causal=True), farthest_distance(300, is_causal=True), farthest_distance(300, False)
    (744, 150, 100)
    """
    num_sides = 1 if is_causal else 2
    num_queries = min(NUM_QUERIES, max(1, num_tokens // (num_sides + 1)))
    return (num_tokens - num_queries) // num_sides


def query_range(num_tokens: int, farthest: int, is_causal: bool) -> range:
    """Return the queries that have a token at every distance up to the farthest, on each side they attend to.

    >>> query_range(10, 3, is_causal=True), query_range(10, 3, is_causal=False)
    (range(3, 10), range(3, 7))
    """
    return range(farthest, num_tokens if is_causal else num_tokens - farthest)


def weights_by_distance(weights: Tensor, distances: range, is_causal: bool) -> Tensor:
    """Return the attention weight that a query gives to each distance, averaged over queries, float64 [H, distances].

    If not causal, the weights of both sides are added. Shapes: weights [H, T, T].

    >>> nearest = torch.eye(6).roll(-1, 1)[None]
    >>> weights_by_distance(nearest, range(3), is_causal=False).tolist()
    [[0.0, 1.0, 0.0]]
    """
    queries = query_range(weights.shape[-1], distances[-1], is_causal)
    means = []
    for distance in distances:
        # torch indexes a diagonal by its key below the main diagonal, and by its query above it
        columns = [weights.diagonal(-distance, 1, 2)[:, queries.start - distance : queries.stop - distance]]
        if distance and not is_causal:
            columns.append(weights.diagonal(distance, 1, 2)[:, queries.start : queries.stop])
        means.append(torch.stack([column.double().mean(1) for column in columns]).sum(0))
    return torch.stack(means, 1)


def _read(model: Any, ids: tuple[int, ...]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the weights of each layer, [H, T, T], and, for dynamic spans, the spans of its tokens, [H, T]."""
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    text = "model with spans: its folder, its name on the Hub, or a config.json (for random weights)"
    parser.add_argument("model", metavar="MODEL", help=text)
    parser.add_argument(
        "--compare",
        nargs="+",
        default=[],
        metavar="MODEL",
        help="other models with spans; their average spans and multiply-adds are compared with the first model's",
    )
    parser.add_argument("--text", type=Path, metavar="FILE", help=f"text for the models (default: {TEXT_NAME})")
    parser.add_argument(
        "--tokens",
        type=int,
        default=2048,
        metavar="N",
        help="use the first N tokens of the text; memory grows quadratically (default %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of random weights (default %(default)s)")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("outputs/spans"),
        metavar="FOLDER",
        help="folder to write spans.json and spans.png to (default %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print spans.json instead of tables")
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help="another file for the picture (.png, .svg or .pdf)"
    )


def main(args: argparse.Namespace) -> None:
    """Measure the spans of a model, print tables, write spans.json and the picture.

    Raises:
        EfficientAttentionError: no such model or text, a model without spans, or a text that does not fit the model.
        ImportError: matplotlib is missing; raised before anything is measured.
    """
    if args.tokens < 2:
        raise InputError(f"--tokens {args.tokens}: attention between tokens needs at least 2 tokens.")
    picture = args.picture or args.output / "spans.png"
    # fail before measuring if the picture cannot be drawn
    check_picture(picture)
    path = args.output / "spans.json"
    check_destination(path)
    text = read_text(args.text)
    report, notes = analyze(args.model, text, args.tokens, args.seed)
    compared = [cost_of(source, text, args.tokens, args.seed) for source in args.compare]
    costs = [report.cost, *compared]
    text_name = TEXT_NAME if args.text is None else args.text.name
    settings = {"text": TEXT_NAME if args.text is None else str(args.text), "tokens": args.tokens, "seed": args.seed}
    results = {"settings": settings, "notes": notes, **report.to_dict(), "compared": [vars(cost) for cost in compared]}
    written = json.dumps(results, indent=1, ensure_ascii=False)
    print(*([written] if args.json else [report, cost_table(costs), "\n".join(notes)]), sep="\n\n")
    args.output.mkdir(parents=True, exist_ok=True)
    path.write_text(written + "\n", encoding="utf-8")
    save_figure(spans_figure(report, costs, text_name), picture, PIXELS_PER_INCH)
    print(f"\nWritten: {path}, {picture}", file=sys.stderr if args.json else sys.stdout)


def analyze(source: str, text: bytes, max_tokens: int, seed: int) -> tuple[SpanReport, list[str]]:
    """Return the report on a model, measured on as much of a text as it needs, and notes in sentences."""
    model = load_span_model(source, seed)
    tokens = tokenize(source, model, text)
    print(f"Measuring {source} ...", file=sys.stderr)
    needed = tokens_needed(model.config, longest_keys(model))
    num_read = min(len(tokens.ids), needed, max_tokens)
    report = measure_spans(label(source), model, TextTokens(tokens.ids[:num_read], tokens.symbols[:num_read]))
    return report, [_read_note(len(tokens.ids), num_read, needed), *report.notes()]


def cost_of(source: str, text: bytes, max_tokens: int, seed: int) -> SpanCost:
    """Return the cost of a model's spans; only dynamic spans depend on the text."""
    model = load_span_model(source, seed)
    if span_modules(model)[0].kind == DYNAMIC:
        read_silently(model, tokenize(source, model, text).ids[:max_tokens])
    return measure_cost(label(source), model)


def _read_note(num_tokens: int, num_read: int, needed: int) -> str:
    if num_read == num_tokens:
        return f"All {num_tokens:,} tokens of the text are used."
    reason = "the spans need no more" if num_read == needed else f"see --tokens; the spans need {needed:,}"
    return f"The first {num_read:,} of the {num_tokens:,} tokens of the text are used ({reason})."
