"""One text, or a question and a text, as tokens with global tokens: for `structured_inputs`, which makes batches."""

import itertools
import operator
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hf_efficient_attn.errors import InputError
from hf_efficient_attn.messages import shown
from hf_efficient_attn.models.inputs.whole_numbers import entries, whole_numbers

Interval = tuple[int, int]
# one interval, or the mentions of an entity
TextPart = Interval | Sequence[Interval]
# the type of its global tokens, and its number
Context = tuple[int, int]
NO_CONTEXT: Context = (-1, -1)

# token types of the authors: of long tokens, and of the global tokens of whole texts, question tokens, candidates and
# paragraphs
TEXT_TYPE, QUESTION_TYPE, CANDIDATE_TYPE = 1, 3, 4
WHOLE_TYPE, GLOBAL_QUESTION_TYPE, GLOBAL_CANDIDATE_TYPE, PARAGRAPH_TYPE = 0, 5, 6, 7
NO_ANSWER = -100


@dataclass(frozen=True)
class Row:
    """What the global tokens of an example are.

    Attributes:
        links: the numbers of the global tokens of each token.
        global_types: the type of each global token, which says what it stands for.
        contexts: the number of the context of each global token, counted in their order. The whole text is a context
            of its own, and so are the tokens of the question.
        long_contexts: the number of the context of each token, −1 if no part has one; empty: no contexts are given.
        parts: the intervals of each part of the text that has a global token; the last global tokens are theirs.
        candidate_tokens: the tokens of the places at which candidate answers are listed.
    """

    links: list[list[int]]
    global_types: list[int]
    contexts: list[int]
    long_contexts: list[int]
    parts: list[list[Interval]]
    candidate_tokens: set[int]


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
    places: Sequence[int | None],
    is_question: Sequence[bool],
    parts: Sequence[TextPart],
    contexts: Sequence[int] | None,
    candidates: Sequence[int],
    has_whole_text: bool,
) -> Row:
    """Return the global tokens of an example: of its text, of each token of its question, and of its parts.

    Args:
        places: where the first letter of each token is, if it is a token of the text.
        is_question: which tokens are the question's; all False: there is none.
        contexts: the number of the context of each part; None: all are of one.
        candidates: which parts are candidate answers.

    Raises:
        InputError: a token that is in parts of several contexts.
    """
    of_text = sorted((at, token) for token, at in enumerate(places) if at is not None)
    numbers = [0] * len(parts) if contexts is None else contexts
    listed = [mentions(part) for part in parts]
    found = zip(listed, numbers, [_tokens_of(part, of_text) for part in listed], strict=True)
    kept = [(each, *of_part) for each, of_part in enumerate(found) if of_part[2]]
    rows = [((GLOBAL_QUESTION_TYPE, 0), {token}) for token, is_asked in enumerate(is_question) if is_asked]
    rows += [((PARAGRAPH_TYPE, number), tokens) for _, _, number, tokens in kept]
    if has_whole_text or not rows:
        # a text without parts has a global token all the same
        rows = [((WHOLE_TYPE, 0), {token for _, token in of_text}), *rows]
    links: list[list[int]] = [[] for _ in places]
    for number, (_, tokens) in enumerate(rows):
        for token in tokens:
            links[token].append(number)
    own = [context for context, _ in rows]
    counted = {context: number for number, context in enumerate(dict.fromkeys(own))}
    types = [kind for kind, _ in own[: len(own) - len(kept)]]
    types += [GLOBAL_CANDIDATE_TYPE if each in candidates else PARAGRAPH_TYPE for each, *_ in kept]
    listed_at = [token for each in candidates for token in _tokens_of(listed[each][:1], of_text)]
    long = []
    if contexts is not None:
        # an entity is mentioned in any context, and a candidate is of that where it is listed
        at_home = [each for each, part in enumerate(parts) if is_interval(part) or each in candidates]
        owners = [((PARAGRAPH_TYPE, numbers[each]), _tokens_of(listed[each][:1], of_text)) for each in at_home]
        long = [counted.get(each, -1) for each in contexts_of_tokens(places, is_question, owners)]
    own_parts = [part for _, part, _, _ in kept]
    return Row(links, types, [counted[each] for each in own], long, own_parts, set(listed_at))


def contexts_of_tokens(
    places: Sequence[int | None], is_question: Sequence[bool], owners: Iterable[tuple[Context, set[int]]]
) -> list[Context]:
    """Return the context of each token: that of the part in which it is, or of the question.

    A token of neither is of the context of the token before it, tokens of the text of one of the text, and the first
    tokens of neither are of the first context. A text without parts of contexts has none.

    Args:
        owners: contexts, and the tokens of a part of theirs.

    Raises:
        InputError: a token that is in parts of several contexts.
    """
    found: list[Context | None] = [(GLOBAL_QUESTION_TYPE, 0) if is_asked else None for is_asked in is_question]
    for context, tokens in owners:
        for token in tokens:
            other = found[token]
            if other is not None and other != context:
                raise InputError(
                    f"contexts says that the letter at {places[token]} of a text is in parts of the contexts "
                    f"{other[1]} and {context[1]}, and long tokens read those of their own context alone. Give parts "
                    "that hold it in one context, and mentions of an entity as a list of intervals, which may lie in "
                    "any."
                )
            found[token] = context
    of_text = [token for token, at in enumerate(places) if at is not None]
    for token, context in zip(of_text, _filled([found[token] for token in of_text]), strict=True):
        found[token] = context
    return _filled(found)


def _filled(contexts: Sequence[Context | None]) -> list[Context]:
    """Return contexts with the one before where there is none, and before all of them the first one."""
    last = next((each for each in contexts if each is not None), NO_CONTEXT)
    filled: list[Context] = []
    for each in contexts:
        last = last if each is None else each
        filled.append(last)
    return filled


def _tokens_of(intervals: Sequence[Interval], of_text: Sequence[tuple[int, int]]) -> set[int]:
    """Return the tokens whose first letter is in one of the intervals; of_text: sorted places and tokens."""
    cuts = [[bisect_left(of_text, (at,)) for at in interval] for interval in intervals]
    return {token for first, last in cuts for _, token in of_text[first:last]}


def mentions(part: Any) -> list[Interval]:
    """Return the intervals of a part: it is one, or the list of those where an entity is mentioned.

    >>> mentions((3, 7)), mentions([(3, 7), (12, 14)])
    ([(3, 7)], [(3, 7), (12, 14)])

    Raises:
        InputError: something else, or an empty list.
    """
    listed = [part] if is_interval(part) else entries(part)
    if not listed or not all(map(is_interval, listed)):
        raise InputError(
            f"parts has {shown(part)}; give (start, stop) in characters, with 0 <= start < stop, or for an entity a "
            "list of at least one of them, in a list for each text."
        )
    return [(operator.index(start), operator.index(stop)) for start, stop in listed]


def check_lists(name: str, given: Any, num_texts: int, held: str) -> None:
    """Raise InputError if there is not a list for each text; held: what it holds, in words."""
    lists = entries(given)
    if lists is None or len(lists) != num_texts or any(entries(each) is None for each in lists):
        found = f"is {shown(given)}" if lists is None else f"has {len(lists)} lists"
        raise InputError(f"{name} {found} for {num_texts} texts; give one for each text, with {held}.")


def checked_contexts(contexts: Sequence[Sequence[int]], parts: Sequence[Sequence[TextPart]]) -> list[list[int]]:
    """Return contexts as numbers of Python.

    Raises:
        InputError: they are not a number for each part, or parts of one lie between those of others.
    """
    check_lists("contexts", contexts, len(parts), "the number of the context of each of its parts")
    found = []
    for given, of_text in zip(contexts, parts, strict=True):
        numbers = whole_numbers(given)
        if numbers is None or len(numbers) != len(of_text):
            raise InputError(
                f"contexts has {shown(given)} for a text of {len(of_text)} parts; give an integer for each part."
            )
        if len(list(itertools.groupby(numbers))) != len(set(numbers)):
            # their distances in the list of global tokens, which labels tell, would depend on the other contexts
            raise InputError(
                f"contexts has {shown(numbers)}, where parts of a context lie between those of another. Give the parts "
                "of a context one after another."
            )
        found.append(numbers)
    return found


def checked_candidates(candidates: Sequence[Sequence[int]], parts: Sequence[Sequence[TextPart]]) -> list[list[int]]:
    """Return candidates as numbers of Python; raise InputError if they are not, for each text, numbers of its parts."""
    check_lists("candidates", candidates, len(parts), "the numbers of those of its parts that are candidate answers")
    found = []
    for given, of_text in zip(candidates, parts, strict=True):
        numbers = whole_numbers(given)
        if numbers is None or not all(0 <= each < len(of_text) for each in numbers):
            raise InputError(
                f"candidates has {shown(given)} for a text of {len(of_text)} parts; give numbers of parts, which are "
                "counted from 0."
            )
        found.append(numbers)
    return found


def is_interval(given: Any) -> bool:
    """Return whether something is (start, stop) of whole numbers, not empty."""
    numbers = whole_numbers(given)
    return numbers is not None and len(numbers) == 2 and 0 <= numbers[0] < numbers[1]


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
    start, stop = (operator.index(each) for each in answer)
    said = text[start:stop]
    begin, end = start + len(said) - len(said.lstrip()), start + len(said.rstrip())
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
    holding = [number for number, each in enumerate(row.parts) if any(first <= begin < last for first, last in each)]
    return found[0], found[-1], first_part + holding[0] if holding else NO_ANSWER
