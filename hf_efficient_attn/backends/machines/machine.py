"""A machine on which attention was measured, as a value and in JSON types."""

import json
from dataclasses import asdict, dataclass
from typing import Any

from hf_efficient_attn.backends.machines.costs import Costs, PassCosts
from hf_efficient_attn.backends.machines.processor import Processor
from hf_efficient_attn.layout.blocks.block_costs import BlockCosts


@dataclass(frozen=True)
class Machine:
    """A processor and what attention costs there.

    Attributes:
        source: where its costs come from, in words.
        costs: (name of a dtype, its costs).
    """

    processor: Processor
    source: str
    costs: tuple[tuple[str, Costs], ...]

    def __str__(self) -> str:
        return f"{self.processor}: {self.source}" if self.processor.name else self.source

    def costs_in(self, dtype: str) -> Costs:
        """Return the costs in a dtype, or in that nearest to it."""
        known = dict(self.costs)
        return known.get(dtype, self.costs[0][1])

    def to_dict(self) -> dict[str, Any]:
        """Return the machine in JSON types."""
        costs = {name: asdict(each) for name, each in self.costs}
        return {"processor": asdict(self.processor), "source": self.source, "costs": costs}

    def rounded(self) -> "Machine":
        """Return the machine with times of three digits, more than any measurement gives."""
        return self.from_dict(
            json.loads(json.dumps(self.to_dict()), parse_float=lambda text: float(f"{float(text):.3g}"))
        )

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Machine":
        """Return the machine that `to_dict` wrote.

        Raises:
            KeyError, TypeError: it did not.
        """
        costs = tuple((name, _costs(each)) for name, each in data["costs"].items())
        return cls(Processor(**data["processor"]), data["source"], costs)


def _costs(data: dict[str, Any]) -> Costs:
    return Costs(**{**data, "forward": _pass(data["forward"]), "backward": _pass(data["backward"])})


def _pass(data: dict[str, Any]) -> PassCosts:
    listed = data["blocks"]["per_score"]
    blocks = BlockCosts(tuple((int(tokens), float(time)) for tokens, time in listed))
    # files from before there was this choice lack it
    is_widened = bool(data.get("is_widened", PassCosts.is_widened))
    return PassCosts(blocks, float(data["explicit"]), float(data["masked"]), is_widened)
