"""Show how far the heads of a model look: spans, attention by distance, spans along a text, costs.

    hf-efficient-attn analyze spans outputs/adaptive --text book.txt --compare outputs/fixed-256 outputs/fixed-512

Spans and distances are in tokens, costs in multiply-adds of a token (`flops_per_token`). spans.json, which --json
prints, holds {"settings", "notes", "compared"} and the report on the first model.

The pictures are those of Sukhbaatar et al., "Adaptive Attention Span in Transformers" (arXiv:1905.07799), figures 1, 3
(without its losses, which are training's), 4 and 5.
"""

import argparse
import json
import sys
from pathlib import Path

from hf_efficient_attn.analysis.plot_spans import PIXELS_PER_INCH, spans_figure
from hf_efficient_attn.analysis.signal_sources import label
from hf_efficient_attn.analysis.span_measure import (
    longest_keys,
    measure_cost,
    measure_spans,
    read_silently,
    tokens_needed,
)
from hf_efficient_attn.analysis.span_report import SpanCost, SpanReport, cost_table
from hf_efficient_attn.analysis.span_sources import TEXT_NAME, TextTokens, load_span_model, read_text, tokenize
from hf_efficient_attn.errors import InputError
from hf_efficient_attn.models.spans.module import DYNAMIC, span_modules
from hf_efficient_attn.pictures import check_destination, check_picture, save_figure


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    parser.add_argument(
        "model", help="a checkpoint folder or Hub id of a model with spans, or a config.json, whose weights are random"
    )
    parser.add_argument(
        "--compare",
        nargs="+",
        default=[],
        metavar="MODEL",
        help="further models with spans, whose average spans and multiply-adds are shown beside those of the first",
    )
    parser.add_argument("--text", type=Path, help=f"what the models read; default: {TEXT_NAME}")
    parser.add_argument(
        "--tokens",
        type=int,
        default=2048,
        metavar="N",
        help="read at most the first N tokens of the text; memory grows with its square (default %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of random weights (default %(default)s)")
    parser.add_argument(
        "--output", type=Path, default=Path("spans"), help="folder of spans.json and spans.png (default %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print spans.json instead of tables")
    parser.add_argument("--picture", type=Path, help="where the picture goes instead (.png, .svg or .pdf)")


def main(args: argparse.Namespace) -> None:
    """Measure the spans of a model, print tables, write spans.json and the picture.

    Raises:
        EfficientAttentionError: no such model or text, a model without spans, a text it cannot read.
        ImportError: matplotlib is missing; raised before anything is measured.
    """
    if args.tokens < 2:
        raise InputError(f"--tokens {args.tokens}: attention between tokens needs at least 2.")
    picture = args.picture or args.output / "spans.png"
    # what could not be drawn is not measured
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
    """Return the report on a model that reads as much of a text as it needs, and notes in sentences."""
    model = load_span_model(source, seed)
    tokens = tokenize(source, model, text)
    print(f"Measuring {source} ...", file=sys.stderr)
    needed = tokens_needed(model.config, longest_keys(model))
    num_read = min(len(tokens.ids), needed, max_tokens)
    report = measure_spans(label(source), model, TextTokens(tokens.ids[:num_read], tokens.symbols[:num_read]))
    return report, [_read_note(len(tokens.ids), num_read, needed), *report.notes()]


def cost_of(source: str, text: bytes, max_tokens: int, seed: int) -> SpanCost:
    """Return what the spans of a model cost; only dynamic spans depend on the text."""
    model = load_span_model(source, seed)
    if span_modules(model)[0].kind == DYNAMIC:
        read_silently(model, tokenize(source, model, text).ids[:max_tokens])
    return measure_cost(label(source), model)


def _read_note(num_tokens: int, num_read: int, needed: int) -> str:
    if num_read == num_tokens:
        return f"All {num_tokens:,} tokens of the text are read."
    reason = "as many as the spans need" if num_read == needed else f"--tokens; the spans need {needed:,}"
    return f"The text has {num_tokens:,} tokens and is cut at {num_read:,}: {reason}."
