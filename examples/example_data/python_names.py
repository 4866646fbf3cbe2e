"""What each name in a Python file is: the default data of `run_token_classification.py`."""

import ast
import builtins
import io
import keyword
import tokenize
from collections import ChainMap
from collections.abc import Iterator, Sequence

from datasets import ClassLabel, DatasetDict, Features, Value
from datasets import Sequence as ListOf

from example_data.python_library import python_sources

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
UNSEEN = (tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER)
KINDS = [
    "attribute",
    "builtin",
    "class",
    "function",
    "global variable",
    "imported name",
    "keyword argument",
    "local variable",
    "module",
    "parameter",
]
NO_KIND = -1


def name_kinds() -> DatasetDict:
    """Return the standard library as `tokens` and `ner_tags`, the kind of each name; -1 for what is no name.

    Tokens are Python's, without comments and with strings emptied; a line break has the indentation of what follows.
    What a name is follows from where it is bound, in this file: `from enum import Flag` makes `Flag` an imported name
    to the file's end. Names whose binding is not found, those in f-strings, and files beyond ASCII are left out.
    """
    kinds = ClassLabel(names=KINDS)
    features = Features({"path": Value("string"), "tokens": ListOf(Value("string")), "ner_tags": ListOf(kinds)})

    def label(row: dict[str, str]) -> dict[str, list]:
        pairs = list(labelled(row["text"]))
        tags = [NO_KIND if kind is None else kinds.str2int(kind) for _, kind in pairs]
        return {"tokens": [token for token, _ in pairs], "ner_tags": tags}

    sources = python_sources().filter(lambda row: row["text"].isascii())
    return sources.map(label, features=features, remove_columns="text")


def labelled(text: str) -> Iterator[tuple[str, str | None]]:
    """Yield the tokens of a Python source with the kind of each that is a name.

    >>> [pair for pair in labelled("import re\\ndef f(a):\\n  return re.X") if pair[1]]
    [('re', 'module'), ('f', 'function'), ('a', 'parameter'), ('re', 'module'), ('X', 'attribute')]
    """
    module = ast.parse(text)
    at: dict[tuple[int, int], str | None] = {}
    scope = ChainMap(_bound(module.body, "global variable"))
    for node in module.body:
        _place(node, scope, scope, at)
    statement: list[str] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NEWLINE:
            statement = []
        elif token.type in UNSEEN:
            continue
        elif not statement:
            yield "\n" + " " * token.start[1], None
        word = {tokenize.STRING: '""', tokenize.NEWLINE: ""}.get(token.type, token.string)
        if not word:
            continue
        is_name = token.type == tokenize.NAME and not keyword.iskeyword(word)
        yield word, _kind(statement, at.get(token.start)) if is_name else None
        statement.append(word)


def _kind(before: Sequence[str], placed: str | None) -> str | None:
    """Return the kind of a name by what stands before it in its statement, or as it was placed."""
    if before and before[-1] in ("def", "class"):
        return {"def": "function", "class": "class"}[before[-1]]
    if before and before[0] in ("import", "from"):
        return "imported name" if before[0] == "from" and "import" in before else "module"
    return placed


def _bound(body: Sequence[ast.AST], variable: str) -> dict[str, str]:
    """Return the kinds of the names that statements bind in their own scope."""
    variables, others, elsewhere = {}, {}, set()
    nodes = list(body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            others[node.name] = "class" if isinstance(node, ast.ClassDef) else "function"
            continue
        if isinstance(node, (ast.Lambda, *COMPREHENSIONS)):
            continue
        if isinstance(node, ast.Import):
            others |= {(alias.asname or alias.name.partition(".")[0]): "module" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            others |= {(alias.asname or alias.name): "imported name" for alias in node.names}
        elif isinstance(node, (ast.Global, ast.Nonlocal)):
            elsewhere.update(node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            variables[node.id] = variable
        elif isinstance(node, ast.ExceptHandler) and node.name:
            variables[node.name] = variable
        nodes += ast.iter_child_nodes(node)
    return {name: kind for name, kind in {**variables, **others}.items() if name not in elsewhere}


def _place(node: ast.AST, scope: ChainMap, enclosing: ChainMap, at: dict[tuple[int, int], str | None]) -> None:
    """Note where names stand and what they are.

    Args:
        scope: names that the node sees.
        enclosing: names that functions in it see, which are without those of a class's body.
    """
    inside: list[ast.AST] = []
    inner_scope = inner_enclosing = enclosing
    if isinstance(node, ast.JoinedStr):
        # before Python 3.12 their names are at no positions of the file
        return
    if isinstance(node, ast.Name):
        at[node.lineno, node.col_offset] = scope.get(node.id, "builtin" if hasattr(builtins, node.id) else None)
    elif isinstance(node, ast.Attribute):
        at[node.end_lineno, node.end_col_offset - len(node.attr)] = "attribute"
    elif isinstance(node, ast.keyword) and node.arg:
        at[node.lineno, node.col_offset] = "keyword argument"
    elif isinstance(node, ast.arg):
        at[node.lineno, node.col_offset] = "parameter"
    elif isinstance(node, (*FUNCTIONS, ast.Lambda)):
        inside = node.body if isinstance(node.body, list) else [node.body]
        own = _bound(inside, "local variable") | dict.fromkeys(_parameters(node.args), "parameter")
        inner_scope = inner_enclosing = enclosing.new_child(own)
    elif isinstance(node, ast.ClassDef):
        inside = node.body
        inner_scope = enclosing.new_child(_bound(inside, "attribute"))
    elif isinstance(node, COMPREHENSIONS):
        inside = list(ast.iter_child_nodes(node))
        own = _bound([comprehension.target for comprehension in node.generators], "local variable")
        inner_scope = scope.new_child(own)
        inner_enclosing = enclosing.new_child(own)
    for child in ast.iter_child_nodes(node):
        is_inside = any(child is one for one in inside)
        _place(child, inner_scope if is_inside else scope, inner_enclosing if is_inside else enclosing, at)


def _parameters(arguments: ast.arguments) -> list[str]:
    several = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    return [argument.arg for argument in several if argument]
