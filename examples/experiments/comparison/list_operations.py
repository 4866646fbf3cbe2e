"""ListOps: nested operations on lists of digits, whose value has to be told.

    [MAX 2 9 [MIN 4 7 ] 0 ]  →  9

The rules are those of Nangia & Bowman (arXiv:1804.06028) as the Long Range Arena draws its data (Tay et al.,
arXiv:2011.04006): below the greatest depth a place holds an operation with probability 1/4, otherwise a digit; an
operation has 2 to `max_args` arguments; only expressions of more than `min_tokens` and fewer than `max_tokens` tokens
are kept. A median lies between two digits where their number is even, and is rounded down. The parentheses of the
published files, which say nothing that brackets do not, are left out, as the Long Range Arena leaves them out.
"""

from collections.abc import Callable, Iterator
from random import Random
from statistics import median

# token 0 is padding; digits follow, then operations and what ends them
PAD, NUM_CLASSES = 0, 10
OPERATIONS: dict[str, Callable[[list[int]], int]] = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: int(median(values)),
    "[SM": lambda values: sum(values) % NUM_CLASSES,
}
TOKENS = ["<pad>", *map(str, range(NUM_CLASSES)), *OPERATIONS, "]"]
NUMBERS = {token: number for number, token in enumerate(TOKENS)}
OPERATION_PROBABILITY = 0.25


def expressions(
    seed: int, min_tokens: int = 500, max_tokens: int = 2000, max_depth: int = 10, max_args: int = 10
) -> Iterator[tuple[list[int], int]]:
    """Yield expressions without end, as numbers of their tokens and their value; the same ones for a seed."""
    random = Random(seed)
    while True:
        tokens: list[int] = []
        value = draw(random, tokens, max_tokens, max_depth, max_args)
        if value is not None and min_tokens < len(tokens) < max_tokens:
            yield tokens, value


def draw(random: Random, tokens: list[int], max_tokens: int, max_depth: int, max_args: int) -> int | None:
    """Append the tokens of an expression, and return its value; None: it became longer than is asked for."""
    if max_depth <= 1 or random.random() > OPERATION_PROBABILITY:
        value = random.randrange(NUM_CLASSES)
        tokens.append(NUMBERS[str(value)])
        return value
    name = random.choice(list(OPERATIONS))
    tokens.append(NUMBERS[name])
    values = []
    for _ in range(random.randint(2, max_args)):
        value = draw(random, tokens, max_tokens, max_depth - 1, max_args)
        # a long one is dropped at once, which changes nothing: it would be dropped in the end
        if value is None or len(tokens) >= max_tokens:
            return None
        values.append(value)
    tokens.append(NUMBERS["]"])
    return OPERATIONS[name](values)


def written(tokens: list[int]) -> str:
    """Return an expression as text.

    >>> written([12, 3, 10, 15])
    '[MAX 2 9 ]'
    """
    return " ".join(TOKENS[token] for token in tokens)
