"""One text, or a question and a text, as tokens with global tokens: for `structured_inputs`, which makes batches."""

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from hf_efficient_attn.errors import InputError
from hf_efficient_attn.messages import shown

Interval = tuple[int, int]

# token types of the authors: of long tokens, and of the global tokens of whole texts, question tokens and paragraphs
TEXT_TYPE, QUESTION_TYPE = 1, 3
WHOLE_TYPE, GLOBAL_QUESTION_TYPE, PARAGRAPH_TYPE = 0, 5, 7
NO_ANSWER = -100


@dataclass(frozen=True)
class Row:
    """What the global tokens of an example are.

    Attributes:
        links: the numbers of the global tokens of each token.
        global_types: the type of each global token, which says what it stands for.
        parts: the interval of each part of the text that has a global token; the last global tokens are theirs.
    """

    links: list[list[int]]
    global_types: list[int]
    parts: list[Interval]


def first_letters(text: str, offsets: Sequence[Interval]) -> list[int | None]:
    """Return where in its text the first letter of each token is; None: the token is none of the text.

    Byte-level and SentencePiece tokens begin with the space before their word, which is in no sentence. A token of
    nothing but white space is where it begins.

    >>> first_letters("It is.", [(0, 0), (0, 2), (2, 5), (5, 6)])
    [None, 0, 3, 5]
    """
    places: list[int | None] = []
    for start, stop in offsets:
        token = text[start:stop]
        # special tokens begin and end at 0
        places.append(None if stop <= start else start + (len(token) - len(token.lstrip())) % len(token))
    return places


def link(
    places: Sequence[int | None], is_question: Sequence[bool], parts: Sequence[Interval], has_whole_text: bool
) -> Row:
    """Return the global tokens of an example: of its text, of each token of its question, and of its parts.

    Args:
        places: where the first letter of each token is, if it is a token of the text.
        is_question: which tokens are the question's; all False: there is none.
    """
    for interval in parts:
        if not is_interval(interval):
            raise InputError(
                f"parts has {shown(interval)}; give (start, stop) in characters, with 0 <= start < stop, in a list for "
                "each text."
            )
    inside = [(part, [at is not None and part[0] <= at < part[1] for at in places]) for part in parts]
    kept = [(part, row) for part, row in inside if any(row)]
    rows = [(PARAGRAPH_TYPE, row) for _, row in kept]
    asked = [token for token, is_asked in enumerate(is_question) if is_asked]
    rows = [(GLOBAL_QUESTION_TYPE, [token == own for token in range(len(places))]) for own in asked] + rows
    if has_whole_text or not rows:
        # a text without parts has a global token all the same
        rows = [(WHOLE_TYPE, [at is not None for at in places]), *rows]
    links = [[number for number, (_, row) in enumerate(rows) if row[token]] for token in range(len(places))]
    return Row(links, [kind for kind, _ in rows], [(part[0], part[1]) for part, _ in kept])


def is_interval(given: Any) -> bool:
    """Return whether something is (start, stop) of integers, not empty."""
    if isinstance(given, str | Mapping) or not isinstance(given, Sized) or len(given) != 2:
        return False
    start, stop = given  # type: ignore[misc]
    return isinstance(start, Integral) and isinstance(stop, Integral) and 0 <= int(start) < int(stop)


def answer_positions(
    row: Row,
    places: Sequence[int | None],
    offsets: Sequence[Interval],
    is_cut: bool,
    text: str,
    answer: Interval | None,
) -> tuple[int, int, int]:
    """Return the first and the last token of an answer, and the global token of the first part in which it begins.

    White space around it is none of it. Without an answer among the tokens they are 0, 0 and −100.

    Args:
        is_cut: whether tokens of the text are cut away.

    Raises:
        InputError: an answer that is no interval of the text, or that has no token although nothing of it is cut away.
    """
    if answer is None:
        return 0, 0, NO_ANSWER
    if not is_interval(answer) or answer[1] > len(text):
        raise InputError(
            f"answers has {shown(answer)}; give (start, stop) in characters of its text, which has {len(text):,}, or "
            "None where there is no answer."
        )
    said = text[answer[0] : answer[1]]
    begin, end = answer[0] + len(said) - len(said.lstrip()), answer[0] + len(said.rstrip())
    kept = [token for token, at in enumerate(places) if at is not None]
    if is_cut and (not kept or begin < offsets[kept[0]][0] or end > offsets[kept[-1]][1]):
        # at least an end of it is cut away
        return 0, 0, NO_ANSWER
    found = [token for token, at in enumerate(places) if at is not None and at < end and offsets[token][1] > begin]
    if not found:
        raise InputError(
            f"answers has {shown(answer)}, which is {shown(said)} in its text, and no token has a letter of it. Give "
            "an interval with at least one word, or None where there is no answer."
        )
    first_part = len(row.global_types) - len(row.parts)
    holding = [number for number, (start, stop) in enumerate(row.parts) if start <= begin < stop]
    return found[0], found[-1], first_part + holding[0] if holding else NO_ANSWER
