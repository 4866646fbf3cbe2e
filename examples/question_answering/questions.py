"""Questions about a text as pairs of token sequences, and spans of tokens as answers in words.

Tokens of the text that also stand in the question are marked by their token type: the "exact match" feature of Chen et
al. (arXiv:1704.00051). Models trained from random weights for minutes do not learn to compare words by themselves.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from corpora.splits import Row
from shared.own_data import shown
from transformers import BatchEncoding, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Question:
    """A question and as much of its text as fits, as tokens.

    Attributes:
        input_ids: `<s> question </s> text </s>`.
        token_type_ids: 1 for tokens of the text that stand in the question, else 0.
        offsets: for each token of the text (start, end) in characters of `context`.
        first: index of the text's first token in `input_ids`.
        span: indices in `input_ids` of the answer's first and last token; None: it begins or ends beyond the cut.
        answer_at: index that the answer's first token has in the whole input; None: no answer was given.
    """

    input_ids: list[int]
    token_type_ids: list[int]
    offsets: list[tuple[int, int]]
    first: int
    span: tuple[int, int] | None
    answer_at: int | None
    question: str
    context: str
    answers: list[str]

    def inputs(self) -> dict[str, Any]:
        """Return what the model reads."""
        return {"input_ids": self.input_ids, "token_type_ids": self.token_type_ids}

    def example(self) -> dict[str, Any]:
        """Return the training example."""
        return {**self.inputs(), "start_positions": self.span[0], "end_positions": self.span[1]}


def answer_fault(row: Row) -> str | None:
    """Return why a row's answers are none of its text; None: they are, or there is none.

    >>> answer_fault({"context": "a red fox", "answers": {"text": ["red"], "answer_start": [1]}})
    "answer 'red' is not at answer_start 1 of the context, which has ' re' there."
    """
    texts, starts = (row["answers"].get(name) for name in ("text", "answer_start"))
    if not isinstance(texts, list) or not isinstance(starts, list) or len(texts) != len(starts):
        return f"column answers is {shown(row['answers'])}. Allowed: a list text and a list answer_start, as long."
    for text, start in zip(texts, starts, strict=True):
        if not isinstance(text, str) or not text or not isinstance(start, int) or start < 0:
            return f"an answer is {shown(text)}, at {shown(start)}. Allowed: text, at 0 or more characters."
        found = row["context"][start : start + len(text)]
        if found != text:
            return (
                f"answer {shown(text)} is not at answer_start {start} of the context, which has {shown(found)} there."
            )
    return None


def tokenize(rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, max_length: int) -> list[Question]:
    """Return the rows, in SQuAD's form, as questions of at most `max_length` tokens; the end of a text is cut off."""
    questions, contexts = [row["question"].strip() for row in rows], [row["context"] for row in rows]
    encoded = tokenizer(questions, contexts, verbose=False)
    return [_question(row, encoded, number, tokenizer.sep_token_id, max_length) for number, row in enumerate(rows)]


def _question(row: Row, encoded: BatchEncoding, number: int, sep_token_id: int, max_length: int) -> Question:
    ids = encoded["input_ids"][number]
    first = ids.index(sep_token_id) + 1
    kept = min(len(ids) - 1, max_length - 1)
    texts, starts = row["answers"]["text"], row["answers"]["answer_start"]
    span = None
    if texts:
        ends = (starts[0], starts[0] + len(texts[0]) - 1)
        span = tuple(encoded.char_to_token(number, character, sequence_index=1) for character in ends)
    is_whole = span is not None and None not in span and span[1] < kept
    asked = set(ids[1 : first - 1])
    return Question(
        input_ids=[*ids[:kept], sep_token_id],
        token_type_ids=[0] * first + [int(token in asked) for token in ids[first:kept]] + [0],
        offsets=encoded[number].offsets[first:kept],
        first=first,
        span=span if is_whole else None,
        answer_at=span[0] if span else None,
        question=row["question"],
        context=row["context"],
        answers=texts,
    )


def best_answer(question: Question, start_logits: np.ndarray, end_logits: np.ndarray, max_answer_tokens: int) -> str:
    """Return the words of the likeliest span inside the text.

    Args:
        start_logits, end_logits: [tokens] of `input_ids`, or longer where it was padded.
    """
    text = slice(question.first, question.first + len(question.offsets))
    starts, ends = start_logits[text], end_logits[text]
    if not len(starts):
        return ""
    likely = np.argsort(starts)[::-1][:20]
    windows = [ends[start : start + max_answer_tokens] for start in likely]
    scores = [starts[start] + window.max() for start, window in zip(likely, windows, strict=True)]
    best = int(np.argmax(scores))
    start = int(likely[best])
    end = start + int(windows[best].argmax())
    return question.context[question.offsets[start][0] : question.offsets[end][1]].strip()
