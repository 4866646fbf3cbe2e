"""Python's documentation, as prose."""

import re

from datasets import Dataset, DatasetDict

from example_data import packages
from example_data.texts import held_out, letters


def python_documentation() -> DatasetDict:
    """Return the prose of Python 3.11's documentation: `text`, without code and markup.

    460 files with a median of 1,100 words, at most 21,000. Debian's security updates raise the version.
    """
    texts = {}
    for _, content in packages.members(packages.fetch("apt-get", "python3.11-doc"), "*/html/_sources/*.rst.txt"):
        text = _prose(content.decode("utf-8"))
        if len(text.split()) >= 50:
            texts.setdefault(letters(text), {"text": text})
    return held_out(Dataset.from_list(list(texts.values())))


# what is left out of a page, with everything indented below it: code, tables, lists of contents, comments
NOT_PROSE = re.compile(
    r"""(?x)>>>|[+][-=]|[|]|[=~^"'*+.:_`#-]{3}|\.\.(?!\ [\w:-]+::)|\.\.\ (\S*(code|index|list|literal|module|table)\S*
    |doctest|highlight|image|include|math|only|raw|rubric|sectionauthor|test\w+|toctree)::"""
)
MARKUP = {
    r"(?m)^ *\.\. (version|deprecated)[\w-]*:: [\d.]+|^ *\.\. [\w:-]+::|^ *(\*|-|#\.) |^ *:[\w -]+:( .*)?$": "",
    r"(?m)^ *([=~^\"'*+.#-])\1{2,}$": "",
    r"``(.+?)``": r"\1",
    r":[\w:+-]+:`~\.?[^`<]*?([^`<.]+)`": r"\1",
    r"(:[\w:+-]+:)?`!?([^`<]+?)(\s*<[^`]*>)?`_{0,2}": r"\2",
    r"(?<!\w)(\*{1,2})([^\s*]|[^\s*][^*]*[^\s*])\1(?!\w)": r"\2",
    r"\|(\w+)\|": r"\1",
    r"\\": "",
    r"::$": ":",
}


def _prose(page: str) -> str:
    """Return the paragraphs of a reStructuredText file."""
    kept, code_below = [], None
    for block in re.split(r"\n\s*\n", page.expandtabs()):
        text, indent = block.strip(), len(block.lstrip("\n")) - len(block.lstrip())
        if code_below is not None and indent > code_below:
            continue
        is_prose = text and not NOT_PROSE.match(text)
        code_below = None if is_prose and (text.startswith("..") or not text.endswith("::")) else indent
        if is_prose:
            for pattern, shown in MARKUP.items():
                text = re.sub(pattern, shown, text).strip()
            kept.append(" ".join(text.split()))
    return "\n\n".join(filter(re.compile(r"\w").search, kept))
