"""The rules of the house: imports of lower floors and of defining modules only."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

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
    "integration": 5,
    "models": 6,
    "training": 7,
    "convert": 7,
    "analysis": 7,
    "hub": 7,
    "bench": 7,
    "cli": 8,
    "lm_eval": 8,
    "__init__": 9,
    "__main__": 9,
}
# what backends share; no backend itself
SHARED_BY_BACKENDS = ("kernels", "machine_costs", "operator")
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
    # the operator of two of them
    is_of_backends = own != "backends.operator" and floor(own) == floor("backends") == floor(target)
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


def test_patterns_know_no_torch() -> None:
    for path in (PACKAGE / "patterns").rglob("*.py"):
        assert not any(name.partition(".")[0] == "torch" for name, _ in imports(path)), path


def test_only_the_integration_and_above_know_transformers() -> None:
    for path in MODULES:
        if floor(module_name(path)) < floor("integration"):
            assert not any(name.partition(".")[0] == "transformers" for name, _ in imports(path)), path
