"""What the tests know of a family: its models, and which of them stand for it; `families.py` has them all."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Family:
    """A row of the table, and the models that stand for it; what is not said is the first case that can.

    Attributes:
        decoder: the case that writes texts for the libraries beside this one.
        encoder: the case that reads texts for them.
        trained: the case with most kinds of parameters, which several processes train, and which the Hub gets.
        instead: cases, or their names, that stand for the family in a column instead of the one that is trained.
        refuses: what the cases of a column, or an adapter of PEFT, are refused with, as a regular expression.
        accepts: the names of the cases that are not refused although others are.
    """

    name: str
    cases: tuple[Any, ...]
    decoder: str | None = None
    encoder: str | None = None
    trained: str | None = None
    instead: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    refuses: Mapping[str, str] = field(default_factory=dict)
    accepts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def writer(self) -> Any:
        """The decoder, or an encoder-decoder; None: it has encoders alone."""
        heads = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM")
        return next((case for case in self._named(self.decoder) if case.main_head in heads), None)

    @property
    def reader(self) -> Any:
        """The encoder, or an encoder-decoder; None: it has decoders alone."""
        return next((case for case in self._named(self.encoder) if case.main_head != "AutoModelForCausalLM"), None)

    @property
    def is_encoder_decoder(self) -> bool:
        return self.cases[0].main_head == "AutoModelForSeq2SeqLM"

    def column(self, name: str) -> tuple[Any, ...]:
        """Return the cases that stand for it in a column."""
        chosen = self.instead.get(name, self._named(self.trained)[:1])
        return tuple(self._named(case)[0] if isinstance(case, str) else case for case in chosen)

    def _named(self, name: str | None) -> tuple[Any, ...]:
        return tuple(case for case in self.cases if name in (None, case.name))
