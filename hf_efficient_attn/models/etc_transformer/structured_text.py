"""From texts with parts, such as sentences and paragraphs, to the inputs of an ETC: a global token for every part."""

import re
from collections.abc import Sequence
from typing import Any

import torch
from transformers import BatchEncoding

from hf_efficient_attn.errors import InputError
from hf_efficient_attn.messages import shown

Interval = tuple[int, int]

# a sentence ends behind one of .!? and what closes after it, before a space, or where a paragraph ends
SENTENCE = re.compile(r"\S.*?(?:[.!?…][\"'”’)\]]*(?=\s|$)|(?=\n\s*\n)|$)", re.DOTALL)
PARAGRAPH = re.compile(r"\S.*?(?=\n\s*\n|\s*$)", re.DOTALL)


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
    return [found.span() for found in PARAGRAPH.finditer(text)]


def structured_inputs(
    tokenizer: Any,
    texts: Sequence[str],
    parts: Sequence[Sequence[Interval]] | None = None,
    global_token_id: int = 1,
    max_length: int | None = None,
    has_whole_text: bool = False,
) -> BatchEncoding:
    """Return the inputs of an ETC for texts, as tensors, with a global token for every part of a text.

    A token belongs to each part in which its first letter is; parts may lie within each other, as sentences in
    paragraphs do. Parts of which no token is left are left out.

    Args:
        tokenizer: a fast one, which tells where in the text its tokens are.
        parts: for each text the intervals of its parts, in characters, in the order of their global tokens; None: its
            `sentences`.
        global_token_id: what every global token is; as in the config.
        max_length: tokens at which texts are cut; None: nowhere.
        has_whole_text: whether a first global token stands for the whole text, and reads all of it whatever
            `hard_global_to_long` says.

    Returns `input_ids` and `attention_mask` [texts, tokens], `global_input_ids`, `global_mask` and `global_reads_all`
    [texts, global tokens], and `long_to_global` [texts, tokens, levels], see `EtcTransformerModel.forward`. Texts are
    padded as the tokenizer does, global tokens on the right.

    Raises:
        InputError: a slow tokenizer, no texts, none with a token, or parts that are not one list for each text.
    """
    texts = [] if isinstance(texts, str) else list(texts)
    if not texts or not getattr(tokenizer, "is_fast", False):
        raise InputError(
            f"structured_inputs got {len(texts)} texts and the tokenizer {type(tokenizer).__name__}; it needs a list "
            "of at least one text, and a fast tokenizer, which tells where in a text its tokens begin."
        )
    parts = [sentences(text) for text in texts] if parts is None else parts
    if len(parts) != len(texts):
        raise InputError(f"parts has {len(parts)} lists for {len(texts)} texts; give one for each text.")
    options = {"return_offsets_mapping": True, "padding": True, "return_tensors": "pt"}
    encoded = tokenizer(texts, truncation=max_length is not None, max_length=max_length, **options)
    offsets = encoded.pop("offset_mapping").tolist()
    if not offsets[0]:
        raise InputError(f"None of the {len(texts)} texts has a token: they are empty. Leave them out.")
    places = [first_letters(text, each) for text, each in zip(texts, offsets, strict=True)]
    linked = [_links(*each, has_whole_text) for each in zip(places, parts, strict=True)]
    num_global = [count for _, count in linked]
    levels = max([1, *(len(numbers) for links, _ in linked for numbers in links)])
    padded = [[[*numbers, *[-1] * (levels - len(numbers))] for numbers in links] for links, _ in linked]
    real = torch.arange(max(num_global)) < torch.tensor(num_global).unsqueeze(1)
    encoded["long_to_global"] = torch.tensor(padded)
    encoded["global_input_ids"] = torch.full(real.shape, global_token_id)
    encoded["global_mask"] = real.long()
    reads_all = torch.zeros_like(real, dtype=torch.long)
    if has_whole_text:
        reads_all[:, 0] = 1
    encoded["global_reads_all"] = reads_all
    return encoded


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


def _links(places: list[int | None], parts: Sequence[Interval], has_whole_text: bool) -> tuple[list[list[int]], int]:
    """Return the numbers of the global tokens of each token, and how many global tokens there are."""
    for interval in parts:
        if len(interval) != 2 or not 0 <= interval[0] < interval[1]:
            raise InputError(f"parts has {shown(interval)}; give (start, stop) in characters, with 0 <= start < stop.")
    inside = [[at is not None and start <= at < stop for at in places] for start, stop in parts]
    kept = [row for row in inside if any(row)]
    if has_whole_text or not kept:
        # a text without parts has a global token all the same
        kept = [[at is not None for at in places], *kept]
    return [[number for number, row in enumerate(kept) if row[token]] for token in range(len(places))], len(kept)


__all__ = ["structured_inputs"]
