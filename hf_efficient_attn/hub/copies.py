"""Save models with a copy of the sources that compute them (`include_code`), so that they load without this package.

The copy has modules of this package as flat files with relative imports, so that one folder can hold them all. It is
generated from the installed package: a few root modules and everything that they import are copied. transformers finds
the files of a repository only by lines `from .module import name`, so every import takes this form. A module that is
imported as a whole defines the name `this_module`, which is imported instead.
"""

import ast
import re
import sys
import textwrap
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from transformers import PreTrainedConfig, PreTrainedModel

import hf_efficient_attn
from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.hub.kept_code import SPARSIFIED
from hf_efficient_attn.hub.stub import AUTO_CLASSES, family_classes, stub_classes
from hf_efficient_attn.integration.layer_patterns import FIELD
from hf_efficient_attn.integration.names import has_indexer
from hf_efficient_attn.integration.saving import has_pattern_inside, is_in_tree
from hf_efficient_attn.messages import shown
from hf_efficient_attn.patterns.config_spec import parse_pattern
from hf_efficient_attn.patterns.pattern import Pattern
from hf_efficient_attn.requirements import VERSION

PACKAGE = "hf_efficient_attn"
ROOT = Path(hf_efficient_attn.__file__).parents[1]
LONGEST_LINE = 120
# beginning of every copied file
ORIGIN = f"# Generated from {PACKAGE}/"
# beginnings of file names that are kept, because they show a reader of a repository where to start
KEPT_NAMES = ("modeling_", "configuration_")
THIS_MODULE = "\n\n# for modules that import this one as a module\nthis_module = sys.modules[__name__]\n"
# names of custom operators are global to the process, which may hold other copies; torch allows letters and digits in
# them, and the name of a module holds that of the folder
OPERATOR = re.compile(rf'custom_op\("{PACKAGE}::')
OWN_OPERATOR = """custom_op("in_" + __name__.encode().hex() + "::"""


@dataclass(frozen=True)
class Import:
    """An import of this package in one of its modules.

    Attributes:
        node: the statement.
        found: what it imports, as (module, name in the module or None for the module itself, alias).
    """

    node: ast.Import | ast.ImportFrom
    found: tuple[tuple[str, str | None, str | None], ...]


def copied_sources(roots: Iterable[str]) -> dict[str, str]:
    """Return the flat files for `roots` and everything they import, by file name."""
    imported = imports_from(roots)
    as_modules = {module for each in imported.values() for one in each for module, name, _ in one.found if name is None}
    sources = {each: copied_source(each, found, each in as_modules) for each, found in sorted(imported.items())}
    return {f"{flat_name(module)}.py": text for module, text in sources.items()}


def imports_from(roots: Iterable[str]) -> dict[str, tuple[Import, ...]]:
    """Return the imports of this package in every module that is reachable from `roots`, by module."""
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
    """Return the imports of this package in a module, including those inside functions."""
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
    """Return the source of a module with flat imports, below a notice of its origin and license."""
    lines: list[str] = source_of(module).splitlines()
    at_top = [each for each in imports if not each.node.col_offset]
    inner = [each for each in imports if each.node.col_offset]
    # from the last line to the first, so that line numbers stay valid; those at the top are adjacent
    for group in (*([each] for each in sorted(inner, key=first_line, reverse=True)), *([at_top] if at_top else [])):
        start, end = min(map(first_line, group)) - 1, max(each.node.end_lineno or 0 for each in group)
        indent = " " * group[0].node.col_offset
        lines[start:end] = textwrap.indent("\n".join(flat_imports(group)), indent).splitlines()
    text = "\n".join(map(with_own_operator, lines)) + "\n"
    if is_imported_itself:
        text = with_import_of_sys(text) + THIS_MODULE
    origin = file_of(module).relative_to(ROOT / PACKAGE).as_posix()
    notice, licence = f"{ORIGIN}{origin}, version {VERSION};", "licensed under Apache-2.0."
    gap = " " if len(f"{notice} {licence}") <= LONGEST_LINE else "\n# "
    return f"{notice}{gap}{licence}\n{text}"


def first_line(found: Import) -> int:
    return found.node.lineno


def with_own_operator(line: str) -> str:
    """Return the line. If it defines a custom operator, the operator gets a name of its own in each copy."""
    named = OPERATOR.sub(OWN_OPERATOR, line)
    if named == line or len(named) <= LONGEST_LINE:
        return named
    before, _, arguments = named.partition("(")
    return f"{before}(\n    {arguments[:-1]}\n)"


def with_import_of_sys(text: str) -> str:
    """Return a source with `import sys` at its place among the sorted imports."""
    if re.search(r"^import sys$", text, re.MULTILINE):
        return text
    nodes = [node for node in ast.parse(text).body if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = [node for node in nodes if isinstance(node, ast.Import) and is_standard(node)]
    earlier = [node for node in modules if node.names[0].name < "sys"]
    place = earlier[-1].lineno if earlier else nodes[0].lineno - 1
    # a blank line if `import sys` is a group of its own
    gap = "" if is_standard(nodes[0]) else "\n"
    lines = text.splitlines(keepends=True)
    return "".join([*lines[:place], f"import sys\n{gap}", *lines[place:]])


def is_standard(node: ast.Import | ast.ImportFrom) -> bool:
    """Return whether an import is of Python's own library."""
    name = node.names[0].name if isinstance(node, ast.Import) else node.module or ""
    relative = isinstance(node, ast.ImportFrom) and node.level
    return not relative and name.partition(".")[0] in sys.stdlib_module_names


def flat_imports(group: Iterable[Import]) -> list[str]:
    """Return the sorted lines that replace adjacent imports; each name with an alias has a line of its own."""
    plain: dict[str, list[str]] = {}
    found = []
    for module, name, alias in (each for one in group for each in one.found):
        if name is not None and alias is None:
            plain.setdefault(f".{flat_name(module)}", []).append(name)
        else:
            found.append((f".{flat_name(module)}", [f"{name or 'this_module'} as {alias}"]))
    return [line for module, names in sorted([*plain.items(), *found]) for line in written(module, names)]


def written(module: str, names: list[str]) -> list[str]:
    """Return the lines of one import, as a formatter would write them."""
    line = f"from {module} import {', '.join(names)}"
    return [line] if len(line) <= LONGEST_LINE else [f"from {module} import (", *in_lines(names), ")"]


def in_lines(names: Iterable[str]) -> list[str]:
    """Return names as lines of a list, one per line."""
    return [f"    {name}," for name in names]


T = TypeVar("T", PreTrainedModel, PreTrainedConfig)

INTERFACE = "hf_efficient_attn.integration.interface"
ARCHITECTURES = "hf_efficient_attn.integration.saving"
INDEXERS = "hf_efficient_attn.models.indexed.index_model"
# imports every kind of pattern that a saved config can name
PATTERNS = "hf_efficient_attn.patterns"
# beginning of the module of sparsified models
SPARSIFIED_ORIGIN = "# Generated by hf-efficient-attn"


def include_code(model_or_config: T) -> T:
    """Include the package's code in every save and push of a model or config; return the model or config.

    Loading it then needs only torch, transformers and `trust_remote_code=True`. The code is a copy of the
    sources of this package that the model needs, in files next to its config. If the package is imported, the package
    is used instead.

    >>> from hf_efficient_attn.models.adaptive_span import AdaptiveSpanConfig
    >>> include_code(AdaptiveSpanConfig()).auto_map["AutoModel"]
    'modeling_adaptive_span.AdaptiveSpanModel'

    Args:
        model_or_config: a model or config of this package, or of transformers with a pattern.

    Raises:
        ConfigurationError: any other model or config, or a pattern whose class is not part of this package.
    """
    config: Any = getattr(model_or_config, "config", model_or_config)
    if not isinstance(config, PreTrainedConfig) or not stub_classes(config):
        raise ConfigurationError(
            f"include_code takes models of this package, and models of transformers with an attention_pattern, not "
            f"{type(model_or_config).__name__}. Other models need no code of this package."
        )
    refuse_own_patterns(config)
    config.auto_map = {**(getattr(config, "auto_map", None) or {}), **copy_map(config)}
    return model_or_config


def refuse_own_patterns(config: PreTrainedConfig) -> None:
    """Raise ConfigurationError for a pattern whose class is not part of this package: a copy would lack its code."""
    for kind in sorted(pattern_kinds(config.to_dict())):
        if kind not in Pattern.kinds or Pattern.kinds[kind].__module__.partition(".")[0] != PACKAGE:
            raise ConfigurationError(
                f"The pattern {shown(kind)} is not part of {PACKAGE}, and only the code of {PACKAGE} is copied. Share "
                "the model without a copy of the code, together with the module that defines the pattern. To load the "
                f"model, install {PACKAGE} and import that module first."
            )


def pattern_kinds(saved: Any, is_pattern: bool = False) -> set[str]:
    """Return the kinds of all patterns in the dict of a config, including the parts of patterns.

    >>> sorted(pattern_kinds({"text_config": {"attention_pattern": [None, {"kind": "causal"}]}, "kind": "other"}))
    ['causal']
    """
    if isinstance(saved, list):
        return {kind for entry in saved for kind in pattern_kinds(entry, is_pattern)}
    if is_pattern and isinstance(saved, str):
        # strings in fields of patterns may be names or modes instead of expressions
        with suppress(ConfigurationError):
            return pattern_kinds(parse_pattern(saved).to_dict(), is_pattern)
    if not isinstance(saved, dict):
        return set()
    own = {saved["kind"]} if is_pattern and "kind" in saved else set()
    return own.union(*(pattern_kinds(value, is_pattern or name == FIELD) for name, value in saved.items()))


def has_copy(config: Any) -> bool:
    """Return whether a config says that its code is a copy of the sources."""
    auto_map = getattr(config, "auto_map", None)
    entry = auto_map.get("AutoConfig") if isinstance(auto_map, dict) and stub_classes(config) else None
    return isinstance(entry, str) and entry.rpartition("--")[2].partition(".")[0] in _modules(config)


def copy_map(config: PreTrainedConfig) -> dict[str, str]:
    """Return the `auto_map` of a config that is saved with a copy. It names a single file, which then runs once."""
    return {name: f"{_modules(config)[0]}.{cls}" for name, cls in stub_classes(config).items()}


def copy_files(config: PreTrainedConfig) -> dict[str, str]:
    """Return the copy of the sources for a config, by file name.

    Raises:
        ConfigurationError: a pattern whose class is not part of this package.
    """
    refuse_own_patterns(config)
    if is_in_tree(config):
        return {**_sources((AUTO_CLASSES, PATTERNS)), f"{SPARSIFIED}.py": _sparsified()}
    modeling, name = _modeling(config), f"{_modules(config)[0]}.py"
    roots = (modeling, INTERFACE, PATTERNS, ARCHITECTURES)
    # only models with indexers need the code that builds them
    files = _sources((*roots, INDEXERS) if has_indexer(config) else roots)
    needed = {PATTERNS: "__all__ as _", INTERFACE: "register_attention", ARCHITECTURES: "name_classes"}
    if has_indexer(config):
        needed[INDEXERS] = "build_indexers"
    lines = [line for module in sorted(needed) for line in written(f".{flat_name(module)}", [needed[module]])]
    classes = [f"{auto}={cls.__name__}" for auto, cls in family_classes()[type(config)].items()]
    named = f"name_classes({', '.join(classes)})"
    named_lines = [named] if len(named) <= LONGEST_LINE else ["name_classes(", *in_lines(classes), ")"]
    calls = ["register_attention()", *named_lines, *(["build_indexers()"] if has_indexer(config) else [])]
    registration = ["", *lines, "", "# as importing the package would do", *calls, ""]
    return {**files, name: files[name] + "\n".join(registration)}


def _sparsified() -> str:
    """Return the source of the module of sparsified models.

    It is the same for all models, because `keep_copy` saves the first copy that was loaded with every model.
    """
    # with the other module's `__getattr__`, this module finds the same names
    name = "__getattr__"
    lines = [
        f"{SPARSIFIED_ORIGIN} {VERSION}; licensed under Apache-2.0.",
        '"""Loads models of transformers whose attention follows a pattern, with a copy of hf_efficient_attn."""',
        "",
        f"from .{flat_name(PATTERNS)} import __all__ as _",
        "",
        "try:",
        "    # the package itself, where it is installed",
        f"    from {AUTO_CLASSES} import {name}",
        "except ImportError:",
        f"    from .{flat_name(AUTO_CLASSES)} import {name}",
        "",
    ]
    return "\n".join(lines)


def _modules(config: PreTrainedConfig) -> list[str]:
    """Return the names of the modules of a copy that define the classes of a config, that of the model first."""
    if is_in_tree(config):
        return [SPARSIFIED] if has_pattern_inside(config) else []
    return [flat_name(_modeling(config)), flat_name(type(config).__module__)]


def _modeling(config: PreTrainedConfig) -> str:
    return str(family_classes()[type(config)]["AutoModel"].__module__)


@cache
def _sources(roots: tuple[str, ...]) -> dict[str, str]:
    return copied_sources(roots)
