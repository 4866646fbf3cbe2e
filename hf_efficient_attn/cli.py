"""Command line `hf-efficient-attn`: parse, call one function, print.

Each command is a module that defines `add_arguments(parser)` and `main(args)`; `--help` shows its docstring. The module
is imported when its command is called, and nothing else of the package before it: the console script runs this file
without importing the package.
"""

import argparse
import ast
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# words of a command (one, or a verb and its subject) -> the module that runs it
COMMANDS: dict[tuple[str, ...], str] = {
    ("analyze", "signal"): "hf_efficient_attn.analysis.signal",
    ("analyze", "spans"): "hf_efficient_attn.analysis.spans",
    ("bench", "attention"): "hf_efficient_attn.bench.attention",
    ("bench", "calibrate"): "hf_efficient_attn.bench.calibrate",
    ("bench", "models"): "hf_efficient_attn.bench.models",
    ("compare",): "hf_efficient_attn.bench.compare",
    ("convert",): "hf_efficient_attn.convert.command",
    ("draw",): "hf_efficient_attn.analysis.draw",
    ("explain",): "hf_efficient_attn.analysis.explain",
    ("explore",): "hf_efficient_attn.analysis.explore",
    ("export-code",): "hf_efficient_attn.hub.export_code",
    ("families",): "hf_efficient_attn.analysis.families",
    ("sparsify",): "hf_efficient_attn.convert.sparsify",
}
# commands that take patterns, or models that have one
WITH_PATTERNS = ("attention", "convert", "draw", "explain", "explore", "sparsify")


# first word of a command of two words -> help text
VERBS = {
    "analyze": """Measure the hidden states and attention spans of a model (subcommands: {subjects})

    hf-efficient-attn analyze signal --model pre_ln sas path/to/model --tokens 256
    hf-efficient-attn analyze spans outputs/adaptive --text book.txt

Lengths, spans and distances are in tokens, entropies in nats, costs in multiply-adds for one token.""",
    "bench": """Measure time and memory of attention on this machine (subcommands: {subjects})

    hf-efficient-attn bench attention --quick
    hf-efficient-attn bench models --peers longformer --lengths 512 --json

Lengths are in tokens, times in milliseconds, memory in MiB. JSON keys name their units.""",
}


def build_parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser of the command line. Only the called command gets its options."""
    parser = argparse.ArgumentParser(
        prog="hf-efficient-attn",
        description="Efficient attention for Hugging Face Transformers: sparsify and convert models, draw and explain\n"
        "attention patterns, measure speed.",
        epilog="""For example, give a saved Llama a band of 1,020 tokens and the first four tokens, and draw them:

    hf-efficient-attn sparsify my_llama my_sparse_llama --pattern "band(1020, 0) | global(0, 1, 2, 3)"
    hf-efficient-attn draw my_sparse_llama

hf-efficient-attn COMMAND --help shows the options of a command, and examples.""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = "show the version and exit"
    parser.add_argument("--version", action=_Version, nargs=0, default=argparse.SUPPRESS, help=version)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    # words before the last word of a command -> the subparsers that the last word is added to
    groups: dict[tuple[str, ...], Any] = {(): commands}
    for (*verbs, name), path in COMMANDS.items():
        group = tuple(verbs)
        if group not in groups:
            subjects = ", ".join(subject for *others, subject in COMMANDS if others == verbs)
            group_parser = _add_parser(commands, verbs[0], VERBS[verbs[0]].format(subjects=subjects))
            groups[group] = group_parser.add_subparsers(required=True, metavar="SUBJECT")
        subparser = _add_parser(groups[group], name, _docstring(path))
        if tuple(arguments[: len(verbs) + 1]) == (*verbs, name):
            module = importlib.import_module(path)
            module.add_arguments(subparser)
            subparser.set_defaults(main=module.main)
            if name in WITH_PATTERNS:
                text = "a module with patterns of your own, in this folder or installed"
                subparser.add_argument("--import", action=_Import, metavar="MODULE", dest=argparse.SUPPRESS, help=text)
    return parser


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *given: Any) -> None:
        from hf_efficient_attn.requirements import VERSION

        print(f"{parser.prog} {VERSION}")
        parser.exit()


class _Import(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, module: Any, option: Any = None) -> None:
        # the folder of the console script is in its place
        sys.path.insert(0, str(Path.cwd()))
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
            hint = f"Write {module[:-3]}." if module.endswith(".py") else f"None is in {Path.cwd()}, or installed."
            parser.error(f"{option} {module}: no such module. {hint}")


def _docstring(module: str) -> str:
    """Return the docstring of a module of this package without importing it."""
    path = Path(__file__).parents[1].joinpath(*module.split(".")).with_suffix(".py")
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""


def _add_parser(commands: Any, name: str, text: str) -> argparse.ArgumentParser:
    """Add the parser of a command and return it. The list of commands shows the first line of its text."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=text.partition("\n")[0],
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command. An error that a user can fix is printed in one line, with exit code 2.

    These are errors of this package, files that cannot be read or written, and libraries that are not installed.
    `arguments` defaults to `sys.argv[1:]`.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = build_parser(arguments)
    args = parser.parse_args(arguments)
    try:
        args.main(args)
        sys.stdout.flush()
    except BrokenPipeError:
        # the reader of the output, such as `head`, has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        parser.exit(1)
    except (ValueError, OSError, ImportError) as error:
        message = _sentence(error)
        if message is None:
            raise
        parser.exit(2, f"{parser.prog}: error: {message}\n")


def _sentence(error: Exception) -> str | None:
    """Return the message of an error that a user can fix, in one line; None if the package itself is at fault."""
    from hf_efficient_attn.errors import EfficientAttentionError

    if isinstance(error, ValueError) and not isinstance(error, (EfficientAttentionError, OSError)):
        return None
    if isinstance(error, ModuleNotFoundError):
        library = (error.name or "").partition(".")[0]
        if library in ("", "hf_efficient_attn"):
            return None
        return f"This command needs {library}, which is not installed. Run: pip install {library}"
    if isinstance(error, ImportError):
        # an ImportError whose message says what to install has no `name`
        return str(error) if error.name is None else None
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}."
    return " ".join(str(error).split())
