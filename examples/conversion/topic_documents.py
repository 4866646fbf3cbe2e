"""Long documents, each on one topic, out of the docstrings of the Python standard library: no download."""

import ast
import sysconfig
from pathlib import Path

# topic → its modules; a folder stands for all in it
TOPICS = {
    "e-mail": ("smtplib.py", "imaplib.py", "poplib.py", "mailbox.py", "email"),
    "unit tests": ("unittest", "doctest.py"),
    "numbers": ("_pydecimal.py", "fractions.py", "statistics.py", "random.py", "numbers.py"),
    "compressed files": ("zipfile.py", "zipfile", "tarfile.py", "gzip.py", "bz2.py", "lzma.py"),
}


def topic_document(topic: str) -> str:
    """Return the docstrings of a topic's modules, one after the other, in the order of their files."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [file for name in TOPICS[topic] for file in _sources(root / name)]
    return "\n\n".join(text for file in files for text in _docstrings(file))


def _sources(path: Path) -> list[Path]:
    return sorted(path.rglob("*.py")) if path.is_dir() else [path] if path.exists() else []


def _docstrings(file: Path) -> list[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, kinds)]
    return [text for node in nodes if (text := ast.get_docstring(node))]
