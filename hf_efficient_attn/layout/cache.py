"""Thread-safe caches, limited in bytes, that keep results between calls; the size of a value in memory."""

import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import update_wrapper
from threading import Lock
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

from hf_efficient_attn.errors import WorkLimitError
from hf_efficient_attn.patterns.intervals import work_budget
from hf_efficient_attn.patterns.pattern import Pattern

# How much memory a value takes.


# the approximate size of a Python object
OBJECT_BYTES = 48
# the attribute in which a pattern keeps its size, since patterns are immutable and part of many keys
KEPT = "_size_in_bytes"
NUMBERS = frozenset((int, float, bool, type(None)))


def size_in_bytes(value: object) -> int:
    """Return the approximate memory of a value in bytes; a storage that several tensors share counts once.

    >>> import torch
    >>> size_in_bytes(torch.zeros(1000)[:10]) - OBJECT_BYTES
    4000
    """
    total, left = 0, [value]
    seen: set[object] = set()
    while left:
        each = left.pop()
        is_new = id(each) not in seen
        seen.add(id(each))
        total += OBJECT_BYTES * is_new
        # most values are numbers, which hold nothing else
        if not is_new or type(each) in NUMBERS:
            continue
        if isinstance(each, Tensor):
            storage = each.untyped_storage()
            place = ("storage", storage.data_ptr(), storage.device)
            total += 0 if place in seen else storage.nbytes()
            seen.add(place)
        elif isinstance(each, str | bytes):
            total += len(each)
        elif isinstance(each, tuple | list | set | frozenset):
            total += 8 * len(each)
            if set(map(type, each)) == {int}:
                # rows of long tables are counted at once
                new = set(map(id, each)) - seen
                total += OBJECT_BYTES * len(new)
                seen |= new
            else:
                left += each
        elif isinstance(each, Mapping):
            left += [*each.keys(), *each.values()]
        elif (known := _known_size(each)) is not None:
            total += known
        elif not callable(each):
            # classes and functions stay in memory anyway
            left += getattr(each, "__dict__", {}).values()
    return total


def _known_size(value: object) -> int | None:
    """Return the size that a value states, or that of a pattern, which is computed once; None for other values."""
    if isinstance(value, type):
        return None
    known: int | None = getattr(value, "num_held_bytes", None)
    if known is not None or not isinstance(value, Pattern):
        return known
    own = vars(value)
    if KEPT not in own:
        own[KEPT] = size_in_bytes(tuple(own.values()))
    return int(own[KEPT])


P = ParamSpec("P")
T = TypeVar("T")

MEBIBYTE = 2**20
# for values that are small compared to the tensors of a call, such as patterns and plans
SMALL_BYTES = 128 * MEBIBYTE
# limit for all caches of the process together
MAX_TOTAL_BYTES = 512 * MEBIBYTE
# the approximate overhead of an entry
ENTRY_BYTES = 512


@dataclass(eq=False)
class Entry(Generic[T]):
    """A value, its size in bytes, the tensors from which it was made, copies of their contents, and whether it was used
    since eviction last skipped it.
    """

    value: T
    num_bytes: int
    owners: tuple["weakref.ref[Tensor]", ...] = ()
    contents: tuple[Tensor | None, ...] = ()
    is_used: bool = False


class BoundedCache(Generic[T]):
    """Values by key, limited to `max_bytes`.

    Values that were not used recently are evicted first, when the cache exceeds `max_bytes`, or when all caches
    together exceed MAX_TOTAL_BYTES and this one is the largest. A value larger than `max_bytes` is never kept.

    The cache is thread-safe: a value can be found only when it is complete. Threads that miss a key of `get` at the
    same time each build the value, and all get the one that was stored first.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._entries: OrderedDict[Hashable, Entry[T]] = OrderedDict()
        self._lock = Lock()
        # keys of entries whose tensors were freed, which may happen while this thread holds the lock
        self._orphans: deque[Hashable] = deque()
        _caches.append(weakref.ref(self, _caches.remove))

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Hashable, build: Callable[[], T]) -> T:
        """Return what `build()` returned when `key` was first used; the key must determine the value.

        The value is shared and must not be changed.
        """
        entry = self.find(key)
        return self._add(key, _outside_inference_mode(build), ()) if entry is None else entry.value

    def find(self, key: Hashable) -> Entry[T] | None:
        """Return the entry of `key`, or None."""
        # reading a dict is thread-safe without a lock
        entry = self._entries.get(key)
        if entry is not None:
            entry.is_used = True
        return entry

    def get_of(self, owners: Iterable[Tensor | None], key: Hashable, build: Callable[[], T]) -> T:
        """Do the same as `get` for a value that also depends on the contents of tensors.

        The value is dropped when one of the tensors is freed. A tensor that was changed in place counts as another one.
        On the CPU its contents are compared, since writes through `.data`, or through a numpy array that shares its
        memory, do not change its version. On other devices, where numpy arrays share no memory, only the version is
        compared, because the host would have to wait for the contents; writes through `.data` go unnoticed there.
        Nothing is kept for tensors made under inference mode, which have no version, or for tensors returned by a CUDA
        graph, whose next run overwrites them without changing their version.
        """
        owners = tuple(owners)
        tensors = tuple(owner for owner in owners if owner is not None)
        if any(map(may_change_unseen, tensors)):
            return build()
        entry = self.find_of(owners, key)
        if entry is not None:
            return entry.value
        # versions are read before contents, so that a write in between leaves an entry that is never found
        key, contents = _key_of(owners, key), tuple(_contents(tensor) for tensor in tensors)
        return self._add(key, _outside_inference_mode(build), tensors, contents)

    def find_of(self, owners: Iterable[Tensor | None], key: Hashable) -> Entry[T] | None:
        """Return the entry that `get_of` keeps for these tensors, or None."""
        owners = tuple(owners)
        tensors = tuple(owner for owner in owners if owner is not None)
        if any(map(may_change_unseen, tensors)):
            return None
        # the id of a freed tensor may be reused, so its entry must be dropped first
        self._drop_orphans()
        entry = self._entries.get(_key_of(owners, key))
        if entry is None or any(ref() is not owner for ref, owner in zip(entry.owners, tensors, strict=True)):
            return None
        if not all(map(_is_unchanged, tensors, entry.contents)):
            return None
        entry.is_used = True
        return entry

    def clear(self) -> None:
        """Remove all entries."""
        with self._lock:
            self._entries.clear()
            self._orphans.clear()
            self.num_bytes = 0

    def _add(self, key: Hashable, value: T, tensors: tuple[Tensor, ...], contents: tuple[Tensor | None, ...] = ()) -> T:
        num_bytes = ENTRY_BYTES + size_in_bytes((key, value, contents))
        if num_bytes > self.max_bytes:
            return value
        owners = tuple(weakref.ref(tensor, lambda _: self._orphan(key)) for tensor in tensors)
        with self._lock:
            first = self._entries.get(key)
            if first is not None and not tensors:
                return first.value
            self._remove(key)
            self._entries[key] = Entry(value, num_bytes, owners, contents)
            self.num_bytes += num_bytes
            while self.num_bytes > self.max_bytes:
                self._evict()
        # outside of the lock, since no thread may hold the locks of two caches
        _keep_total()
        return value

    def shrink(self) -> None:
        """Remove the oldest entry, or, if it was used recently, mark it as unused and as the newest."""
        with self._lock:
            if self._entries:
                self._evict()

    def _evict(self) -> None:
        key, entry = next(iter(self._entries.items()))
        if entry.is_used:
            entry.is_used = False
            self._entries.move_to_end(key)
        else:
            self._remove(key)

    def _remove(self, key: Hashable) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.num_bytes -= entry.num_bytes

    def _orphan(self, key: Hashable) -> None:
        self._orphans.append(key)
        self._drop_orphans()

    def _drop_orphans(self) -> None:
        # if the lock is taken, the next caller does it
        while self._orphans and self._lock.acquire(blocking=False):
            try:
                key = self._orphans.popleft()
                entry = self._entries.get(key)
                # another tensor may have the same id by now, with its own entry
                if entry is not None and any(ref() is None for ref in entry.owners):
                    self._remove(key)
            except IndexError:
                # another thread was faster
                return
            finally:
                self._lock.release()


def _key_of(owners: Iterable[Tensor | None], key: Hashable) -> Hashable:
    return key, tuple(None if owner is None else (id(owner), owner._version) for owner in owners)


def _contents(tensor: Tensor) -> Tensor | None:
    """Return a copy of a tensor on the CPU; None on other devices, where only versions are compared."""
    if tensor.device.type != "cpu":
        return None
    with _unseen(tensor):
        return tensor.detach().clone()


def may_change_unseen(tensor: Tensor) -> bool:
    """Return whether a tensor may change without a change of its version, so that nothing may be kept for it.

    A compiled program with CUDA graphs returns the same tensors from every run and does not change their versions.
    """
    if tensor.is_inference():
        return True
    # the registry of torch's cudagraph_trees; traced code does not get here
    return tensor.device.type == "cuda" and bool(torch._C._is_cached_tensor(tensor))  # type: ignore[attr-defined]


def _is_unchanged(tensor: Tensor, contents: Tensor | None) -> bool:
    if contents is None:
        return True
    with _unseen(tensor):
        # a write through `.data` may also have changed the shape or dtype
        return tensor.dtype == contents.dtype and torch.equal(tensor, contents)


def _unseen(tensor: Tensor) -> AbstractContextManager[object]:
    """Return a context in which no dispatch mode sees the operators, unless the tensor is of a subclass.

    Selective checkpointing is such a mode, and raises an error for an operator that only the second forward runs.
    """
    return torch._C._DisableTorchDispatch() if type(tensor) is Tensor else nullcontext()


_caches: list["weakref.ref[BoundedCache[Any]]"] = []


def _keep_total() -> None:
    """Shrink the largest cache until all of them together hold at most MAX_TOTAL_BYTES."""
    while True:
        caches = [cache for ref in tuple(_caches) if (cache := ref()) is not None]
        if sum(cache.num_bytes for cache in caches) <= MAX_TOTAL_BYTES:
            return
        max(caches, key=lambda cache: cache.num_bytes).shrink()


@dataclass(frozen=True)
class Refusal:
    """A cached WorkLimitError: the function refuses these arguments because they would take too much work."""

    error: type[WorkLimitError]
    message: str


class Cached(Generic[P, T]):
    """A function of hashable arguments that keeps its results in a `BoundedCache`; `cache_clear` removes them.

    Each computation has its own work budget (see `patterns/intervals.py`); a refusal to exceed it is cached as well.
    """

    def __init__(self, function: Callable[P, T], max_bytes: int) -> None:
        update_wrapper(self, function)
        self.compute = function
        self.cache: BoundedCache[T | Refusal] = BoundedCache(max_bytes)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        key = (args, tuple(sorted(kwargs.items()))) if kwargs else args
        found = self.cache.find(key)
        value = self.cache.get(key, lambda: self._answer(*args, **kwargs)) if found is None else found.value
        if isinstance(value, Refusal):
            raise value.error(value.message)
        return value

    def function(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the function without the cache."""
        # longer layouts get a larger budget
        num_rows = max((getattr(each, "num_rows", 0) for each in args), default=0)
        with work_budget("Laying this pattern out", num_rows=num_rows):
            return self.compute(*args, **kwargs)

    def _answer(self, *args: P.args, **kwargs: P.kwargs) -> T | Refusal:
        try:
            return self.function(*args, **kwargs)
        except WorkLimitError as error:
            return Refusal(type(error), *error.args)

    def cache_clear(self) -> None:
        """Remove all results."""
        self.cache.clear()


def cached(max_bytes: int = SMALL_BYTES) -> Callable[[Callable[P, T]], Cached[P, T]]:
    """Return a decorator that caches the results of a function of hashable arguments."""
    return lambda function: Cached(function, max_bytes)


def _outside_inference_mode(build: Callable[[], T]) -> T:
    # a tensor made under inference mode cannot be used in training later; leaving the mode alone would enable gradients
    is_recording = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(is_recording):
        return build()
