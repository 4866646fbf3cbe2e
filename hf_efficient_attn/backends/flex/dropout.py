"""Which weights are dropped, decided by a hash of their place: a kernel keeps none of them, and its backward pass asks
again.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# of a hash decide
BITS = 24
# spreads neighbouring keys
GOLDEN = -1640531527


@dataclass(frozen=True)
class Dropout:
    """Dropout of one call.

    Attributes:
        probability: of each weight.
        seed: an int32 tensor of no dimension, on the device; the same seed drops the same weights.
    """

    probability: float
    seed: Tensor

    def is_kept(self, example: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Return whether the weight at these indices is kept; they are int tensors that broadcast."""
        row = self.seed
        for index in (example, head, query):
            row = mixed(row ^ index.to(torch.int32))
        drawn = (mixed(row ^ (key.to(torch.int32) * GOLDEN)) >> (32 - BITS)) & (2**BITS - 1)
        return drawn >= round(self.probability * 2**BITS)


def mixed(number: Tensor) -> Tensor:
    """Return a hash of int32 numbers that maps them one to one, each bit of which depends on all of theirs.

    Two rounds of multiplication and xor-shift, with the factors of C. Wellons' "lowbias32", as products of int32 that
    overflow.
    """
    number = (number ^ ((number >> 16) & 0xFFFF)) * 0x7FEB352D
    number = (number ^ ((number >> 15) & 0x1FFFF)) * -0x7B935975
    return number ^ ((number >> 16) & 0xFFFF)


def draw_seed(device: torch.device) -> Tensor:
    """Return a seed, drawn from torch's generator of the device, so that the host need not wait."""
    return torch.randint(-(2**31), 2**31 - 1, (), dtype=torch.int32, device=device)
