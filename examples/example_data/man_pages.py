"""Manual pages of Linux, by their sections."""

import gzip
import re
from collections import Counter

from datasets import Dataset, DatasetDict

from example_data import packages
from example_data.texts import held_out, letters

NUM_TITLES = 12
LEAST_SECTIONS, LEAST_WORDS = 4, 3


def man_pages() -> DatasetDict:
    """Return manual pages of the C library and the kernel: `titles` of their sections, and what stands there, `texts`.

    About 800 pages of eight sections, without code and tables; only sections whose title is one of the twelve most
    frequent, such as "RETURN VALUE" and "SEE ALSO". Debian raises the version with security updates.
    """
    archive = packages.fetch("apt-get", "manpages-dev")
    pages = {}
    for _, content in packages.members(archive, "usr/share/man/man[0-9]/*.gz"):
        sections = _sections(gzip.decompress(content).decode("utf-8", "replace"))
        pages.setdefault(letters("".join(text for _, text in sections)), sections)
    counts = Counter(title for sections in pages.values() for title, _ in sections)
    titles = {title for title, _ in counts.most_common(NUM_TITLES)}
    rows = []
    for sections in pages.values():
        kept = [(title, text) for title, text in sections if title in titles and len(text.split()) >= LEAST_WORDS]
        if len(kept) >= LEAST_SECTIONS:
            rows.append({"titles": [title for title, _ in kept], "texts": [text for _, text in kept]})
    return held_out(Dataset.from_list(rows))


# the words behind these stand side by side, each in the next of two fonts
FONTS = re.compile(r"\.(?:BI|BR|IB|IR|RB|RI)\b")
PLAIN = re.compile(r"\.(?:B|I|SM|SB|SS|SH|IP|TQ|UR|MT)\b")
LEFT_OUT = re.compile(r"(?ms)^\.TS.*?^\.TE|^\.EX.*?^\.EE|^['.]\\\".*?$|\\\".*?$")
ESCAPES = {
    r"\\f(?:\[\w*\]|\(..|.)|\\[&|^/,)%:]|\\s[-+]?\d": "",
    r"\\(?:\(aq|\(cq|\(oq|\[aq\])": "'",
    r"\\(?:\(dq|\(lq|\(rq)": '"',
    r"\\[- ~0]": lambda found: "-" if found.group() == "\\-" else " ",
    r"\\\(..|\\\[\w+\]|\\\*\(..": " ",
    r"\\e": "\\\\",
}


def _sections(page: str) -> list[tuple[str, str]]:
    """Return title and text of every section of a page in the language of man."""
    parts = re.split(r"(?m)^\.SH +(.+)$", LEFT_OUT.sub("", page.replace("\\\n", "")))
    return [
        (title.strip().strip('"'), " ".join(filter(None, map(_words, text.split("\n")))))
        for title, text in zip(parts[1::2], parts[2::2], strict=True)
    ]


def _words(line: str) -> str:
    """Return what a reader sees of a line.

    >>> _words('.BR qsort "(3), or"'), _words(".PP"), _words(r"a \\fIkey\\fP, \\-1")
    ('qsort(3), or', '', 'a key, -1')
    """
    is_font = FONTS.match(line)
    if is_font or PLAIN.match(line):
        words = [quoted or plain for quoted, plain in re.findall(r'"([^"]*)"|(\S+)', line.partition(" ")[2])]
        line = ("" if is_font else " ").join(words)
    elif line.startswith((".", "'")):
        return ""
    for escape, shown in ESCAPES.items():
        line = re.sub(escape, shown, line)
    return " ".join(line.split())
