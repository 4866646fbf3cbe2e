"""Plain text of a manual page: the roff requests and `man` macros that manual pages use, without groff."""

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field

CHARACTERS = {
    "em": "—", "en": "–", "hy": "-", "mi": "−", "bu": "•", "aq": "'", "dq": '"', "ga": "`", "ha": "^", "ti": "~",
    "lq": "“", "rq": "”", "oq": "‘", "cq": "’", "fm": "′", "sd": "″", "co": "©", "rg": "®", "R": "®", "tm": "™",
    "Tm": "™", "de": "°", "mc": "µ", "*m": "μ", "mu": "×", "di": "÷", "+-": "±", "<=": "≤", ">=": "≥", "!=": "≠",
    "->": "→", "<-": "←", "if": "∞", "12": "½", "14": "¼", "34": "¾", "sc": "§", "dg": "†", "rs": "\\", "sl": "/",
    "at": "@", "sh": "#", "ba": "|", "or": "|", "lB": "[", "rB": "]", "lC": "{", "rC": "}", "la": "⟨", "ra": "⟩",
    "ss": "ß", "ae": "æ", "AE": "Æ", "oe": "œ", "OE": "Œ", "/o": "ø", "/O": "Ø", ",c": "ç", "Po": "£", "Eu": "€",
}  # fmt: skip
ACCENTS = {":": "\u0308", "'": "\u0301", "`": "\u0300", "^": "\u0302", "~": "\u0303", "v": "\u030c"}
ESCAPE = re.compile(
    r"""\\(?:
      [fFmM] (?:\[[^]]*\]|\(..|.)             # font, colour
    | s (?:\[[^]]*\]|[+-]?\(..|'[^']*'|[+-]?\d)  # size
    | [hvwlLDbxXHSo] '[^']*'                  # moves and drawings
    | [nkgY] (?:\[[^]]*\]|[+-]?\(..|.)        # registers
    | (?P<string>\*)? (?:\[(?P<long>[^]]*)\]|\((?P<two>..)|(?(string)(?P<one>.)|(?!)))
    | N'(?P<code>\d+)'
    | (?P<other>.)
    )""",
    re.VERBOSE,
)
OTHER = {"e": "\\", "\\": "\\", "t": "\t", "~": " ", "0": " ", **{character: character for character in "-.'`_ "}}

JOINED = {"BR", "RB", "BI", "IB", "IR", "RI"}
PARAGRAPHS = {"PP", "P", "LP", "HP", "sp"}
LINES = {"br", "RS", "RE", "INDENT", "UNINDENT", "ti", "in"}
NO_FILL = {"nf": False, "EX": False, "fi": True, "EE": True}
# requests of layout alone; of any other, such as `.B`, `.UR` or a macro of the page's own, the words are kept
LAYOUT = {
    "TH", "ft", "ad", "nh", "hy", "PD", "ta", "ne", "na", "bp", "UC", "UE", "ME", "YS", "nr", "ds", "so", "el", "ll",
}  # fmt: skip


def roff_text(source: str) -> dict[str, str]:
    r"""Return {heading: text} of the sections of a manual page, in order.

    Text between `.nf` and `.fi` keeps its lines; other lines are joined to paragraphs, parted by an empty line.
    Tables become a line a row. Conditionals and macro definitions are left out.

    >>> roff_text('.TH x 1\n.SH NAME\nx \\- do it\n.SH TEXT\nSee\n.BR "x y" (1),\n\\fBnow\\fP.')
    {'NAME': 'x - do it', 'TEXT': 'See x y(1), now.'}
    """
    page = _Page()
    lines = iter(re.sub(r"\\\n", "", source).splitlines())
    for line in lines:
        line = re.sub(r'\\["#].*', "", line)
        request = re.match(r"[.']\s*(\w+|\\?\")?(.*)", line)
        if request is None:
            page.add_line(unescape(line))
        elif request[1] in ("de", "de1", "ig"):
            _skip(lines, until="..")
        elif request[1] in ("if", "ie"):
            _skip_block(line, lines)
        elif request[1]:
            page.request(request[1], request[2].strip())
    return page.sections()


def unescape(text: str) -> str:
    r"""Return text without roff's escapes.

    >>> unescape(r"\fI\-x\fP\(emna\[:i]ve \(aqC:\e\(aq \s-1SMALL\s+1\&.")
    "-x—naïve 'C:\\' SMALL."
    """
    return ESCAPE.sub(_character, text)


def _character(escape: re.Match) -> str:
    name = escape["long"] or escape["two"] or escape["one"]
    if name is not None:
        return CHARACTERS.get(name) or _composed(name)
    if escape["code"]:
        return chr(int(escape["code"]))
    return OTHER.get(escape["other"] or "", "")


def _composed(name: str) -> str:
    """Return the character named by an accent and a letter (`:a`) or by its code (`u00E4`), or nothing."""
    if re.fullmatch("u[0-9A-F]{4,6}", name):
        return chr(int(name[1:], 16))
    accent = ACCENTS.get(name[0]) if len(name) == 2 else None
    return unicodedata.normalize("NFC", name[1] + accent) if accent else ""


def _skip(lines: Iterator[str], until: str) -> None:
    for line in lines:
        if line.startswith(until):
            return


def _skip_block(line: str, lines: Iterator[str]) -> None:
    """Leave out the rest of a conditional: up to the brace that closes the first one, if its line opens one."""
    depth = line.count(r"\{") - line.count(r"\}")
    while depth > 0:
        line = next(lines, r"\}" * depth)
        depth += line.count(r"\{") - line.count(r"\}")


def _arguments(words: str) -> list[str]:
    """Return the arguments of a macro: words, or phrases in double quotes, in which two quotes stand for one."""
    found = re.findall(r'"((?:[^"]|"")*)"?|((?:\\ |[^ \t])+)', words)
    return [unescape(quoted.replace('""', '"') or plain) for quoted, plain in found]


@dataclass
class _Page:
    """What has been read of a page: the pieces of each section, and what the next line is."""

    pieces: dict[str, list[str]] = field(default_factory=lambda: {"": []})
    heading: str = ""
    filling: bool = True
    in_table: bool = False
    in_table_format: bool = False
    next_is_heading: bool = False
    next_is_tag: bool = False

    def add(self, text: str) -> None:
        self.pieces[self.heading].append(text)

    def add_line(self, line: str) -> None:
        if self.next_is_heading:
            self.begin_section(line)
        elif self.in_table:
            self.add_table_line(line)
        elif self.next_is_tag and line.strip():
            self.next_is_tag = False
            self.add(line + "\n")
        elif self.filling:
            self.add(line + " " if line.strip() else "\n\n")
        else:
            self.add(line + "\n")

    def add_table_line(self, line: str) -> None:
        """Keep the cells of a table: `T{` and `T}` on lines of their own enclose one that is filled."""
        if self.in_table_format:
            self.in_table_format = not line.rstrip().endswith(".")
            return
        if line.startswith("T}"):
            self.filling, line = False, line[2:]
        cell_follows = line.endswith("T{")
        line = re.sub(r"^[_=]$|T\{$", "", line).replace("\t", "  ")
        self.filling = self.filling or cell_follows
        self.add(line + (" " if self.filling else "\n"))

    def begin_section(self, heading: str) -> None:
        self.next_is_heading, self.filling, self.in_table = False, True, False
        self.heading = heading.strip()
        self.pieces.setdefault(self.heading, [])

    def request(self, name: str, words: str) -> None:
        arguments = _arguments(words)
        if name in JOINED:
            self.add_line("".join(arguments))
        elif name not in LAYOUT and not self.breaks(name, arguments) and arguments:
            self.add_line(" ".join(arguments))

    def breaks(self, name: str, arguments: list[str]) -> bool:
        """Obey a request that ends a line, and return whether it is one."""
        if name in NO_FILL:
            self.filling = NO_FILL[name]
            self.add("\n")
        elif name in LINES or name in PARAGRAPHS:
            self.add("\n" if name in LINES or not self.filling else "\n\n")
        elif name in ("TS", "TE", "T"):
            self.in_table = self.in_table_format = name != "TE"
            self.filling = name == "TE"
            self.add("\n")
        elif name in ("TP", "TQ", "IP", "SH", "SS"):
            self.begin_block(name, " ".join(arguments[:1] if name == "IP" else arguments))
        else:
            return False
        return True

    def begin_block(self, name: str, title: str) -> None:
        if name == "SH":
            self.next_is_heading = True
            if title:
                self.begin_section(title)
            return
        self.add("\n" if name == "TQ" else "\n\n")
        self.filling = True
        self.next_is_tag = name in ("TP", "TQ") or (name == "SS" and not title)
        if title and name in ("IP", "SS"):
            self.add(title + (" " if title == "•" else "\n"))

    def sections(self) -> dict[str, str]:
        texts = {heading: "".join(pieces) for heading, pieces in self.pieces.items()}
        texts = {heading: re.sub(r" *\n *", "\n", re.sub(r"[ \t\xa0]+", " ", text)) for heading, text in texts.items()}
        texts = {heading: re.sub(r"\n{3,}", "\n\n", text).strip() for heading, text in texts.items()}
        return {heading: text for heading, text in texts.items() if text}
