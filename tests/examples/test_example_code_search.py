"""The default pairs of `run_sentence_embeddings.py`, made of sources of this test."""

import pytest
from datasets import Dataset, DatasetDict
from run_example import EXAMPLES


def source(number: int, lines: int) -> str:
    """Return a file whose class and functions say what they do; two files say one thing alike."""
    body = "".join(f"        value_{line} = {line}\n" for line in range(lines))
    return f'''"""File number {number} of a test of the pairs."""


class Counter{number}:
    """Count what is given to it, as number {number}.

    The second paragraph is not part of the query.
    """

    def count(self):
        """Return the count that was reached so far."""
{body}
        return "{number}"
'''


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> DatasetDict:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from example_data import code_search

    texts = {f"{number}.py": source(number, lines=200) for number in range(10)}
    texts |= {"long.py": source(10, lines=400) + source(11, lines=200), "short.py": source(12, lines=2)}
    rows = [{"path": path, "text": text} for path, text in texts.items()]
    files = DatasetDict(train=Dataset.from_list(rows[1:]), validation=Dataset.from_list(rows[:1]))
    monkeypatch.setattr(code_search, "python_sources", lambda: files)
    return code_search.code_search_pairs()


def test_a_query_is_said_of_its_document_alone(pairs: DatasetDict) -> None:
    found = {row["query"]: row["document"] for split in pairs.values() for row in split}
    # the files of enough length, and no docstring that several have
    assert found.keys() == {f"Count what is given to it, as number {number}." for number in range(10)}
    for query, document in found.items():
        number = query.removesuffix(".").split()[-1]
        assert document.startswith(f"class Counter{number}:")
        assert document.endswith(f'return "{number}"')
        assert '"""' not in document


def test_no_document_is_in_both_splits(pairs: DatasetDict) -> None:
    train, validation = (set(pairs[split]["document"]) for split in ("train", "validation"))
    assert train
    assert validation
    assert not train & validation
