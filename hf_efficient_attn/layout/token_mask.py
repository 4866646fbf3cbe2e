"""Per-example token masks: padding, packed documents, chosen global tokens; and the documents they cut a row into."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_efficient_attn.errors import InputError
from hf_efficient_attn.layout.cache import SMALL_BYTES, BoundedCache
from hf_efficient_attn.layout.host_copies import bring, on_host


@dataclass(frozen=True)
class Document:
    """Neighbouring positions of one example that form a sequence of their own.

    Attributes:
        start, stop: positions on the axis of the keys; the first and the last token in it are not masked.
        global_positions: chosen global tokens, counted from `start`.
        has_holes: some token between the first and the last is masked.
    """

    start: int
    stop: int
    global_positions: tuple[int, ...] = ()
    has_holes: bool = False


_found: BoundedCache[tuple[tuple[Document, ...], ...]] = BoundedCache(SMALL_BYTES)


@dataclass(frozen=True)
class TokenMask:
    """What differs between the examples of a batch. All tensors have shape [batch, keys].

    Attributes:
        key_mask: bool, True = a token; a masked one is not read, and its own row of the output is zero.
        segment_ids: int; neighbouring tokens of equal id form a document, which reads nothing outside itself and
            over which the pattern is laid as if it stood alone.
        global_mask: bool, True = reads and is read by its whole document (as far as a causal pattern lets it).
    """

    key_mask: Tensor | None = None
    segment_ids: Tensor | None = None
    global_mask: Tensor | None = None

    @property
    def is_empty(self) -> bool:
        """Whether all examples are one whole document."""
        return self.key_mask is None and self.segment_ids is None and self.global_mask is None

    def check(self, batch_size: int, num_keys: int, device: torch.device) -> None:
        """Raise InputError if a mask is no tensor, on another device, of another shape, or of another dtype."""
        for name in ("key_mask", "segment_ids", "global_mask"):
            mask = getattr(self, name)
            if mask is None:
                continue
            if not isinstance(mask, Tensor):
                raise InputError(f"{name} is a {type(mask).__name__}; it must be a tensor. Use torch.tensor({name}).")
            if mask.device != device:
                raise InputError(f"{name} is on {mask.device}, and q, k and v on {device}; move it there.")
            if tuple(mask.shape) != (batch_size, num_keys):
                raise InputError(
                    f"{name} has shape {tuple(mask.shape)}; it must be [batch, keys] = [{batch_size}, {num_keys}]."
                )
            if name == "segment_ids":
                if mask.is_floating_point() or mask.dtype == torch.bool:
                    raise InputError(f"segment_ids has dtype {mask.dtype}; it must hold integers, one id a document.")
            elif mask.dtype != torch.bool:
                raise InputError(
                    f"{name} has dtype {mask.dtype}; it must be torch.bool, True = "
                    f"{'a token' if name == 'key_mask' else 'a global token'}. Use {name}.bool() on a mask of 0 and 1."
                )

    def documents(self, batch_size: int, num_keys: int) -> tuple[tuple[Document, ...], ...]:
        """Return the documents of each example, in order. An example whose tokens are all masked has none."""
        if self.is_empty:
            return ((Document(0, num_keys),),) * batch_size
        # off the CPU this waits for the device: the layers of a forward pass, and its backward, ask once
        masks = (self.key_mask, self.segment_ids, self.global_mask)
        return _found.get_of(masks, num_keys, lambda: _documents(masks, num_keys))


def _documents(masks: tuple[Tensor | None, ...], num_keys: int) -> tuple[tuple[Document, ...], ...]:
    bring(*masks)
    keys, segments, chosen = (None if mask is None else on_host(mask) for mask in masks)
    rows = range(next(len(mask) for mask in masks if mask is not None))
    return tuple(
        tuple(_documents_of(num_keys, *(None if each is None else each[row] for each in (keys, segments, chosen))))
        for row in rows
    )


def _documents_of(
    num_keys: int, key_mask: Tensor | None, segment_ids: Tensor | None, global_mask: Tensor | None
) -> Iterator[Document]:
    bounds = [0, num_keys]
    if segment_ids is not None:
        changes = torch.nonzero(segment_ids[1:] != segment_ids[:-1])[:, 0] + 1
        bounds[1:1] = changes.tolist()
    for start, stop in zip(bounds, bounds[1:], strict=False):
        has_holes = False
        if key_mask is not None:
            tokens = torch.nonzero(key_mask[start:stop])[:, 0]
            if tokens.numel() == 0:
                continue
            start, stop = start + int(tokens[0]), start + int(tokens[-1]) + 1
            has_holes = tokens.numel() < stop - start
        chosen: tuple[int, ...] = ()
        if global_mask is not None:
            is_global = global_mask[start:stop] if key_mask is None else global_mask[start:stop] & key_mask[start:stop]
            chosen = tuple(torch.nonzero(is_global)[:, 0].tolist())
        yield Document(start, stop, chosen, has_holes)
