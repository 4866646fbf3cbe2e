"""What the data have in common: copies are found, HTML is removed, a tenth is held out."""

import html
import re

from datasets import Dataset, DatasetDict


def letters(text: str) -> str:
    """Return what copies share whatever their layout and numbers."""
    return re.sub(r"[\W\d_]+", "", text).lower()


def without_tags(page: str) -> str:
    """Return what a reader sees of HTML, in one line."""
    page = re.sub(r"(?is)<(script|style|head)\b.*?</\1\s*>|<!--.*?-->", " ", page)
    page = re.sub(r"(?i)</?(br|div|h\d|hr|li|ol|p|pre|table|td|tr|ul)\b[^>]*>", " ", page)
    return " ".join(html.unescape(re.sub("<[^>]*>", "", page)).split())


def held_out(rows: Dataset, **options) -> DatasetDict:
    """Return a tenth of the rows as `validation`, the others as `train`: always the same."""
    parts = rows.train_test_split(test_size=0.1, seed=0, **options)
    return DatasetDict(train=parts["train"], validation=parts["test"])
