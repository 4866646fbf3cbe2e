"""Sources of this package as flat files that import each other relatively, so that a folder can hold them all.

Generated from the package as it is installed: the imports of some modules are followed, and nothing else is copied.
transformers finds the files of a repository by lines `from .module import name` alone, so every import takes this form;
where a module is imported as such, it is the name `this_module`, which each such module gets.
"""

import ast
import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import hf_efficient_attn
from hf_efficient_attn.requirements import VERSION

PACKAGE = "hf_efficient_attn"
ROOT = Path(hf_efficient_attn.__file__).parents[1]
LONGEST_LINE = 120
# what every file begins with
ORIGIN = f"# Generated from {PACKAGE}/"
# names that tell a reader of a repository where to begin, and therefore stay
KEPT_NAMES = ("modeling_", "configuration_")
THIS_MODULE = "\n\n# for modules that import this one as a module\nthis_module = sys.modules[__name__]\n"
# custom operators have names for the whole process, in which there may be other copies
OPERATOR = re.compile(rf'custom_op\("{PACKAGE}::')
OWN_OPERATOR = """custom_op(__name__.replace(".", "_") + "::"""


@dataclass(frozen=True)
class Import:
    """An import of this package in one of its modules: `node`, and (module, name in it or None for itself, alias)."""

    node: ast.Import | ast.ImportFrom
    found: tuple[tuple[str, str | None, str | None], ...]


def copied_sources(roots: Iterable[str]) -> dict[str, str]:
    """Return the flat files for modules and all that they import, by file name."""
    imported = imports_from(roots)
    as_modules = {module for each in imported.values() for one in each for module, name, _ in one.found if name is None}
    sources = {each: copied_source(each, found, each in as_modules) for each, found in sorted(imported.items())}
    return {f"{flat_name(module)}.py": text for module, text in sources.items()}


def imports_from(roots: Iterable[str]) -> dict[str, tuple[Import, ...]]:
    """Return the imports of this package in every module that the roots reach, by module."""
    found: dict[str, tuple[Import, ...]] = {}
    waiting = list(roots)
    while waiting:
        module = waiting.pop()
        if module not in found:
            found[module] = imports_in(module)
            waiting += [target for each in found[module] for target, _, _ in each.found]
    return found


# families share most modules
@cache
def imports_in(module: str) -> tuple[Import, ...]:
    """Return what a module imports of this package, also within functions."""
    nodes = [node for node in ast.walk(ast.parse(source_of(module))) if isinstance(node, ast.ImportFrom)]
    found = [(node, absolute_base(module, node)) for node in nodes]
    return tuple(
        Import(node, tuple(imported_name(base, alias) for alias in node.names))
        for node, base in found
        if base.partition(".")[0] == PACKAGE
    )


def absolute_base(module: str, node: ast.ImportFrom) -> str:
    """Return the module from which an import takes its names."""
    if not node.level:
        return node.module or ""
    return ".".join([*module.split(".")[: -node.level], *filter(None, [node.module])])


def imported_name(base: str, alias: ast.alias) -> tuple[str, str | None, str | None]:
    inner = f"{base}.{alias.name}"
    return (inner, None, alias.asname or alias.name) if is_module(inner) else (base, alias.name, alias.asname)


def is_module(name: str) -> bool:
    return file_of(name).is_file()


def file_of(module: str) -> Path:
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def source_of(module: str) -> str:
    return file_of(module).read_text(encoding="utf-8")


def flat_name(module: str) -> str:
    """Return the name of a module's file without its suffix.

    >>> flat_name("hf_efficient_attn.patterns.bands")
    'hea_patterns_bands'
    >>> flat_name("hf_efficient_attn.models.adaptive_span.modeling_adaptive_span")
    'modeling_adaptive_span'
    """
    last = module.rpartition(".")[2]
    return last if last.startswith(KEPT_NAMES) else "_".join(["hea", *module.split(".")[1:]])


def copied_source(module: str, imports: Iterable[Import], is_imported_itself: bool) -> str:
    """Return the source of a module with flat imports, under a line that says where it comes from."""
    lines: list[str] = source_of(module).splitlines()
    for each in sorted(imports, key=lambda one: one.node.lineno, reverse=True):
        start, end = each.node.lineno - 1, each.node.end_lineno
        indent = " " * each.node.col_offset
        lines[start:end] = textwrap.indent("\n".join(flat_imports(each)), indent).splitlines()
    text = OPERATOR.sub(OWN_OPERATOR, "\n".join(lines) + "\n")
    if is_imported_itself:
        text = with_import_of_sys(text) + THIS_MODULE
    origin = file_of(module).relative_to(ROOT / PACKAGE).as_posix()
    return f"{ORIGIN}{origin} of hf-efficient-attn {VERSION}; licensed under Apache-2.0.\n{text}"


def with_import_of_sys(text: str) -> str:
    """Return a source that imports `sys`, behind its docstring."""
    first = next(node for node in ast.parse(text).body if isinstance(node, ast.Import | ast.ImportFrom))
    lines = text.splitlines(keepends=True)
    is_there = re.search(r"^import sys$", text, re.MULTILINE)
    return text if is_there else "".join([*lines[: first.lineno - 1], "import sys\n", *lines[first.lineno - 1 :]])


def flat_imports(found: Import) -> list[str]:
    """Return the lines that take the place of an import."""
    by_module: dict[str, list[str]] = {}
    for module, name, alias in found.found:
        what = "this_module" if name is None else name
        by_module.setdefault(module, []).append(f"{what} as {alias}" if alias else what)
    return [line for module, names in by_module.items() for line in written(f".{flat_name(module)}", names)]


def written(module: str, names: list[str]) -> list[str]:
    """Return the lines of one import, as a formatter would write them."""
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= LONGEST_LINE:
        return [line]
    return [f"from {module} import (", *(f"    {name}," for name in names), ")"]
