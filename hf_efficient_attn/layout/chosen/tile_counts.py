"""How many tiles a choice has: the host waits for its device to know it, in the forward pass and not again backward."""

from collections.abc import Hashable, Iterable

from torch import Tensor

from hf_efficient_attn.layout.cache import SMALL_BYTES, BoundedCache

_known: BoundedCache[list[int]] = BoundedCache(SMALL_BYTES)


def counted_once(owners: Iterable[Tensor | None], key: Hashable, counts: Tensor) -> list[int]:
    """Return integers [n] that follow from the contents of tensors and a key, so that both passes ask for them once."""
    if counts.device.type == "cpu":
        return counts.tolist()  # type: ignore[no-any-return]
    return _known.get_of(owners, key, counts.tolist)
