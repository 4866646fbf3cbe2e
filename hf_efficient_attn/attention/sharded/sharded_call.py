"""What the processes that share texts compute together in one layer, but for the states."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hf_efficient_attn.attention.sharded.key_exchange import KeyExchange, Text
from hf_efficient_attn.attention.sharded.sequence_shards import Bounds, SequenceShards
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.layout.score_terms import Term
from hf_efficient_attn.layout.token_mask import TokenMask


@dataclass(frozen=True)
class Scores:
    """How scores are made, besides their pattern: the arguments of `build_call` of the same names, and the backend."""

    scale: float
    terms: tuple[Term, ...] = ()
    sinks: Tensor | None = None
    softcap: float | None = None
    dropout: float = 0.0
    backend: str = "auto"


@dataclass(frozen=True, eq=False)
class ShardedCall:
    """A call of the attention of one layer, the same in all processes but for the values of terms.

    Attributes:
        layout: of whole texts.
        tokens: the mask of whole texts.
        shards: the processes.
        bounds: the tokens that each of them holds.
        examples: the text of every example of the batch.
        exchange: of keys, if they are exchanged.
        scores: with terms for the queries of this process.
    """

    layout: Layout
    tokens: TokenMask
    shards: SequenceShards
    bounds: Bounds
    examples: tuple[Text, ...]
    exchange: KeyExchange
    scores: Scores

    @cached_property
    def rank(self) -> int:
        """The place of this process."""
        return self.shards.rank

    @property
    def own(self) -> tuple[int, int]:
        """The tokens of this process: the first, and the one after the last."""
        return self.bounds[self.rank]

    @cached_property
    def texts(self) -> tuple[Text, ...]:
        """The different texts of the batch."""
        return tuple(dict.fromkeys(self.examples))

    def members(self, text: Text, device: torch.device) -> Tensor:
        """Return the places of the examples that are a text."""
        return torch.tensor([place for place, each in enumerate(self.examples) if each == text], device=device)
