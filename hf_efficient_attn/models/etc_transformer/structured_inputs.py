"""Inputs of an ETC for texts with parts, such as sentences or paragraphs: one global token for every part."""

import itertools
import operator
import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import BatchEncoding

from hf_efficient_attn.errors import InputError
from hf_efficient_attn.messages import shown
from hf_efficient_attn.models.inputs import entries, whole_numbers

# The global tokens of one text, or of a question and a text; `structured_inputs` makes batches of them.


Interval = tuple[int, int]
# one interval, or the mentions of an entity
TextPart = Interval | Sequence[Interval]
# the type of a context's global tokens, and the number of the context
Context = tuple[int, int]
NO_CONTEXT: Context = (-1, -1)

# the authors' token types: of long tokens, then of the global tokens of whole texts, question tokens, candidates and
# paragraphs
TEXT_TYPE, QUESTION_TYPE, CANDIDATE_TYPE = 1, 3, 4
WHOLE_TYPE, GLOBAL_QUESTION_TYPE, GLOBAL_CANDIDATE_TYPE, PARAGRAPH_TYPE = 0, 5, 6, 7
NO_ANSWER = -100


@dataclass(frozen=True)
class ExampleGlobals:
    """The global tokens of an example.

    Attributes:
        links: the indices of the global tokens that each token belongs to.
        global_types: the type of each global token, which says what it stands for.
        contexts: the context number of each global token, in order of appearance. The whole text is a separate context,
            and so are the tokens of the question.
        long_contexts: the context number of each token, −1 if no part has a context; empty: no contexts are given.
        parts: the intervals of each part of the text that has a global token; these global tokens come last.
        candidate_tokens: the tokens where the text lists candidate answers.
    """

    links: list[list[int]]
    global_types: list[int]
    contexts: list[int]
    long_contexts: list[int]
    parts: list[list[Interval]]
    candidate_tokens: set[int]


def first_letters(text: str, offsets: Sequence[Interval]) -> list[int | None]:
    """Return the position in the text of each token's first letter; None: the token is not part of the text.

    Byte-level and SentencePiece tokens begin with the space before their word, which is not part of a sentence. The
    position of a token of white space is its start.

    >>> first_letters("It is.", [(0, 0), (0, 2), (2, 5), (5, 6)])
    [None, 0, 3, 5]
    """
    places: list[int | None] = []
    for start, stop in offsets:
        token = text[start:stop]
        # special tokens have the offsets (0, 0)
        places.append(None if stop <= start else start + (len(token) - len(token.lstrip())) % len(token))
    return places


def link(
    places: Sequence[int | None],
    is_question: Sequence[bool],
    parts: Sequence[TextPart],
    contexts: Sequence[int] | None,
    candidates: Sequence[int],
    has_whole_text: bool,
) -> ExampleGlobals:
    """Return the global tokens of an example: for its text, for each token of its question, and for its parts.

    Args:
        places: the position of each token's first letter, None for tokens outside of the text.
        is_question: which tokens belong to the question; all False: there is none.
        contexts: the context number of each part; None: all are in one context.
        candidates: which parts are candidate answers.

    Raises:
        InputError: a token that is in parts of different contexts.
    """
    of_text = sorted((at, token) for token, at in enumerate(places) if at is not None)
    numbers = [0] * len(parts) if contexts is None else contexts
    listed = [mentions(part) for part in parts]
    found = zip(listed, numbers, [_tokens_of(part, of_text) for part in listed], strict=True)
    kept = [(each, *of_part) for each, of_part in enumerate(found) if of_part[2]]
    rows = [((GLOBAL_QUESTION_TYPE, 0), {token}) for token, is_asked in enumerate(is_question) if is_asked]
    rows += [((PARAGRAPH_TYPE, number), tokens) for _, _, number, tokens in kept]
    if has_whole_text or not rows:
        # a text without parts still has one global token
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
        # mentions of an entity may be in any context; a candidate is in the context where it is listed
        at_home = [each for each, part in enumerate(parts) if is_interval(part) or each in candidates]
        owners = [((PARAGRAPH_TYPE, numbers[each]), _tokens_of(listed[each][:1], of_text)) for each in at_home]
        long = [counted.get(each, -1) for each in contexts_of_tokens(places, is_question, owners)]
    own_parts = [part for _, part, _, _ in kept]
    return ExampleGlobals(links, types, [counted[each] for each in own], long, own_parts, set(listed_at))


def contexts_of_tokens(
    places: Sequence[int | None], is_question: Sequence[bool], owners: Iterable[tuple[Context, set[int]]]
) -> list[Context]:
    """Return the context of each token: the context of its part, or the context of the question.

    Other tokens have the context of the token before them, tokens of the text that of the text token before them. Such
    tokens at the start have the first context. If no part has a context, the text has none.

    Args:
        owners: pairs of a context and the tokens of one of its parts.

    Raises:
        InputError: a token that is in parts of different contexts.
    """
    found: list[Context | None] = [(GLOBAL_QUESTION_TYPE, 0) if is_asked else None for is_asked in is_question]
    for context, tokens in owners:
        for token in tokens:
            other = found[token]
            if other is not None and other != context:
                raise InputError(
                    f"The character at {places[token]} of a text is in parts of contexts {other[1]} and {context[1]}, "
                    "but a long token attends only to its own context. Give all parts with this character the same "
                    "context; give the mentions of an entity as a list of intervals, which may lie in any context."
                )
            found[token] = context
    of_text = [token for token, at in enumerate(places) if at is not None]
    for token, context in zip(of_text, _filled([found[token] for token in of_text]), strict=True):
        found[token] = context
    return _filled(found)


def _filled(contexts: Sequence[Context | None]) -> list[Context]:
    """Return the contexts with each None replaced by the context before it, or by the first one at the start."""
    last = next((each for each in contexts if each is not None), NO_CONTEXT)
    filled: list[Context] = []
    for each in contexts:
        last = last if each is None else each
        filled.append(last)
    return filled


def _tokens_of(intervals: Sequence[Interval], of_text: Sequence[tuple[int, int]]) -> set[int]:
    """Return the tokens whose first letter is in one of the intervals; of_text: sorted pairs (position, token)."""
    cuts = [[bisect_left(of_text, (at,)) for at in interval] for interval in intervals]
    return {token for first, last in cuts for _, token in of_text[first:last]}


def mentions(part: Any) -> list[Interval]:
    """Return the intervals of a part, which is one interval or a list of them, the mentions of an entity.

    >>> mentions((3, 7)), mentions([(3, 7), (12, 14)])
    ([(3, 7)], [(3, 7), (12, 14)])

    Raises:
        InputError: anything else, or an empty list.
    """
    listed = [part] if is_interval(part) else entries(part)
    if not listed or not all(map(is_interval, listed)):
        raise InputError(
            f"parts has {shown(part)}; each part must be (start, stop) in characters with 0 <= start < stop, or, for "
            "an entity, a list of at least one such interval. Give a list of parts for each text."
        )
    return [(operator.index(start), operator.index(stop)) for start, stop in listed]


def check_lists(name: str, given: Any, num_texts: int, held: str) -> None:
    """Raise InputError if there is not one list for each text; held: the content of a list, for the message."""
    lists = entries(given)
    if lists is None or len(lists) != num_texts or any(entries(each) is None for each in lists):
        found = f"is {shown(given)}" if lists is None else f"has {len(lists)} lists"
        raise InputError(f"{name} {found} for {num_texts} texts; give one list for each text, with {held}.")


def checked_contexts(contexts: Sequence[Sequence[int]], parts: Sequence[Sequence[TextPart]]) -> list[list[int]]:
    """Return the contexts as Python integers.

    Raises:
        InputError: not one integer for each part, or parts of a context that do not come one after another.
    """
    check_lists("contexts", contexts, len(parts), "the context number of each part")
    found = []
    for given, of_text in zip(contexts, parts, strict=True):
        numbers = whole_numbers(given)
        if numbers is None or len(numbers) != len(of_text):
            raise InputError(
                f"contexts has {shown(given)} for a text of {len(of_text)} parts; give an integer for each part."
            )
        if len(list(itertools.groupby(numbers))) != len(set(numbers)):
            # the labels of distances between the global tokens of a context would depend on other contexts
            raise InputError(
                f"contexts has {shown(numbers)}, but the parts of each context must follow one another. Change their "
                "order."
            )
        found.append(numbers)
    return found


def checked_candidates(candidates: Sequence[Sequence[int]], parts: Sequence[Sequence[TextPart]]) -> list[list[int]]:
    """Return the candidates as Python integers.

    Raises:
        InputError: not one list for each text, or numbers that are not indices of its parts.
    """
    check_lists("candidates", candidates, len(parts), "the indices of the parts that are candidate answers")
    found = []
    for given, of_text in zip(candidates, parts, strict=True):
        numbers = whole_numbers(given)
        if numbers is None or not all(0 <= each < len(of_text) for each in numbers):
            raise InputError(
                f"candidates has {shown(given)} for a text of {len(of_text)} parts; give indices of parts, counted "
                "from 0."
            )
        found.append(numbers)
    return found


def is_interval(given: Any) -> bool:
    """Return whether the value is an interval (start, stop) of whole numbers that is not empty."""
    numbers = whole_numbers(given)
    return numbers is not None and len(numbers) == 2 and 0 <= numbers[0] < numbers[1]


def answer_positions(
    row: ExampleGlobals,
    places: Sequence[int | None],
    offsets: Sequence[Interval],
    is_cut: bool,
    text: str,
    answer: Interval | None,
) -> tuple[int, int, int]:
    """Return the first and the last token of an answer, and the global token of the first part in which it begins.

    White space at the ends of the answer is ignored. If there is no answer, or not all of it is among the tokens, the
    result is 0, 0 and −100.

    Args:
        is_cut: whether the text is truncated.

    Raises:
        InputError: an answer that is not an interval of the text, or an answer without a token that is not truncated.
    """
    if answer is None:
        return 0, 0, NO_ANSWER
    if not is_interval(answer) or answer[1] > len(text):
        raise InputError(
            f"answers has {shown(answer)}; give (start, stop) in characters of the text, which has {len(text):,} "
            "characters, or None if there is no answer."
        )
    start, stop = (operator.index(each) for each in answer)
    answer_text = text[start:stop]
    begin, end = start + len(answer_text) - len(answer_text.lstrip()), start + len(answer_text.rstrip())
    kept = [token for token, at in enumerate(places) if at is not None]
    if is_cut and (not kept or begin < offsets[kept[0]][0] or end > offsets[kept[-1]][1]):
        # at least one end of the answer is truncated
        return 0, 0, NO_ANSWER
    found = [token for token, at in enumerate(places) if at is not None and at < end and offsets[token][1] > begin]
    if not found:
        raise InputError(
            f"answers has {shown(answer)}, which is {shown(answer_text)} in its text, but no token covers these "
            "characters. Give an interval with at least one word, or None if there is no answer."
        )
    first_part = len(row.global_types) - len(row.parts)
    holding = [number for number, each in enumerate(row.parts) if any(first <= begin < last for first, last in each)]
    return found[0], found[-1], first_part + holding[0] if holding else NO_ANSWER


# a sentence ends with one of .!?… and closing quotes or brackets, followed by a space, or at the end of a paragraph
SENTENCE = re.compile(r"\S.*?(?:[.!?…][\"'”’)\]]*(?=\s|$)|(?=\n\s*\n)|$)", re.DOTALL)
EMPTY_LINES = re.compile(r"\n\s*\n")


def sentences(text: str) -> list[Interval]:
    """Return the start and the end of each sentence of a text, in characters.

    A sentence ends with a full stop, a question mark, an exclamation mark or an ellipsis, and at the end of a
    paragraph. Abbreviations are not recognised. If you have better sentences, pass them to `structured_inputs`.

    >>> text = "It rains. Does it?\\n\\nA title\\n\\nYes!"
    >>> [text[start:stop] for start, stop in sentences(text)]
    ['It rains.', 'Does it?', 'A title', 'Yes!']
    """
    return [found.span() for found in SENTENCE.finditer(text)]


def paragraphs(text: str) -> list[Interval]:
    """Return the start and the end of each paragraph of a text, in characters; empty lines separate paragraphs.

    >>> text = "It rains. Does it?\\n\\nYes!\\n"
    >>> [text[start:stop] for start, stop in paragraphs(text)]
    ['It rains. Does it?', 'Yes!']
    """
    empty = [(0, 0), *(found.span() for found in EMPTY_LINES.finditer(text)), (len(text), len(text))]
    found = []
    for (_, start), (stop, _) in itertools.pairwise(empty):
        inside = text[start:stop]
        if inside.strip():
            found.append((start + len(inside) - len(inside.lstrip()), start + len(inside.rstrip())))
    return found


def structured_inputs(
    tokenizer: Any,
    texts: Sequence[str | tuple[str, str]],
    parts: Sequence[Sequence[TextPart]] | None = None,
    global_token_id: int = 1,
    max_length: int | None = None,
    has_whole_text: bool = False,
    answers: Sequence[Interval | None] | None = None,
    question_token_ids: tuple[int, int] = (3, 5),
    contexts: Sequence[Sequence[int]] | None = None,
    candidates: Sequence[Sequence[int]] | None = None,
    candidate_token_id: int = 4,
) -> BatchEncoding:
    """Return the inputs of an ETC for texts, as tensors, with one global token for every part of a text.

    A token belongs to each part that contains its first letter. Parts may contain each other, such as paragraphs and
    their sentences. A part is an interval of characters, or a list of intervals with one global token: all mentions of
    an entity or of a candidate answer. Parts without a token after truncation are left out.

    >>> from tokenizers import Tokenizer, models, pre_tokenizers
    >>> from transformers import PreTrainedTokenizerFast
    >>> raw = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 2}, unk_token="[UNK]"))
    >>> raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="[PAD]")
    >>> ada, bo = [(0, 3), (12, 15)], [(8, 10)]
    >>> found = structured_inputs(tokenizer, ["Ada met Bo. Ada left."], [[(0, 11), (12, 21), ada, bo]])
    >>> found["long_to_global"][0].tolist()
    [[0, 2], [0, -1], [0, 3], [1, 2], [1, -1]]

    A pair is a question and a text, as in the authors' Natural Questions: every token of the question also has a global
    token, before those of the parts. The parts are by default the text's `paragraphs`.

    Args:
        tokenizer: a fast tokenizer, because only these give the offsets of tokens in the text.
        texts: either only texts, or only pairs (question, text).
        parts: for each text its parts, in the order of their global tokens, each an interval in characters or a list
            of intervals; None: its `sentences`, in a pair its `paragraphs`.
        global_token_id: the token id of every global token: `model.config.global_token_id`, which is not 1 in a model
            that was converted from RoBERTa. In pairs, only the global token of the whole text has it.
        max_length: length to which texts are truncated, in tokens, the whole question included; None: no truncation.
        has_whole_text: whether a first global token stands for the whole text and attends to all of it, whatever
            `hard_global_to_long` says.
        answers: for each pair the interval of the answer in the text, in characters, or None if it has none. An answer
            that is truncated, even at one end, counts as none.
        question_token_ids: in pairs, the token ids of the global tokens for question tokens and for parts. The authors
            use 3 and 5 with the vocabulary of BERT, 41 and 43 with their SentencePiece model.
        contexts: for each text the number of each part's context, such as a document. Global tokens of different
            contexts have no order, those of one context are in the order of its parts, and long tokens do not attend
            to other contexts. The parts of a context come one after another. As in the authors' code, the whole text is
            a separate context, and so are the tokens of the question. The mentions of an entity, given as a list of
            intervals, may be in any context; other parts of different contexts must not share a token. None: all global
            tokens are in one order.
        candidates: for each pair the numbers of the parts that are candidate answers, as in WikiHop. The first interval
            of such a part is where the text lists the candidate, and the others are its mentions. None: there are no
            candidates.
        candidate_token_id: the token id of the global tokens of candidates; 42 with the authors' SentencePiece model.

    Returns `input_ids` and `attention_mask` [texts, tokens], `global_input_ids`, `global_mask` and
    `global_attends_to_all` [texts, global tokens], and `long_to_global` [texts, tokens, levels]; see
    `EtcTransformerModel.forward`. Texts are padded on the tokenizer's padding side, global tokens on the right. With
    `contexts`, it also returns `global_contexts` [texts, global tokens] and `long_contexts` [texts, tokens], counted
    from 0 in each text; a token outside of all parts belongs to the context before it. Remove `long_contexts` if long
    tokens should attend across contexts. For pairs, it also returns the authors' `token_type_ids` and
    `global_token_type_ids`, which go up to 7: remove them for a model with fewer types. With `answers`, it also returns
    `start_positions` and `end_positions` [texts], 0 without an answer, and `long_answer_positions` [texts], the global
    token of the first part in which the answer begins, −100 without an answer.

    Raises:
        InputError: a slow tokenizer; no texts, or no text with a token; a mix of texts and pairs; parts or answers that
            are not one for each text, or are not intervals; candidates without questions, or that are not parts;
            contexts that are not one for each part, or whose parts do not come one after another; a global token id
            that is the tokenizer's padding token; a question that leaves no room for its text.
    """
    questions, texts = _taken_apart(tokenizer, texts)
    of_pairs = question_token_ids if candidates is None else (*question_token_ids, candidate_token_id)
    _refuse_padding(tokenizer, (global_token_id, *(() if questions is None else of_pairs)))
    find = sentences if questions is None else paragraphs
    parts = [find(text) for text in texts] if parts is None else parts
    own_contexts, own_candidates = _checked_parts(parts, len(texts), contexts, candidates, questions is not None)
    if answers is not None and (questions is None or len(answers) != len(texts)):
        raise InputError(
            f"answers has {len(answers)} of {len(texts)} {'texts' if questions is None else 'pairs'}; give one, or "
            "None, for each pair (question, text)."
        )
    encoded, offsets = _encoded(tokenizer, questions, texts, max_length)
    own = 0 if questions is None else 1
    sequences = [encoded.sequence_ids(row) for row in range(len(texts))]
    places = [
        [at if number == own else None for at, number in zip(first_letters(text, each), numbers, strict=True)]
        for text, each, numbers in zip(texts, offsets, sequences, strict=True)
    ]
    rows = [
        link(at, [own == 1 and each == 0 for each in numbers], *of_text, has_whole_text)
        for at, numbers, *of_text in zip(places, sequences, parts, own_contexts, own_candidates, strict=True)
    ]
    _add_globals(encoded, rows, global_token_id, has_whole_text)
    if contexts is not None:
        encoded["global_contexts"] = _padded([row.contexts for row in rows])
        encoded["long_contexts"] = torch.tensor([row.long_contexts for row in rows])
    if questions is not None:
        _add_types(encoded, rows, sequences, (*question_token_ids, candidate_token_id))
    if answers is not None:
        is_cut = [bool(each.overflowing) for each in encoded.encodings or ()]
        _add_answers(encoded, zip(rows, places, offsets, is_cut, texts, answers, strict=True))
    return encoded


def _taken_apart(tokenizer: Any, given: Any) -> tuple[list[str] | None, list[str]]:
    """Return the questions, or None, and the texts.

    Raises:
        InputError: a slow tokenizer, no texts, or anything but only texts or only pairs.
    """
    texts = [] if isinstance(given, str) else list(given)
    if not texts or not getattr(tokenizer, "is_fast", False):
        raise InputError(
            f"structured_inputs got {len(texts)} texts and the tokenizer {type(tokenizer).__name__}; it needs a list "
            "of at least one text, and a fast tokenizer, which gives the offsets of tokens."
        )
    if all(isinstance(each, str) for each in texts):
        return None, texts
    for each in texts:
        if not (isinstance(each, tuple | list) and len(each) == 2 and all(isinstance(one, str) for one in each)):
            raise InputError(
                f"texts has {shown(each)}; give only texts, or only pairs (question, text) of two strings."
            )
    return [question for question, _ in texts], [text for _, text in texts]


def _checked_parts(
    parts: Sequence[Sequence[TextPart]],
    num_texts: int,
    contexts: Sequence[Sequence[int]] | None,
    candidates: Sequence[Sequence[int]] | None,
    are_pairs: bool,
) -> tuple[list[Any], list[Any]]:
    """Return the contexts, or None, and the candidates of each text.

    Raises:
        InputError: not one list for each text, candidates without questions, or wrong contexts or candidates.
    """
    check_lists("parts", parts, num_texts, "intervals (start, stop)")
    if candidates is not None and not are_pairs:
        raise InputError(
            f"candidates has {len(candidates)} lists for texts without a question. Give pairs (question, text), or "
            "leave candidates out."
        )
    return (
        [None] * num_texts if contexts is None else checked_contexts(contexts, parts),
        [()] * num_texts if candidates is None else checked_candidates(candidates, parts),
    )


def _refuse_padding(tokenizer: Any, token_ids: Sequence[int]) -> None:
    """Raise InputError if a global token would be the padding token, whose embedding is not trained."""
    if tokenizer.pad_token_id in token_ids:
        raise InputError(
            f"Global tokens would have the id {tokenizer.pad_token_id}, which is the padding of "
            f"{type(tokenizer).__name__}. Pass global_token_id=model.config.global_token_id and, for pairs, "
            "question_token_ids that are not padding."
        )


def _check_room(tokenizer: Any, questions: list[str], max_length: int) -> None:
    """Raise InputError if a question leaves no room for a token of its text."""
    own = tokenizer(questions, add_special_tokens=False, return_attention_mask=False)["input_ids"]
    longest = max(map(len, own)) + tokenizer.num_special_tokens_to_add(pair=True)
    if longest >= max_length:
        raise InputError(
            f"max_length={max_length:,}, but a question and the special tokens of a pair take {longest:,} tokens, "
            "which leaves none for the text. Increase max_length, or shorten the question."
        )


def _encoded(
    tokenizer: Any, questions: list[str] | None, texts: list[str], max_length: int | None
) -> tuple[BatchEncoding, list[list[Interval]]]:
    """Return the encoded batch and the offsets of its tokens."""
    options = {"return_offsets_mapping": True, "padding": True, "return_tensors": "pt", "max_length": max_length}
    if questions is not None and max_length is not None:
        _check_room(tokenizer, questions, max_length)
    given, longest = ((texts,), True) if questions is None else ((questions, texts), "only_second")
    encoded = tokenizer(*given, truncation=False if max_length is None else longest, **options)
    offsets = encoded.pop("offset_mapping").tolist()
    if not offsets[0]:
        raise InputError(f"The {len(texts)} texts have no tokens: they are empty. Leave them out.")
    return encoded, offsets


def _add_globals(encoded: BatchEncoding, rows: Sequence[ExampleGlobals], token_id: int, has_whole_text: bool) -> None:
    """Add the global tokens, their masks, and links."""
    levels = max([1, *(len(numbers) for row in rows for numbers in row.links)])
    padded = [[[*numbers, *[-1] * (levels - len(numbers))] for numbers in row.links] for row in rows]
    encoded["long_to_global"] = torch.tensor(padded)
    encoded["global_mask"] = _padded([[1] * len(row.global_types) for row in rows])
    encoded["global_input_ids"] = torch.full_like(encoded["global_mask"], token_id)
    encoded["global_attends_to_all"] = torch.zeros_like(encoded["global_mask"])
    if has_whole_text:
        encoded["global_attends_to_all"][:, 0] = 1


def _add_types(
    encoded: BatchEncoding,
    rows: Sequence[ExampleGlobals],
    sequences: Sequence[list[int | None]],
    token_ids: tuple[int, int, int],
) -> None:
    """Add the token types of pairs, and the ids of their global tokens.

    sequences: for each token, 0 in a question, 1 in a text, None elsewhere.
    """
    types = _padded([row.global_types for row in rows])
    for kind, number in zip((GLOBAL_QUESTION_TYPE, PARAGRAPH_TYPE, GLOBAL_CANDIDATE_TYPE), token_ids, strict=True):
        encoded["global_input_ids"][types == kind] = number
    encoded["global_token_type_ids"] = types
    encoded["token_type_ids"] = torch.tensor(
        [[QUESTION_TYPE if each == 0 else TEXT_TYPE for each in numbers] for numbers in sequences]
    )
    for number, row in enumerate(rows):
        encoded["token_type_ids"][number, sorted(row.candidate_tokens)] = CANDIDATE_TYPE


def _add_answers(encoded: BatchEncoding, answers: Iterable[tuple[Any, ...]]) -> None:
    """Add the positions of answers; answers: arguments of `answer_positions` for each text."""
    found = torch.tensor([answer_positions(*given) for given in answers])
    for name, column in zip(("start_positions", "end_positions", "long_answer_positions"), found.T, strict=True):
        encoded[name] = column.contiguous()


def _padded(rows: Sequence[list[int]]) -> Tensor:
    """Return rows of numbers as one tensor, with zeros on the right."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])


__all__ = ["structured_inputs"]
