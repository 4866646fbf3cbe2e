"""What the data sets share: how copies are found, HTML is removed and a tenth is held out."""

import html
import re

from datasets import Dataset, DatasetDict


def letters(text: str) -> str:
    """Return the letters of a text, in lower case, which copies share even if their layout and numbers differ."""
    return re.sub(r"[\W\d_]+", "", text).lower()


def without_tags(page: str) -> str:
    """Return the visible text of an HTML page, in one line."""
    page = re.sub(r"(?is)<(script|style|head)\b.*?</\1\s*>|<!--.*?-->", " ", page)
    page = re.sub(r"(?i)</?(br|div|h\d|hr|li|ol|p|pre|table|td|tr|ul)\b[^>]*>", " ", page)
    return " ".join(html.unescape(re.sub("<[^>]*>", "", page)).split())


def held_out(rows: Dataset, **options) -> DatasetDict:
    """Return a tenth of the rows, always the same, as `validation`, and the others as `train`."""
    parts = rows.train_test_split(test_size=0.1, seed=0, **options)
    return DatasetDict(train=parts["train"], validation=parts["test"])
