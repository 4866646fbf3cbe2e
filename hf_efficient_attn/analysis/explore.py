"""Write a page to look at attention: who reads whom under a pattern, or what a model reads in a text.

The page is one HTML file that opens by a double click, without a network; patterns can be typed in it:
    hf-efficient-attn explore
    hf-efficient-attn explore "band(256, 256) | global(0)" path/to/config.json --tokens 8192 --output patterns.html
    hf-efficient-attn explore --model path/to/model --text document.txt --output document.html
"""

import argparse
from pathlib import Path
from typing import Any

from hf_efficient_attn.analysis.explore_html import render_page
from hf_efficient_attn.analysis.explore_patterns import LENGTHS, explanations, presets
from hf_efficient_attn.errors import InputError
from hf_efficient_attn.patterns.checks import check_length
from hf_efficient_attn.requirements import VERSION

DEFAULT_TOKENS = 4096
MEGABYTE = 10**6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = __doc__
    text = (
        "expressions such as 'band(4, 4) | global(0)', JSON, or files with JSON; further ones can be typed in the page"
    )
    parser.add_argument("pattern", nargs="*", help=text)
    parser.add_argument("--tokens", type=int, metavar="N", help=f"length of the sequence in tokens ({DEFAULT_TOKENS})")
    parser.add_argument("--layers", type=int, default=12, metavar="N", help="layers of the patterns (%(default)s)")
    parser.add_argument("--heads", type=int, default=8, metavar="N", help="query heads (%(default)s)")
    parser.add_argument("--causal", action="store_true", help="the causal form of the patterns")
    parser.add_argument("--device", default="cpu", help="for which backends are explained (%(default)s)")
    parser.add_argument("--output", default="attention.html", metavar="FILE", help="the page (%(default)s)")


def main(args: argparse.Namespace) -> None:
    """Write the page, and say where it is and what it leaves out.

    Raises:
        EfficientAttentionError: a wrong pattern or length.
        OSError: a file that cannot be written.
    """
    path = Path(args.output)
    if path.suffix.lower() not in (".html", ".htm"):
        raise InputError(f"--output {args.output}: the page is HTML; give a file that ends with .html.")
    path.parent.mkdir(parents=True, exist_ok=True)
    page = render_page(page_data(args))
    path.write_text(page, encoding="utf-8")
    print(f"Written: {path} ({len(page.encode()) / MEGABYTE:.1f} MB). Open it in a browser; it needs no network.")


def page_data(args: argparse.Namespace) -> dict[str, Any]:
    """Return what the page shows, in JSON types."""
    tokens = DEFAULT_TOKENS if args.tokens is None else args.tokens
    for name, number in (("--tokens", tokens), ("--layers", args.layers), ("--heads", args.heads)):
        check_length(name, number)
    offered = presets(args.pattern, args.layers, args.heads, args.causal)
    return {
        "version": VERSION,
        "tokens": tokens,
        "heads": args.heads,
        "lengths": sorted({*LENGTHS, tokens}),
        "presets": offered,
        "explanations": explanations(offered, tokens, args.heads, args.device),
        "model": None,
    }
