"""An order of tokens in which global ones, which may be scattered, lie in few blocks: they come first."""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.layout.token_mask import NO_MASK, Document
from hf_efficient_attn.patterns.intervals import Intervals, normalize

# more global tokens than this part of all are left where they are
MOST = 1 / 8


@dataclass(frozen=True)
class GlobalsFirst:
    """First some tokens, then all others, both in the order of their positions.

    >>> GlobalsFirst((2, 5), 7).positions().tolist()
    [2, 5, 0, 1, 3, 4, 6]
    >>> GlobalsFirst((2, 5), 7).places(((1, 4),))
    ((0, 1), (3, 5))

    Attributes:
        chosen: positions of the first ones, sorted.
        num_tokens: of all.
    """

    chosen: tuple[int, ...]
    num_tokens: int

    def positions(self) -> Tensor:
        """Return the position of the token at each place."""
        is_chosen = torch.zeros(self.num_tokens, dtype=torch.bool)
        is_chosen[list(self.chosen)] = True
        return torch.cat((torch.nonzero(is_chosen)[:, 0], torch.nonzero(~is_chosen)[:, 0]))

    def places(self, intervals: Intervals) -> Intervals:
        """Return the places of all positions in some intervals."""
        found = []
        for start, stop in intervals:
            first, last = bisect_left(self.chosen, start), bisect_left(self.chosen, stop)
            count = len(self.chosen)
            found += [(first, last), (count + start - first, count + stop - last)]
        return normalize(found)

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield (place, first position, last position) for the positions start … stop - 1, in runs of neighbours."""
        first, last = bisect_left(self.chosen, start), bisect_left(self.chosen, stop)
        begin = start
        for index in range(first, last + 1):
            end = self.chosen[index] if index < last else stop
            if begin < end:
                yield len(self.chosen) + begin - index, begin, end - 1
            if index < last:
                yield index, end, end
            begin = end + 1


def globals_first(layout: Layout, documents: tuple[tuple[Document, ...], ...] | None) -> GlobalsFirst | None:
    """Return the order of a whole sequence with scattered global tokens; None: it has none, or is no such sequence.

    documents: those of each example; None: every example is one whole document.
    """
    if layout.is_cross or layout.num_queries != layout.num_keys:
        return None
    found: set[int] = set()
    for document in {document for listed in documents or NO_MASK.documents(1, layout.num_keys) for document in listed}:
        own: set[int] = set()
        for pattern in set(layout.of_document(document).head_patterns()):
            # blocks of tokens fill those of a kernel where they are
            own |= {each.position for each in pattern.global_positions() if each.block_tokens == 1}
        # the first tokens of a document lie in few blocks; those of other examples would be moved with them in vain
        if own != set(range(len(own))):
            found |= {document.start + position for position in own}
    chosen = tuple(sorted(found))
    if not chosen or len(chosen) > MOST * layout.num_keys:
        return None
    return GlobalsFirst(chosen, layout.num_keys)
