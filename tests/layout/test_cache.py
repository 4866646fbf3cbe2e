"""What is kept between calls: how much, for how long, and for whom."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_efficient_attn.errors import WorkLimitError
from hf_efficient_attn.layout import cache as cache_module
from hf_efficient_attn.layout.cache import ENTRY_BYTES, BoundedCache, cached, size_in_bytes
from hf_efficient_attn.patterns.intervals import MAX_STEPS, charge

KILOBYTES = 10_000


def tensor() -> Tensor:
    return torch.zeros(KILOBYTES, dtype=torch.uint8)


def test_a_refusal_for_its_work_is_remembered() -> None:
    asked = []

    @cached()
    def refused(number: int) -> int:
        asked.append(number)
        charge(MAX_STEPS + 1)
        return number

    for _ in range(2):
        with pytest.raises(WorkLimitError, match="would take more than"):
            refused(1)
    assert asked == [1]


def test_bounded_in_bytes() -> None:
    cache: BoundedCache[Tensor] = BoundedCache(max_bytes=35_000)
    first = cache.get(0, tensor)
    for number in range(1, 10):
        cache.get(number, tensor)
        # what is asked for again and again stays
        assert cache.get(0, tensor) is first
        assert cache.num_bytes <= 35_000
    assert len(cache) == 3
    assert 3 * KILOBYTES < cache.num_bytes < 3 * (KILOBYTES + 2 * ENTRY_BYTES)
    cache.get("large", lambda: torch.zeros(35_000, dtype=torch.uint8))
    assert len(cache) == 3
    cache.clear()
    assert len(cache) == cache.num_bytes == 0


def test_bytes_of_values() -> None:
    whole = torch.zeros(1000)
    assert 4000 < size_in_bytes([whole[:5], whole[5:], {"key": whole}]) < 5000
    assert size_in_bytes(tuple(range(1000))) > 8 * 1000
    assert size_in_bytes("x" * 1000) > 1000


def test_keys_count_too() -> None:
    cache: BoundedCache[None] = BoundedCache(max_bytes=1 << 20)
    for number in range(300):
        cache.get((str(number) * 10_000,), lambda: None)
    assert len(cache) < 110


def test_values_of_a_tensor() -> None:
    cache: BoundedCache[Tensor] = BoundedCache(max_bytes=1 << 20)
    owner, same = torch.zeros(3), torch.zeros(3)
    of_owner = cache.get_of((owner, None), "key", tensor)
    assert cache.get_of((owner, None), "key", tensor) is of_owner
    assert cache.get_of((None, owner), "key", tensor) is not of_owner
    assert cache.get_of((same, None), "key", tensor) is not of_owner
    owner.add_(1)
    assert cache.get_of((owner, None), "key", tensor) is not of_owner
    with torch.inference_mode():
        unseen = torch.zeros(3)
    assert cache.get_of((unseen,), "key", tensor) is not cache.get_of((unseen,), "key", tensor)
    assert len(cache) == 4
    del owner, same
    assert len(cache) == cache.num_bytes == 0


def test_made_outside_of_inference_mode() -> None:
    with torch.inference_mode():
        assert not BoundedCache(max_bytes=1 << 20).get("key", tensor).is_inference()


def test_threads_that_miss_together_get_one_value() -> None:
    cache: BoundedCache[Tensor] = BoundedCache(max_bytes=1 << 20)
    barrier, got = threading.Barrier(4), list[Tensor]()

    def build() -> Tensor:
        barrier.wait(10)
        return tensor()

    threads = [threading.Thread(target=lambda: got.append(cache.get("key", build))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(value is got[0] for value in got)
    assert len(cache) == 1


def test_function() -> None:
    calls = []

    @cached()
    def double(number: int) -> int:
        """Return twice the number."""
        calls.append(number)
        return 2 * number

    assert [double(2), double(2), double(3)] == [4, 4, 6]
    assert calls == [2, 3]
    double.cache_clear()
    assert double(2) == 4
    assert calls == [2, 3, 2]
    assert double.__doc__ == "Return twice the number."


def test_all_caches_have_one_total(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "_caches", [])
    monkeypatch.setattr(cache_module, "MAX_TOTAL_BYTES", 8 << 20)
    first: BoundedCache[Tensor] = BoundedCache(max_bytes=1 << 30)
    second: BoundedCache[Tensor] = BoundedCache(max_bytes=1 << 30)
    for key in range(12):
        for cache in (first, second):
            cache.get(key, lambda: torch.zeros(1 << 18))
            assert first.num_bytes + second.num_bytes <= 8 << 20
    assert len(first) > 0
    assert second.find(11) is not None


class Seen(TorchDispatchMode):
    """Notes every operator, as selective checkpointing does."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_what_is_asked_of_owners_is_seen_by_no_dispatch_mode() -> None:
    cache: BoundedCache[int] = BoundedCache(10**6)
    owner = tensor()
    with Seen() as seen:
        assert [cache.get_of((owner,), None, lambda: 1), cache.get_of((owner,), None, lambda: 2)] == [1, 1]
    assert not seen.names
