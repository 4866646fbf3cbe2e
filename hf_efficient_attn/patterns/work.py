"""How much work a question about a pattern may take, counted in steps, so that it is the same on every machine.

A step is what looking at one interval of keys takes, a microsecond or less. Patterns take steps where they make
intervals; a question that needs too many of them is refused: more than are taken in most of a second, or for long
inputs more than so many for each query of each head. What is remembered, such as a compiled layout, is a question of
its own, so that no answer depends on what was asked before.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from hf_efficient_attn.errors import WorkLimitError

# of one question: most of a second
MAX_STEPS = 3 << 18
# more for each query of each head, since longer inputs may take longer
STEPS_PER_ROW = 40
# what every look at a pattern takes, however few intervals it finds
STEPS_PER_LOOK = 2
# questions whose answers only help, such as with a warning, take this part of the steps
SMALL_SHARE = 8
ADVICE = (
    "Its rows differ nearly everywhere, or are many intervals each: use a pattern of whole blocks (Blocks), fewer "
    "patterns or single positions in it, or shorter inputs."
)


class Question:
    """Counts the steps of one question.

    what: what is asked, as the beginning of a sentence. advice: what to do where it takes too many steps.
    max_steps: how many are too many.
    """

    def __init__(self, what: str, advice: str, max_steps: int) -> None:
        self.what, self.advice, self.max_steps = what, advice, max_steps
        self.num_steps = 0

    def spend(self, num_steps: int) -> None:
        """Count more steps.

        Raises:
            WorkLimitError: there are too many in all.
        """
        self.num_steps += num_steps
        if self.num_steps > self.max_steps:
            raise WorkLimitError(
                f"{self.what} would take more than {self.max_steps:,} steps, of about a microsecond. {self.advice}"
            )


# of this thread
_asked: ContextVar[Question | None] = ContextVar("asked", default=None)


@contextmanager
def bounded(what: str, advice: str = ADVICE, share: int = 1, num_rows: int = 0) -> Iterator[None]:
    """Refuse what is asked within the block where it takes too many steps.

    Args:
        what, advice: as in `Question`.
        share: that many questions together may take as many steps as one.
        num_rows: how many queries the question is about, in all heads.
    """
    token = _asked.set(Question(what, advice, max(MAX_STEPS, STEPS_PER_ROW * num_rows) // share))
    try:
        yield
    finally:
        _asked.reset(token)


def spend(num_steps: int) -> None:
    """Count steps of the question that is being answered; outside of one, nothing is counted.

    Raises:
        WorkLimitError: they are too many.
    """
    question = _asked.get()
    if question is not None:
        question.spend(num_steps)
