"""Per-example token masks (padding, packed documents, chosen global tokens), and the documents that they define."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_efficient_attn.errors import InputError
from hf_efficient_attn.layout.cache import SMALL_BYTES, BoundedCache
from hf_efficient_attn.layout.transfer import derived, on_host, prefetch_to_host


@dataclass(frozen=True)
class Document:
    """Consecutive positions of one example that form a separate sequence.

    Attributes:
        start, stop: its range on the axis of the keys; its first and its last token are not masked.
        global_positions: chosen global tokens, counted from `start`.
        has_holes: whether a token between the first and the last is masked, on either axis.
        queries: its range on the axis of the queries; None if this is the axis of the keys.
    """

    start: int
    stop: int
    global_positions: tuple[int, ...] = ()
    has_holes: bool = False
    queries: tuple[int, int] | None = None

    @property
    def query_start(self) -> int:
        """Its start on the axis of the queries."""
        return self.start if self.queries is None else self.queries[0]


_found: BoundedCache[tuple[tuple[Document, ...], ...]] = BoundedCache(SMALL_BYTES)
_cut: BoundedCache["TokenMask"] = BoundedCache(SMALL_BYTES)


@dataclass(frozen=True)
class TokenMask:
    """What differs between the examples of a batch, as tensors [batch, keys], or [batch, positions] for the last two.

    The last two are for queries with their own axis, and are for it what the first two are for the axis of the keys.
    They cover all its positions: those of the queries and, in cached decoding, those before them. A query then attends
    to the keys whose segment has the same id.

    Attributes:
        key_mask: bool, True = a token; no query attends to a masked one, and its own row of the output is zero.
        segment_ids: int; consecutive tokens with equal ids form a document, which attends to nothing outside itself
            and to which the pattern applies as if it were alone.
        global_mask: bool, True = attends to its whole document and is attended to by all of it (as far as a causal
            pattern allows).
        query_mask, query_segment_ids: `key_mask` and `segment_ids` of the axis of the queries.
    """

    key_mask: Tensor | None = None
    segment_ids: Tensor | None = None
    global_mask: Tensor | None = None
    query_mask: Tensor | None = None
    query_segment_ids: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The masks, in the order of the arguments."""
        return self.key_mask, self.segment_ids, self.global_mask, self.query_mask, self.query_segment_ids

    @property
    def of_queries(self) -> "TokenMask":
        """The mask of the queries' own axis, if they have one, as if it were a mask of keys."""
        return TokenMask(self.query_mask, self.query_segment_ids)

    @property
    def is_empty(self) -> bool:
        """Whether all examples are one whole document."""
        # written out for speed, since every call asks several times
        has_none_of_keys = self.key_mask is None and self.segment_ids is None and self.global_mask is None
        return has_none_of_keys and self.query_mask is None and self.query_segment_ids is None

    @property
    def shape(self) -> tuple[int, int] | None:
        """The shape [batch, keys] of the masks of keys; None if there are none."""
        of_keys = (self.key_mask, self.segment_ids, self.global_mask)
        return next(((mask.shape[0], mask.shape[1]) for mask in of_keys if mask is not None), None)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "TokenMask":
        """Return the mask on a device; accelerate calls this to move the inputs of layers."""
        return TokenMask(
            *(None if mask is None else mask.to(device, non_blocking=non_blocking) for mask in self.tensors)
        )

    def first(self, num_keys: int) -> "TokenMask":
        """Return the mask of the first keys, and of the same queries."""
        of_keys = (self.key_mask, self.segment_ids, self.global_mask)
        cut = [None if mask is None else derived(lambda mask: mask[:, :num_keys].clone(), mask) for mask in of_keys]
        return TokenMask(*cut, *self.of_queries.tensors[:2])

    def last(self, num_keys: int) -> "TokenMask":
        """Return the mask of the last keys, and of the same queries; the layers of a forward pass share the result."""
        if torch.compiler.is_compiling():
            return self._last(num_keys)
        return _cut.get_of(self.tensors, num_keys, lambda: self._last(num_keys))

    def _last(self, num_keys: int) -> "TokenMask":
        of_keys = (self.key_mask, self.segment_ids, self.global_mask)
        # a view would keep the whole mask alive
        cut = [None if mask is None else derived(lambda mask: mask[:, -num_keys:].clone(), mask) for mask in of_keys]
        return TokenMask(*cut, *self.of_queries.tensors[:2])

    def check(self, batch_size: int, num_keys: int, device: torch.device, num_positions: int | None = None) -> None:
        """Raise InputError if a mask is not a tensor, has another device, shape or dtype, or lacks its counterpart.

        num_positions: length of the axis of the queries; None if it is the axis of the keys.
        """
        for name in ("key_mask", "segment_ids", "global_mask", "query_mask", "query_segment_ids"):
            mask = getattr(self, name)
            if mask is None:
                continue
            axis, size = ("positions", num_positions) if name.startswith("query") else ("keys", num_keys)
            if not isinstance(mask, Tensor):
                raise InputError(f"{name} is a {type(mask).__name__}; it must be a tensor. Use torch.tensor({name}).")
            if mask.device != device:
                raise InputError(f"{name} is on {mask.device}, and q, k and v on {device}; move it there.")
            if tuple(mask.shape) != (batch_size, size):
                raise InputError(
                    f"{name} has shape {tuple(mask.shape)}; it must be [batch, {axis}] = [{batch_size}, {size}], where "
                    "q, k and v are (batch, heads, tokens, head_dim)."
                )
            if name.endswith("segment_ids"):
                if mask.is_floating_point() or mask.dtype == torch.bool:
                    raise InputError(f"{name} has dtype {mask.dtype}; it must hold integers, one id per document.")
            elif mask.dtype != torch.bool:
                raise InputError(
                    f"{name} has dtype {mask.dtype}; it must be torch.bool, with True for "
                    f"{'global ' if name == 'global_mask' else ''}tokens. Use {name}.bool() on a mask of 0 and 1."
                )
        if num_positions is not None and (self.segment_ids is None) != (self.query_segment_ids is None):
            raise InputError(
                "With cross=True a query attends only to keys with its own segment id. Give both query_segment_ids and "
                "segment_ids (of the keys), or neither."
            )

    def documents(
        self, batch_size: int, num_keys: int, num_positions: int | None = None
    ) -> tuple[tuple[Document, ...], ...]:
        """Return the documents of each example, in order; an example whose tokens are all masked has none.

        num_positions: length of the axis of the queries; None if it is the axis of the keys. With two axes, each pair
            of segments with equal ids, one of queries and one of keys, is a document.
        """
        if self.is_empty:
            queries = None if num_positions is None else (0, num_positions)
            return ((Document(0, num_keys, queries=queries),),) * batch_size
        # cached, so that all layers of a forward pass and its backward pass wait for a device only once
        return _found.get_of(
            self.tensors, (num_keys, num_positions), lambda: self._find(batch_size, num_keys, num_positions)
        )

    def _find(self, batch_size: int, num_keys: int, num_positions: int | None) -> tuple[tuple[Document, ...], ...]:
        prefetch_to_host(*self.tensors)
        if num_positions is None:
            return _documents((self.key_mask, self.segment_ids, self.global_mask), num_keys)
        of_keys, of_queries = TokenMask(self.key_mask, self.segment_ids), self.of_queries
        listed = zip(
            of_queries.documents(batch_size, num_positions), of_keys.documents(batch_size, num_keys), strict=True
        )
        return tuple(tuple(self._pairs(example, *documents)) for example, documents in enumerate(listed))

    def _pairs(
        self, example: int, of_queries: tuple[Document, ...], of_keys: tuple[Document, ...]
    ) -> Iterator[Document]:
        """Yield a document for each pair of segments, of queries and of keys, with the same id."""
        ids = [None if each is None else on_host(each)[example] for each in (self.query_segment_ids, self.segment_ids)]
        by_id: dict[int, list[Document]] = {}
        for document in of_keys:
            by_id.setdefault(_id_of(ids[1], document), []).append(document)
        for document in of_queries:
            for keys in by_id.get(_id_of(ids[0], document), ()):
                has_holes = keys.has_holes or document.has_holes
                yield replace(keys, has_holes=has_holes, queries=(document.start, document.stop))


NO_MASK = TokenMask()


def _id_of(ids: Tensor | None, document: Document) -> int:
    return 0 if ids is None else int(ids[document.start])


def _documents(masks: tuple[Tensor | None, ...], num_keys: int) -> tuple[tuple[Document, ...], ...]:
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
