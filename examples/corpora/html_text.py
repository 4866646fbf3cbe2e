"""Plain text of an HTML page."""

import re
from html.parser import HTMLParser

UNSEEN = {"script", "style", "head", "title"}
LINES = {"p", "br", "div", "tr", "li", "h1", "h2", "h3", "h4", "h5", "h6", "table", "ul", "ol", "pre", "hr"}


class _TextParser(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.pieces: list[str] = []
        self.unseen: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "body":
            self.unseen = None
        elif tag in UNSEEN and self.unseen is None:
            self.unseen = tag
        elif tag in LINES:
            self.pieces.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if tag == self.unseen:
            self.unseen = None
        elif tag in LINES:
            self.pieces.append("\n")

    def handle_data(self, data: str) -> None:
        if self.unseen is None:
            self.pieces.append(re.sub(r"\s+", " ", data))


def html_text(page: str) -> str:
    """Return what a reader sees: no tags, scripts or comments, a new line where a block begins or ends.

    >>> html_text("<head><title>T</title></head><p>1 &lt; 2,<b> or</b><script>x</script><br>not</p>")
    '1 < 2, or\\nnot'
    """
    parser = _TextParser()
    parser.feed(page)
    parser.close()
    lines = (re.sub(r"[ \xa0]+", " ", line).strip() for line in "".join(parser.pieces).splitlines())
    return "\n".join(line for line in lines if line)
