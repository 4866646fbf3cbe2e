"""The rules of the house: imports of lower floors and defining modules only, nothing optional at import, and sizes."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import hf_efficient_attn

ROOT = Path(__file__).parents[1]
PACKAGE = Path(hf_efficient_attn.__file__).parent
FLOORS = {
    "errors": 0,
    "messages": 0,
    "requirements": 0,
    "pictures": 0,
    "patterns": 1,
    "layout": 2,
    "backends": 3,
    "attention": 4,
    "models": 5,
    "training": 6,
    "convert": 6,
    "analysis": 6,
    "hub": 6,
    "bench": 6,
    "cli": 7,
    "lm_eval": 7,
    "__init__": 8,
    "__main__": 8,
}
# what backends share; no backend itself
SHARED_BY_BACKENDS = ("alignment", "dense_kernel", "fused_cpu", "kernels", "machines")
# classes that shared a name, and intervals of keys that were called spans, before the glossary told them apart
RETIRED_CLASSES = {"HeadGroup", "Job", "Part", "Piece", "Place", "Problem", "TokenTables"}
SPANS = re.compile(r"(^|_)spans?(?!_tree)(_|$)", re.IGNORECASE)
SPANS_MEANT = ("patterns.span_tree", "patterns.interleaved_span_tree", "layout.terms")
OPTIONAL = ("accelerate", "datasets", "evaluate", "matplotlib", "onnx", "peft", "triton")
MODULES = sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def floor(name: str) -> int:
    return FLOORS[name.partition(".")[0]]


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Yield (module inside the package, number of leading dots) for every import in a file, also within functions."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, 0) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            is_package = (PACKAGE.parent / base.replace(".", "/")).is_dir() and base.startswith("hf_efficient_attn")
            names = [f"{base}.{alias.name}" for alias in node.names] if is_package else [base]
            yield from ((name, node.level) for name in names)


def wrong_import(own: str, name: str, dots: int) -> str | None:
    """Return what is wrong with the import of `name` in the module `own`."""
    if dots:
        is_allowed = dots == 1 and (own.startswith("models.") or own == "__init__")
        return None if is_allowed else "relative imports are for siblings within models/<family>"
    if not name.startswith("hf_efficient_attn."):
        return None
    target = name.removeprefix("hf_efficient_attn.")
    if floor(target) > floor(own):
        return f"floor {floor(own)} imports from floor {floor(target)}"
    is_of_backends = floor(own) == floor("backends") == floor(target)
    is_shared = is_of_backends and target.split(".")[1] in SHARED_BY_BACKENDS
    if is_of_backends and not is_shared and target.split(".")[:2] != own.split(".")[:2]:
        return "backends never import each other"
    is_module = (PACKAGE.parent / name.replace(".", "/")).with_suffix(".py").exists()
    return None if is_module or own.endswith("__init__") else "names are imported from the module that defines them"


def test_imports() -> None:
    wrong = [
        f"{module_name(path)} imports {name}: {problem}"
        for path in MODULES
        for name, dots in imports(path)
        if (problem := wrong_import(module_name(path), name, dots))
    ]
    assert not wrong, "\n".join(wrong)


def num_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the lines of a function with its signature, without decorators and docstring."""
    docstring = function.body[0]
    uncounted = docstring.end_lineno - docstring.lineno + 1 if ast.get_docstring(function) is not None else 0
    return function.end_lineno - function.lineno + 1 - uncounted


def too_long(path: Path) -> Iterator[str]:
    """Yield what is longer than the house allows: files of 300 lines, functions of 50."""
    lines = path.read_text().count("\n")
    if lines > 300:
        yield f"{path.relative_to(ROOT)}: {lines} lines"
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and num_lines(node) > 50:
            yield f"{path.relative_to(ROOT)}, {node.name}: {num_lines(node)} lines"


@pytest.mark.parametrize("folder", ["hf_efficient_attn", "tests", "examples"])
def test_sizes(folder: str) -> None:
    paths = sorted((ROOT / folder).rglob("*.py"))
    assert paths
    found = [line for path in paths for line in too_long(path)]
    assert not found, "\n".join(found)


def test_forward_of_a_backbone_fits_25_lines() -> None:
    lengths = {}
    for path in (PACKAGE / "models").glob("*/*.py"):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef) and node.name.endswith(("Model", "Encoder", "Decoder")):
                for method in (each for each in node.body if isinstance(each, ast.FunctionDef)):
                    if method.name == "forward":
                        body = method.body[bool(ast.get_docstring(method)) :]
                        lengths[node.name] = body[-1].end_lineno - body[0].lineno + 1
    assert len(lengths) >= 6
    assert not {name: length for name, length in lengths.items() if length > 25}


def whole_values(path: Path) -> Iterator[str]:
    """Yield the lines that write all of a value by `!r`, of any size, where `messages.shown` would cut it."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.FormattedValue) and node.conversion == ord("r"):
            yield f"{module_name(path)}, line {node.lineno}"


def test_messages_shorten_what_they_show() -> None:
    found = [line for path in MODULES for line in whole_values(path)]
    assert not found, "\n".join(found)


def retired_names(path: Path) -> Iterator[str]:
    """Yield the names up to floor 5 that the glossary of CONTRIBUTING.md has replaced."""
    has_intervals = floor(module_name(path)) <= floor("backends") and module_name(path) not in SPANS_MEANT
    for node in ast.walk(parsed(path)):
        name = getattr(node, "name", None) or getattr(node, "arg", None) or getattr(node, "id", None)
        is_retired = isinstance(node, ast.ClassDef) and name in RETIRED_CLASSES
        if is_retired or (has_intervals and isinstance(name, str) and SPANS.search(name)):
            yield f"{module_name(path)}, line {node.lineno}: {name}"


def test_words_keep_their_meanings() -> None:
    found = [line for path in MODULES if floor(module_name(path)) <= 5 for line in retired_names(path)]
    assert not found, "\n".join(found)


def test_the_glossary_is_short() -> None:
    """At most 25 words, each explained once."""
    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    words = re.findall(r"\*\*(.+?)\*\*", guide.partition("## Words")[2].partition("\n## ")[0])
    assert 0 < len(words) == len(set(words)) <= 25


def test_patterns_know_no_torch() -> None:
    for path in (PACKAGE / "patterns").rglob("*.py"):
        assert not any(name.partition(".")[0] == "torch" for name, _ in imports(path)), path


def test_import_needs_nothing_optional() -> None:
    """A fresh process in which every optional library is missing."""
    blocked = "\n".join(f"sys.modules[{name!r}] = None" for name in OPTIONAL)
    # and one that imports what is called like a function of the package, which stays the function
    script = f"import sys\n{blocked}\nimport hf_efficient_attn as hea, hf_efficient_attn.attention.explain\n"
    script += "print('imported' if callable(hea.attention) and callable(hea.explain) else '')"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.stdout.strip() == "imported", result.stderr
