"""From texts with parts, such as sentences and paragraphs, to the inputs of an ETC: a global token for every part."""

import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import BatchEncoding

from hf_efficient_attn.errors import InputError
from hf_efficient_attn.messages import shown

from .structured_rows import (
    CANDIDATE_TYPE,
    GLOBAL_CANDIDATE_TYPE,
    GLOBAL_QUESTION_TYPE,
    PARAGRAPH_TYPE,
    QUESTION_TYPE,
    TEXT_TYPE,
    Interval,
    Row,
    TextPart,
    answer_positions,
    check_lists,
    checked_candidates,
    checked_contexts,
    first_letters,
    link,
)

# a sentence ends behind one of .!? and what closes after it, before a space, or where a paragraph ends
SENTENCE = re.compile(r"\S.*?(?:[.!?…][\"'”’)\]]*(?=\s|$)|(?=\n\s*\n)|$)", re.DOTALL)
EMPTY_LINES = re.compile(r"\n\s*\n")


def sentences(text: str) -> list[Interval]:
    """Return where the sentences of a text begin and end, in characters.

    They end behind a full stop, a question mark or an exclamation mark, and with a paragraph; abbreviations are not
    known. Give `structured_inputs` better ones where you have them.

    >>> text = "It rains. Does it?\\n\\nA title\\n\\nYes!"
    >>> [text[start:stop] for start, stop in sentences(text)]
    ['It rains.', 'Does it?', 'A title', 'Yes!']
    """
    return [found.span() for found in SENTENCE.finditer(text)]


def paragraphs(text: str) -> list[Interval]:
    """Return where the paragraphs of a text begin and end, in characters; empty lines divide them.

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
    """Return the inputs of an ETC for texts, as tensors, with a global token for every part of a text.

    A token belongs to each part in which its first letter is; parts may lie within each other, as sentences in
    paragraphs do. A part is an interval of characters, or the list of those where an entity or a candidate answer is
    mentioned, which all have one global token. Parts of which no token is left are left out.

    >>> from tokenizers import Tokenizer, models, pre_tokenizers
    >>> from transformers import PreTrainedTokenizerFast
    >>> raw = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 2}, unk_token="[UNK]"))
    >>> raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="[PAD]")
    >>> ada, bo = [(0, 3), (12, 15)], [(8, 10)]
    >>> found = structured_inputs(tokenizer, ["Ada met Bo. Ada left."], [[(0, 11), (12, 21), ada, bo]])
    >>> found["long_to_global"][0].tolist()
    [[0, 2], [0, -1], [0, 3], [1, 2], [1, -1]]

    A pair is a question and a text, as the authors have Natural Questions: every token of the question has a global
    token, too, before those of the parts, which are the text's `paragraphs`.

    Args:
        tokenizer: a fast one, which tells where in the text its tokens are.
        texts: all of them texts, or all of them pairs (question, text).
        parts: for each text its parts, in the order of their global tokens, each an interval in characters or a list
            of intervals; None: its `sentences`, in a pair its `paragraphs`.
        global_token_id: what every global token is: `model.config.global_token_id`, which is not 1 in a model that was
            converted from RoBERTa. In pairs, only that of the whole text.
        max_length: tokens at which texts are cut, beside the whole question; None: nowhere.
        has_whole_text: whether a first global token stands for the whole text, and reads all of it whatever
            `hard_global_to_long` says.
        answers: for each pair the interval of the answer in the text, in characters, or None if it has none. Of one
            that is cut away, at least an end of it, nothing is said, as if there were none.
        question_token_ids: in pairs, what the global tokens of question tokens and of parts are. The authors have 3 and
            5 in the vocabulary of BERT, 41 and 43 in that of their SentencePiece model.
        contexts: for each text the number of the context of each part, such as a document: global tokens of different
            contexts are in no order, those of one are in that of its parts, which come one after another, and long
            tokens read none of other contexts. As the authors have it, the whole text is a context of its own, and so
            are the tokens of the question. Mentions of an entity, as a list of intervals, are in any context, other
            parts of several contexts hold no token together. None: all global tokens are in one order.
        candidates: for each pair the numbers of those parts that are candidate answers, as in WikiHop: the first
            interval of such a part is where the text lists it, the others are its mentions. None: no part is one.
        candidate_token_id: what the global tokens of candidates are; the authors' SentencePiece model has 42.

    Returns `input_ids` and `attention_mask` [texts, tokens], `global_input_ids`, `global_mask` and `global_reads_all`
    [texts, global tokens], and `long_to_global` [texts, tokens, levels], see `EtcTransformerModel.forward`. Texts are
    padded as the tokenizer does, global tokens on the right. With `contexts` also `global_contexts` [texts, global
    tokens] and `long_contexts` [texts, tokens], each text's counted from 0; a token of no part is of the context before
    it. Leave `long_contexts` out if long tokens are to read across contexts. Of pairs, also the authors'
    `token_type_ids` and `global_token_type_ids`, which go up to 7: leave them out for a model of fewer types. With
    `answers` also `start_positions` and `end_positions` [texts], 0 without an answer, and `long_answer_positions`
    [texts], the global token of the first part in which the answer begins, −100 without one.

    Raises:
        InputError: a slow tokenizer, no texts, none with a token, neither texts nor pairs, parts or answers that are
            not one for each text, or no intervals; candidates of texts alone, or that are no parts; contexts that are
            not one for each part, or whose parts do not come one after another; global tokens that are the tokenizer's
            padding; a question that leaves no room for its text.
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
    """Return the questions, if there are any, and the texts.

    Raises:
        InputError: a slow tokenizer, no texts, or something else than texts alone or pairs alone.
    """
    texts = [] if isinstance(given, str) else list(given)
    if not texts or not getattr(tokenizer, "is_fast", False):
        raise InputError(
            f"structured_inputs got {len(texts)} texts and the tokenizer {type(tokenizer).__name__}; it needs a list "
            "of at least one text, and a fast tokenizer, which tells where in a text its tokens begin."
        )
    if all(isinstance(each, str) for each in texts):
        return None, texts
    for each in texts:
        if not (isinstance(each, tuple | list) and len(each) == 2 and all(isinstance(one, str) for one in each)):
            raise InputError(
                f"texts has {shown(each)}; give texts alone, or pairs (question, text) of two strings alone."
            )
    return [question for question, _ in texts], [text for _, text in texts]


def _checked_parts(
    parts: Sequence[Sequence[TextPart]],
    num_texts: int,
    contexts: Sequence[Sequence[int]] | None,
    candidates: Sequence[Sequence[int]] | None,
    are_pairs: bool,
) -> tuple[list[Any], list[Any]]:
    """Return the contexts, or None, and the candidates of each text; raise InputError if lists are not one for each."""
    check_lists("parts", parts, num_texts, "intervals (start, stop)")
    if candidates is not None and not are_pairs:
        raise InputError(
            f"candidates has {len(candidates)} lists for texts without a question. Give pairs (question, text), "
            "or leave them out."
        )
    return (
        [None] * num_texts if contexts is None else checked_contexts(contexts, parts),
        [()] * num_texts if candidates is None else checked_candidates(candidates, parts),
    )


def _refuse_padding(tokenizer: Any, token_ids: Sequence[int]) -> None:
    """Raise InputError if a global token would be the tokenizer's padding, whose embedding no training changes."""
    if tokenizer.pad_token_id in token_ids:
        raise InputError(
            f"Global tokens would be {tokenizer.pad_token_id}, which is the padding of {type(tokenizer).__name__}. "
            "Pass global_token_id=model.config.global_token_id and, for pairs, question_token_ids that are no padding."
        )


def _check_room(tokenizer: Any, questions: list[str], max_length: int) -> None:
    """Raise InputError if a question leaves no token for its text."""
    own = tokenizer(questions, add_special_tokens=False, return_attention_mask=False)["input_ids"]
    longest = max(map(len, own)) + tokenizer.num_special_tokens_to_add(pair=True)
    if longest >= max_length:
        raise InputError(
            f"max_length={max_length:,}, but a question and the special tokens of a pair are {longest:,} tokens, which "
            "leaves none for the text. Give more, or shorten the question."
        )


def _encoded(
    tokenizer: Any, questions: list[str] | None, texts: list[str], max_length: int | None
) -> tuple[BatchEncoding, list[list[Interval]]]:
    """Return the tokens of the batch and their offsets."""
    options = {"return_offsets_mapping": True, "padding": True, "return_tensors": "pt", "max_length": max_length}
    if questions is not None and max_length is not None:
        _check_room(tokenizer, questions, max_length)
    given, longest = ((texts,), True) if questions is None else ((questions, texts), "only_second")
    encoded = tokenizer(*given, truncation=False if max_length is None else longest, **options)
    offsets = encoded.pop("offset_mapping").tolist()
    if not offsets[0]:
        raise InputError(f"None of the {len(texts)} texts has a token: they are empty. Leave them out.")
    return encoded, offsets


def _add_globals(encoded: BatchEncoding, rows: Sequence[Row], token_id: int, has_whole_text: bool) -> None:
    """Add the global tokens, their masks, and links."""
    levels = max([1, *(len(numbers) for row in rows for numbers in row.links)])
    padded = [[[*numbers, *[-1] * (levels - len(numbers))] for numbers in row.links] for row in rows]
    encoded["long_to_global"] = torch.tensor(padded)
    encoded["global_mask"] = _padded([[1] * len(row.global_types) for row in rows])
    encoded["global_input_ids"] = torch.full_like(encoded["global_mask"], token_id)
    encoded["global_reads_all"] = torch.zeros_like(encoded["global_mask"])
    if has_whole_text:
        encoded["global_reads_all"][:, 0] = 1


def _add_types(
    encoded: BatchEncoding, rows: Sequence[Row], sequences: Sequence[list[int | None]], token_ids: tuple[int, int, int]
) -> None:
    """Add the types of tokens of pairs, and the ids of their global tokens.

    sequences: 0 of tokens of a question, 1 of those of its text.
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
    """Add the positions of answers; each is what `answer_positions` takes."""
    found = torch.tensor([answer_positions(*given) for given in answers])
    for name, column in zip(("start_positions", "end_positions", "long_answer_positions"), found.T, strict=True):
        encoded[name] = column.contiguous()


def _padded(rows: Sequence[list[int]]) -> Tensor:
    """Return rows of numbers as one tensor, with zeros on the right."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])


__all__ = ["structured_inputs"]
