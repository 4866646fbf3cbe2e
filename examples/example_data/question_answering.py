"""Extractive question answering: windows of long texts, answers from the logits of windows, and SQuAD's scores."""

import math
import re
import string
from collections import Counter, defaultdict
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from hf_efficient_attn.errors import InputError
from hf_efficient_attn.messages import shown


def windows_of(
    rows: dict[str, list],
    numbers: list[int],
    tokenizer: PreTrainedTokenizerBase,
    max_seq_length: int,
    doc_stride: int,
    marks_words_of_question: bool,
) -> dict[str, list]:
    """Return a question with its text as model inputs, split into overlapping windows if the text is too long.

    Args:
        rows: one row, in SQuAD's columns.
        numbers: the number of the row, which becomes the windows' `row`.
        marks_words_of_question: whether tokens whose word occurs in the question get the token type 1.

    Returns:
        The model's inputs, the start and end positions of the answer (0 if it is not in the window) and, for
        `best_answers`, the index of the text's `first` token and the `offsets` of the text's tokens in characters.

    Raises:
        InputError: `max_seq_length` is too short for the question, or an answer is not in the text.
    """
    question, text = rows["question"][0].strip(), rows["context"][0]
    needed = len(tokenizer(question)["input_ids"]) + doc_stride + 2
    if needed >= max_seq_length:
        raise InputError(
            f"max_seq_length={max_seq_length} is too short for question {shown(question)}; with "
            f"doc_stride={doc_stride} it must exceed {needed}."
        )
    inputs = tokenizer(
        question,
        text,
        truncation="only_second",
        max_length=max_seq_length,
        stride=doc_stride,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )
    ends = answer_ends(text, rows["answers"][0])
    marked = places_of_words(text, question) if marks_words_of_question else set()
    found = defaultdict(list, {name: inputs[name] for name in tokenizer.model_input_names if name in inputs})
    if marks_words_of_question:
        found["token_type_ids"] = [None] * len(inputs["input_ids"])
    for window, offsets in enumerate(inputs["offset_mapping"]):
        parts = inputs.sequence_ids(window)
        if marks_words_of_question:
            types = [int(part == 1 and end - 1 in marked) for part, (_, end) in zip(parts, offsets, strict=True)]
            found["token_type_ids"][window] = types
        tokens = [inputs.char_to_token(window, place, 1) for place in ends]
        start, end = tokens if tokens and None not in tokens else (0, 0)
        found["start_positions"].append(start)
        found["end_positions"].append(end)
        found["row"].append(numbers[0])
        found["first"].append(parts.index(1))
        found["offsets"].append([span for part, span in zip(parts, offsets, strict=True) if part == 1])
    return found


def answer_ends(text: str, answers: dict[str, list]) -> tuple[int, ...]:
    """Return the indices of the first answer's first and last character; an empty tuple if there is no answer."""
    for start, answer in zip(answers["answer_start"], answers["text"], strict=True):
        if not answer or start < 0 or not text.startswith(answer, start):
            raise InputError(f"Answer {shown(answer)} is not at character {start} of its context, {shown(text)}.")
        return start, start + len(answer) - 1
    return ()


def places_of_words(text: str, question: str) -> set[int]:
    """Return the indices of all characters of a text whose word also occurs in the question.

    >>> sorted(places_of_words("foo, Bar", "What is bar?"))
    [5, 6, 7]
    """
    question_words = set(re.findall(r"\w+", question.lower()))
    words = (word.span() for word in re.finditer(r"\w+", text) if word[0].lower() in question_words)
    return {place for span in words for place in range(*span)}


def best_answers(
    contexts: list[str], windows: Any, logits: tuple[Any, Any], longest: int, can_be_empty: bool
) -> list[str]:
    """Return the likeliest span over all windows of each context.

    Args:
        logits: logits of starts and ends, [windows, tokens] each.
        longest: maximum length of an answer in tokens.
        can_be_empty: whether the answer is "" if token 0, which stands for no answer, is likelier in every window than
            the best span.
    """
    spans, nowhere = [(-math.inf, 0, 0)] * len(contexts), [math.inf] * len(contexts)
    starts, ends = (torch.from_numpy(each).float().log_softmax(-1) for each in logits)
    for window, start, end in zip(windows, starts, ends, strict=True):
        row = window["row"]
        spans[row] = max(spans[row], best_span(window["first"], window["offsets"], start, end, longest))
        nowhere[row] = min(nowhere[row], float(start[0] + end[0]))
    return [
        "" if can_be_empty and none > score else context[begin:end].strip()
        for context, (score, begin, end), none in zip(contexts, spans, nowhere, strict=True)
    ]


def best_span(
    first: int, offsets: list[list[int]], start: torch.Tensor, end: torch.Tensor, longest: int
) -> tuple[float, int, int]:
    """Return the likeliest span of a window's text: its log-probability, and its start and end in characters."""
    text = slice(first, first + len(offsets))
    ends = torch.nn.functional.pad(end[text], (0, longest - 1), value=-math.inf).unfold(0, longest, 1)
    score, place = (start[text, None] + ends).flatten().max(0)
    begin, length = divmod(int(place), longest)
    return float(score), offsets[begin][0], offsets[begin + length][1]


def squad_scores(predictions: list[str], true: list[list[str]]) -> dict[str, float]:
    """Return exact match and F1 of answers, 0 to 100, as SQuAD 1.1 defines them (Rajpurkar et al. 2016, section 6.1).

    Words are compared in lower case, without punctuation and articles; the best of several true answers counts. Answers
    without any such words ("The", "?!", or "" for no answer as in SQuAD 2.0) match only if their texts are equal after
    stripping spaces.

    >>> squad_scores(["the quick Fox!", ""], [["fox", "quick fox"], ["fox"]])
    {'exact_match': 50.0, 'f1': 50.0}

    Args:
        predictions: one answer per question.
        true: the true answers to each question, at least one.
    """
    pairs = [[(answer, one) for one in several] for answer, several in zip(predictions, true, strict=True)]
    return {
        "exact_match": 100 * sum(max(exact_match(*pair) for pair in several) for several in pairs) / len(pairs),
        "f1": 100 * sum(max(token_f1(*pair) for pair in several) for several in pairs) / len(pairs),
    }


def words(answer: str) -> list[str]:
    """Return the words of an answer in lower case, without punctuation and articles."""
    letters = answer.lower().translate(str.maketrans("", "", string.punctuation))
    return re.sub(r"\b(a|an|the)\b", " ", letters).split()


def exact_match(prediction: str, true: str) -> float:
    """Return 1 if the answers have the same words or, if both have none, the same text; else 0."""
    both = words(prediction), words(true)
    return float(both[0] == both[1] if any(both) else prediction.strip() == true.strip())


def token_f1(prediction: str, true: str) -> float:
    """Return the F1 score of the words that two answers have in common."""
    both = words(prediction), words(true)
    if not all(both):
        return exact_match(prediction, true)
    return 2 * (Counter(both[0]) & Counter(both[1])).total() / sum(map(len, both))
