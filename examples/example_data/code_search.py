"""The default data of `run_sentence_embeddings.py`: docstrings and the source code that they describe."""

import ast
import textwrap
from collections import Counter
from random import Random

from datasets import Dataset, DatasetDict, concatenate_datasets

from example_data.python_library import python_sources

NAMED = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_search_pairs() -> DatasetDict:
    """Return `query`, the first paragraph of a docstring, and `document`, the source around it without docstrings.

    A document is a file of this Python's standard library, or a class of a longer file, of 3,000 to 12,000 characters.
    A query is from any function, method or class in it, so most come after its first 512 tokens. A fifth of the files
    is for validation, with up to five queries per document; training has one per document. No download.
    """
    found = {"train": [], "validation": []}
    files = concatenate_datasets(list(python_sources().values()))
    for place, file in enumerate(sorted(files, key=lambda row: row["path"])):
        split = "train" if place % 5 else "validation"
        for document, queries in _documents(file["text"]):
            found[split].append((document, Random(document).sample(queries, len(queries))))
    times = Counter(query for documents in found.values() for _, queries in documents for query in set(queries))
    return DatasetDict(
        {
            split: Dataset.from_list(
                [
                    {"query": query, "document": document}
                    for document, queries in found[split]
                    for query in [query for query in queries if times[query] == 1][:most]
                ]
            )
            for split, most in (("train", 1), ("validation", 5))
        }
    )


def _documents(source: str) -> list[tuple[str, list[str]]]:
    """Return the file, or its classes if it is too long, each with its queries."""
    lines, found, left = source.splitlines(keepends=True), [], [ast.parse(source)]
    while left:
        node = left.pop()
        first, last = (node.lineno - 1, node.end_lineno) if isinstance(node, NAMED) else (0, len(lines))
        kept = set(range(first, last)).difference(*map(_docstring_lines, ast.walk(node)))
        document = textwrap.dedent("".join(lines[number] for number in sorted(kept))).strip()
        if len(document) > 12_000:
            left += [part for part in node.body if isinstance(part, ast.ClassDef)]
        elif len(document) >= 3_000:
            found.append((document, _queries(node)))
    return found


def _docstring_lines(node: ast.AST) -> range:
    has_one = isinstance(node, (ast.Module, *NAMED)) and ast.get_docstring(node) is not None
    return range(node.body[0].lineno - 1, node.body[0].end_lineno) if has_one else range(0)


def _queries(node: ast.AST) -> list[str]:
    """Return the first paragraphs, of 5 to 60 words, of the docstrings inside."""
    inside = [ast.get_docstring(part) or "" for part in ast.walk(node) if part is not node and isinstance(part, NAMED)]
    texts = [" ".join(text.split("\n\n")[0].split()) for text in inside]
    return [text for text in texts if 5 <= len(text.split()) <= 60]
