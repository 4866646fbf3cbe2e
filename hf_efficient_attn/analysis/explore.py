"""Write a web page that shows patterns interactively, or the attention weights of a model on a text.

    hf-efficient-attn explore
    hf-efficient-attn explore "band(256, 256) | global(0)" path/to/model --tokens 8192 --output patterns.html
    hf-efficient-attn explore --model path/to/model --text document.txt --output document.html

The page is one HTML file that opens in a browser without a network. It shows your patterns and some patterns of this
package. With --model and --text, it also shows what each head attends to. The attention weights of all queries would
make the page too large, so it has those of some tokens (--num-rows and --rows). These tokens are underlined in the
text, and a click on one of them shows its weights.
"""

import argparse
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from hf_efficient_attn.analysis.explore_model import (
    DEFAULT_ROWS,
    attention_patterns,
    load_explored,
    model_data,
    read_rows,
    sampled_rows,
)
from hf_efficient_attn.analysis.explore_patterns import Own, our_presets, own_preset
from hf_efficient_attn.analysis.model_sources import MAX_TOKENS, label, read_bytes, read_tokens
from hf_efficient_attn.analysis.pattern_sources import (
    PATTERN_OR_MODEL,
    read_config,
    read_layer_patterns,
    refuse_misplaced,
)
from hf_efficient_attn.errors import EfficientAttentionError, InputError
from hf_efficient_attn.integration.explain import explain, numbered_requests
from hf_efficient_attn.patterns.bands import Full
from hf_efficient_attn.patterns.serialization import check_length
from hf_efficient_attn.pictures import check_destination
from hf_efficient_attn.requirements import VERSION

# used if neither an option nor a model sets the number
TOKENS, LAYERS, HEADS = 4096, 12, 8
MEGABYTE = 10**6
# the largest numbers of tokens, layers and heads with which the page stays responsive
MOST = {"tokens": 262_144, "layers": 128, "heads": 256}
STYLES = ("page.css", "views.css")
# in this order, because later scripts use what earlier ones define
SCRIPTS = (
    "key_intervals.js",
    "page.js",
    "schedule.js",
    "counting.js",
    "tiles.js",
    "matrix.js",
    "matrix_drawing.js",
    "pattern_view.js",
    "model_data.js",
    "memberships.js",
    "heads_map.js",
    "text_view.js",
    "start.js",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    parser.add_argument("pattern", nargs="*", metavar="PATTERN_OR_MODEL", help=PATTERN_OR_MODEL)
    tokens = f"length of the sequence in tokens (default {TOKENS}); with --text, the first N tokens are used (default "
    tokens += f"{MAX_TOKENS}, or the model's number of positions if it is smaller)"
    parser.add_argument("--tokens", type=int, metavar="N", help=tokens)
    parser.add_argument(
        "--layers", type=int, metavar="N", help=f"number of layers to show, for patterns (default {LAYERS})"
    )
    parser.add_argument(
        "--heads", type=int, metavar="N", help=f"number of heads to show, for patterns (default {HEADS})"
    )
    parser.add_argument("--model", metavar="FOLDER", help="folder or name on the Hub of a model; needs --text")
    parser.add_argument("--text", type=Path, metavar="FILE", help="text for the model, in UTF-8")
    rows = f"number of tokens, spread evenly over the text, whose attention weights are kept (default {DEFAULT_ROWS})"
    parser.add_argument("--num-rows", type=int, metavar="N", help=rows)
    parser.add_argument(
        "--rows", default="", metavar="N,N", help="further tokens whose weights are kept, counted from 0, such as 0,17"
    )
    parser.add_argument(
        "--causal", action="store_true", help="show the causal form of the given patterns, which a decoder uses"
    )
    parser.add_argument(
        "--device",
        default="cpu",
        help="device for which the backend is chosen and costs are estimated (default %(default)s)",
    )
    parser.add_argument(
        "--output", default="attention.html", metavar="FILE", help="file to write (default %(default)s)"
    )


def main(args: argparse.Namespace) -> None:
    """Write the page, and print where it is.

    Raises:
        EfficientAttentionError: a wrong pattern or length.
        InputError: a file that cannot be written; raised before the model is loaded.
    """
    path = Path(args.output)
    if path.suffix.lower() not in (".html", ".htm"):
        raise InputError(f"--output {args.output}: the page is HTML. Give a file whose name ends with .html.")
    check_destination(path)
    check_options(args)
    page = render_page(page_data(args))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
    print(f"Written: {path} ({len(page.encode()) / MEGABYTE:.1f} MB). Open it in a browser; it needs no network.")
    clicked = "a row of a pattern" if args.model is None else "an underlined token of the text, or a row of a pattern"
    print(f"Click {clicked} to see which keys it attends to.")


def check_options(args: argparse.Namespace) -> None:
    """Raise InputError for an option that is out of range, or that would change nothing."""
    for name in ("tokens", "layers", "heads", "num_rows"):
        number, option = getattr(args, name), f"--{name.replace('_', '-')}"
        if number is not None:
            check_length(option, number)
            if number > MOST.get(name, number):
                raise InputError(f"{option} {number:,} is too large: a page shows at most {MOST[name]:,} {name}.")
    if (args.model is None) != (args.text is None):
        raise InputError("--model and --text must be given together: a model and a text file.")
    of_text = {"--num-rows": args.num_rows, "--rows": args.rows}
    for name, value in of_text.items() if args.model is None else ():
        if value:
            raise InputError(
                f"{name} {value} applies only to a model on a text. Add --model and --text, or leave it out."
            )
    of_patterns = {"--layers": args.layers, "--heads": args.heads}
    for name, value in of_patterns.items() if args.model is not None else ():
        if value:
            raise InputError(
                f"{name} {value} applies only without --model; the config of {args.model} sets this number. Leave it "
                "out."
            )
    if args.causal and not args.pattern:
        raise InputError(
            "--causal applies to given patterns, but none is given. Give a pattern such as 'band(256, 256)'."
        )


def page_data(args: argparse.Namespace) -> dict[str, Any]:
    """Return what the page shows, in JSON types."""
    shown, own_patterns = (None, []) if args.model is None else model_on_text(args)
    if shown is None:
        tokens, layers, heads = args.tokens or TOKENS, args.layers or LAYERS, args.heads or HEADS
    else:
        tokens, layers, heads = len(shown["tokens"]), shown["layers"], shown["heads"]
    given = [given_pattern(source, args, layers, heads, tokens) for source in args.pattern]
    # refuses a device that torch does not know
    explain(Full(), 1, device=args.device)
    offered, notes = [], [] if shown is None else shown["notes"]
    for each in own_patterns:
        try:
            offered.append(own_preset(each, heads, tokens, args.device))
        except EfficientAttentionError as error:
            notes.append(f"The pattern of the model's layers is not drawn here: {error}")
    offered += [own_preset(each, own_heads, tokens, args.device) for each, own_heads in given]
    offered += our_presets(layers, heads, tokens, args.device)
    return {"version": VERSION, "tokens": tokens, "presets": offered, "model": shown}


def given_pattern(source: str, args: argparse.Namespace, layers: int, heads: int, tokens: int) -> tuple[Own, int]:
    """Return a given pattern, or the patterns of a saved model's layers, and the number of heads.

    Raises:
        EfficientAttentionError: an unknown pattern or model, or --causal with a model.
    """
    config = read_config(source)
    refuse_misplaced(source, config, None, args.causal)
    if config is None:
        return (source, read_layer_patterns(source, layers), args.causal), heads
    _, _, numbered = numbered_requests(config, None, tokens)
    requests = list(numbered.values())
    if any(each.chosen is not None for each in requests):
        raise InputError(
            f"{source} selects keys by content, so what it attends to depends on the text. Show it on a text: "
            f"hf-efficient-attn explore --model {source} --text FILE."
        )
    # if the model is causal, the patterns of its requests are already causal
    return (label(source), tuple(each.layer_spec.pattern for each in requests), False), requests[0].num_heads


def model_on_text(args: argparse.Namespace) -> tuple[dict[str, Any], list[Own]]:
    """Return what the page shows of `--model` on `--text`, and the patterns that the model follows.

    Raises:
        InputError: no such text, raised before the model is loaded; or as in `load_explored`, `read_tokens` and
            `read_rows`.
    """
    wanted = args.rows.split(",") if args.rows else []
    if not all(row.strip().isdecimal() for row in wanted):
        raise InputError(f"--rows {args.rows}: give the positions of tokens, counted from 0, such as 0,17.")
    content = read_bytes(args.text)
    model, name = load_explored(args.model), label(args.model)
    text = read_tokens(args.model, model.config.get_text_config(), content, args.tokens)
    rows = sampled_rows(len(text.ids), args.num_rows or DEFAULT_ROWS, list(map(int, wanted)))
    read = read_rows(model, text.ids, rows)
    patterns, is_causal = attention_patterns(model, read.global_tokens)
    own_patterns: list[Own] = [(f"{name}, all layers", patterns, is_causal)] if patterns else []
    return model_data(name, model, text, read, patterns), own_patterns


def render_page(data: dict[str, Any]) -> str:
    """Return the HTML of the page that shows `data` (JSON types); the page loads no other files."""
    parts = {
        "{{style}}": "\n".join(map(_part, STYLES)),
        "{{script}}": "\n".join(map(_part, SCRIPTS)),
        "{{data}}": embedded(data),
    }
    before, *rest = _part("page.html").split("{{")
    pages = [before]
    for piece in rest:
        name, _, after = piece.partition("}}")
        pages += [parts[f"{{{{{name}}}}}"], after]
    return "".join(pages)


def embedded(data: Any) -> str:
    r"""Return JSON that is safe within a script element: no text in it can end the element or begin another one.

    >>> embedded("</script><!--")
    '"\\u003c/script>\\u003c!--"'
    """
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def _part(name: str) -> str:
    return (files(__package__) / "explore_page" / name).read_text(encoding="utf-8")
