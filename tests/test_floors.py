"""The import rules of the house: lower floors only, defining modules only, and nothing optional at import."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hf_efficient_attn

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
    "__init__": 8,
    "__main__": 8,
}
# what backends share; no backend itself
SHARED_BY_BACKENDS = ("backends.fused_cpu",)
OPTIONAL = ("accelerate", "datasets", "evaluate", "matplotlib", "onnx", "peft", "triton")
MODULES = sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def floor(name: str) -> int:
    return FLOORS[name.partition(".")[0]]


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Yield (module inside the package, number of leading dots) for every import in a file, also within functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, 0) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            is_package = (PACKAGE.parent / base.replace(".", "/")).is_dir() and base.startswith("hf_efficient_attn")
            names = [f"{base}.{alias.name}" for alias in node.names] if is_package else [base]
            yield from ((name, node.level) for name in names)


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_imports_go_down(path: Path) -> None:
    own = module_name(path)
    for name, dots in imports(path):
        if dots:
            assert dots == 1, f"{own}: parent-relative import of {name}"
            assert own.startswith("models.") or own == "__init__", f"{own}: relative import of {name}"
        elif name.startswith("hf_efficient_attn."):
            target = name.removeprefix("hf_efficient_attn.")
            assert floor(target) <= floor(own), f"{own} (floor {floor(own)}) imports {target} (floor {floor(target)})"
            if floor(own) == floor("backends") == floor(target) and target not in SHARED_BY_BACKENDS:
                same = target.split(".")[:2] == own.split(".")[:2]
                assert same, f"backends never import each other: {own} imports {target}"


@pytest.mark.parametrize("path", [path for path in MODULES if path.name != "__init__.py"], ids=module_name)
def test_names_come_from_the_module_that_defines_them(path: Path) -> None:
    for name, _ in imports(path):
        if name.startswith("hf_efficient_attn"):
            target = PACKAGE.parent / name.replace(".", "/")
            assert target.with_suffix(".py").exists(), f"{module_name(path)} imports {name} from a package's __init__"


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_sizes(path: Path) -> None:
    """Files of at most 400 lines, functions of at most 50 without their docstring."""
    source = path.read_text()
    assert source.count("\n") <= 400
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            if body:
                assert body[-1].end_lineno - body[0].lineno < 50, f"{module_name(path)}.{node.name}"


def test_patterns_know_no_torch() -> None:
    for path in (PACKAGE / "patterns").rglob("*.py"):
        assert not any(name.partition(".")[0] == "torch" for name, _ in imports(path)), path


def test_import_needs_nothing_optional() -> None:
    """A fresh process in which every optional library is missing."""
    blocked = "\n".join(f"sys.modules[{name!r}] = None" for name in OPTIONAL)
    script = f"import sys\n{blocked}\nimport hf_efficient_attn\nprint('imported')"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.stdout.strip() == "imported", result.stderr
