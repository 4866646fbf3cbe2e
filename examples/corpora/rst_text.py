"""Prose of a reStructuredText file: no code, tables of contents, roles or link targets."""

import re

# their content is prose; the content of any other directive is left out
PROSE = {
    "attribute", "availability", "c:function", "c:macro", "c:member", "c:struct", "c:type", "c:var", "class",
    "classmethod", "cmdoption", "data", "decorator", "deprecated", "deprecated-removed", "describe", "envvar",
    "exception", "function", "impl-detail", "important", "index-free", "method", "module-free", "note", "opcode",
    "option", "pdbcommand", "seealso", "staticmethod", "tip", "topic", "versionadded", "versionchanged", "warning",
}  # fmt: skip
DIRECTIVE = re.compile(r"\.\.(?:\s+(?P<name>[\w:-]+?)::(?P<rest>.*)|\s.*|$)")
RULE = re.compile(r"""[=\-~^"'*+#.:_`|\s]+""")
TABLE_ROW = re.compile(r"[|+].*[|+]")
BULLET = re.compile(r"^(?:[*-]|#\.) +(?=\S)")
FIELD = re.compile(r":[\w -]+:(\s|$)")
VERSION = re.compile("version|deprecated")
ROLE = re.compile(r":[\w:+-]+:`(?P<shown>[^`<]+?)(?:\s*<[^`]*>)?`")
LINK = re.compile(r"`(?P<shown>[^`<]+?)\s*<[^`]*>`__?")
REFERENCE = re.compile(r"(?<!`)`(?P<shown>[^`]+)`(?!`)(?:__?)?")


def rst_text(source: str) -> str:
    r"""Return the prose of a file: paragraphs of joined lines, parted by an empty line.

    >>> rst_text("Title\n=====\n\nSee :func:`~os.path.join`\nand ``x``::\n\n   code()\n\n.. note:: Works\n   always.")
    'Title\n\nSee join and x:\n\nWorks always.'
    """
    paragraphs: list[list[str]] = [[]]
    skipped_indent: int | None = None  # lines indented more than this are left out
    in_session = False  # from ">>>" to the next empty line
    for line in source.expandtabs().splitlines():
        text, indent = line.strip(), len(line) - len(line.lstrip())
        in_session = bool(text) and (in_session or text.startswith(">>>"))
        if not text or RULE.fullmatch(text) or TABLE_ROW.fullmatch(text):
            paragraphs.append([])
            continue
        if in_session or (skipped_indent is not None and indent > skipped_indent):
            continue
        text, has_prose = _begin(text, paragraphs)
        skipped_indent = None if has_prose else indent
        if text and not FIELD.match(text):
            paragraphs[-1].append(text)
    joined = (" ".join(unmarked(" ".join(lines)).split()) for lines in paragraphs)
    return "\n\n".join(text for text in joined if re.search(r"\w", text))


def _begin(text: str, paragraphs: list[list[str]]) -> tuple[str, bool]:
    """Return the prose of a line and whether what is indented below it is prose; begin a paragraph where it does."""
    directive = DIRECTIVE.match(text)
    if directive:
        paragraphs.append([])
        name, rest = directive["name"] or "", (directive["rest"] or "").strip()
        if name not in PROSE:
            return "", False
        return rest.partition(" ")[2] if VERSION.match(name) else rest, True
    if BULLET.match(text):
        paragraphs.append([])
        text = BULLET.sub("", text)
    return (text[:-1], False) if text.endswith("::") else (text, True)


def unmarked(text: str) -> str:
    r"""Return text without inline markup.

    >>> unmarked(r"*a* **b** ``c[0]`` :class:`!D` :ref:`e <f>` `g <http://h>`_ |i|\s")
    'a b c[0] D e g is'
    """
    text = ROLE.sub(_shown, LINK.sub(r"\g<shown>", text))
    text = re.sub(r"``(.+?)``", r"\1", REFERENCE.sub(r"\g<shown>", text))
    text = re.sub(r"(?<![\w*])\*{1,2}([^\s*](?:[^*]*[^\s*])?)\*{1,2}(?![\w*])", r"\1", text)
    return re.sub(r"\\(.)", r"\1", re.sub(r"\|(\w+)\|", r"\1", text)).replace("::", ":").strip()


def _shown(role: re.Match) -> str:
    """Return what a role shows: of `~a.b`, its last part."""
    shown = role["shown"]
    return shown[1:].rsplit(".", 1)[-1] if shown.startswith("~") else shown.lstrip("!.")
