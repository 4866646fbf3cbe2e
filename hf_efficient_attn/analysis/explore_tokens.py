"""The text that `explore` shows a model on: its tokens, as the model reads them and as a reader can."""

from dataclasses import dataclass
from typing import Any

from hf_efficient_attn.analysis.model_text import check_tokens, decoded, tokenizer_of
from hf_efficient_attn.errors import InputError

MAX_TOKENS = 16384
# transformers' number for a tokenizer that knows no limit is larger
NO_LIMIT = 10**9
PREFIXED = ("roberta", "camembert", "xlm-roberta", "longformer")


@dataclass(frozen=True)
class ShownTokens:
    """A text as a model reads it.

    Attributes:
        ids: of the tokens that are read.
        texts: what each stands for; of several tokens of one character, the first shows it, the others a dot.
        special: the places of tokens that stand for no text, such as [CLS].
        num_left_out: how many tokens of the text are beyond the longest input.
    """

    ids: tuple[int, ...]
    texts: tuple[str, ...]
    special: tuple[int, ...]
    num_left_out: int


def read_tokens(source: str, config: Any, content: bytes, max_tokens: int | None) -> ShownTokens:
    """Return the tokens of a text, by the tokenizer beside the model or, for 256 tokens and no tokenizer, its bytes.

    Args:
        max_tokens: the most to read; None: 16,384, or as many as the model has positions.

    Raises:
        InputError: a text that is not in UTF-8, no tokenizer where one is needed, one that does not fit the
            model, or fewer than 2 tokens.
    """
    tokenizer = tokenizer_of(source, config.vocab_size)
    longest = _longest(config, tokenizer, max_tokens)
    if longest < 2:
        raise InputError(f"--tokens {longest}: attention between tokens needs at least 2.")
    special: list[int] = []
    if tokenizer is None:
        ids, texts, num_tokens = list(content[:longest]), _byte_texts(content)[:longest], len(content)
    else:
        ids, special, texts, num_tokens = _tokenized(tokenizer, decoded(content), longest)
    check_tokens(source, ids, config.vocab_size)
    return ShownTokens(tuple(ids), tuple(texts), tuple(special), num_tokens - len(ids))


def _tokenized(tokenizer: Any, text: str, longest: int) -> tuple[list[int], list[int], list[str], int]:
    """Return the tokens of a text, which are special, what they stand for, and how many there are without a limit."""
    options = {"return_special_tokens_mask": True, "return_offsets_mapping": tokenizer.is_fast}
    encoded = tokenizer(text, truncation=True, max_length=longest, **options)
    ids, special = encoded["input_ids"], [i for i, is_it in enumerate(encoded["special_tokens_mask"]) if is_it]
    texts = [str(tokenizer.decode([token])) for token in ids]
    if tokenizer.is_fast:
        texts = _texts_at(text, encoded["offset_mapping"], texts, set(special))
    return ids, special, texts, len(tokenizer(text, verbose=False)["input_ids"])


def _longest(config: Any, tokenizer: Any, max_tokens: int | None) -> int:
    """Return the longest input in tokens; RoBERTa counts positions from its padding on."""
    limits = [MAX_TOKENS if max_tokens is None else max_tokens]
    positions = getattr(config, "max_position_embeddings", None)
    if positions:
        limits.append(positions - 2 if config.model_type in PREFIXED else positions)
    if tokenizer is not None and tokenizer.model_max_length < NO_LIMIT:
        limits.append(tokenizer.model_max_length)
    return min(limits)


def _byte_texts(content: bytes) -> list[str]:
    r"""Return the character that each byte begins; a dot for its further bytes, and numbers for bytes of no character.

    >>> _byte_texts(b"a\n\xc3\xa9\xff\x00")
    ['a', '\n', 'é', '·', '‹FF›', '‹00›']
    """
    texts = []
    for letter in content.decode(errors="surrogateescape"):
        is_alone = "\udc80" <= letter <= "\udcff"
        if is_alone or (ord(letter) < 32 and letter not in "\n\t\r"):
            texts.append(f"‹{ord(letter) & 0xFF:02X}›")
        else:
            texts += [letter, *"·" * (len(letter.encode()) - 1)]
    return texts


def _texts_at(text: str, offsets: list[tuple[int, int]], decoded: list[str], special: set[int]) -> list[str]:
    """Return the part of the text that each token stands for, with what no token stands for before it, such as spaces.

    Where several tokens are the bytes of one character, the first shows it, and the others a dot.

    >>> _texts_at("a é", [(0, 0), (0, 1), (2, 3), (2, 3)], ["[CLS]", "a", "?", "?"], {0})
    ['[CLS]', 'a', ' é', '·']
    """
    texts, end = [], 0
    for place, (_, stop) in enumerate(offsets):
        if place in special:
            texts.append(decoded[place])
            continue
        texts.append(text[end:stop] if stop > end else "·")
        end = max(end, stop)
    return texts
