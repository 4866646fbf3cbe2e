"""Divide the heads of a call among threads, each of which runs all kernels of its heads.

OpenMP divides every kernel among all threads, which spin until the last one is done. If another program takes the core
of one thread, each of the many kernels of a call waits for it. Threads with their own heads wait for each other only
once per pass.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from functools import lru_cache
from threading import Barrier
from typing import Any, TypeVar

import torch
from torch import Tensor

from hf_efficient_attn.layout.call import AttentionCall

T = TypeVar("T")
# between kernels Python runs one thread at a time, so that OpenMP is faster with more threads than this
MAX_THREADS = 4
# with fewer elements of q, handing a call to threads takes about as long as computing it
MIN_ELEMENTS = 1 << 20


def over_heads(
    function: Callable[[AttentionCall, Sequence[Tensor], Sequence[Tensor]], T],
    call: AttentionCall,
    of_queries: Sequence[Tensor],
    of_keys: Sequence[Tensor],
    may_divide: bool = True,
) -> list[T]:
    """Return what `function(call, of_queries, of_keys)` returns for the heads of each thread.

    Args:
        of_queries, of_keys: tensors [batch, heads, tokens, ...] that the function reads or writes; the first is q.
        may_divide: whether heads may be computed separately.
    """
    layout, num_threads, num_key_heads = call.layout, torch.get_num_threads(), of_keys[0].shape[1]
    is_worth_it = may_divide and 1 < num_threads <= min(MAX_THREADS, num_key_heads) and call.inputs.device == "cpu"
    is_worth_it = is_worth_it and of_queries[0].numel() >= MIN_ELEMENTS
    if not is_worth_it or layout.pattern.num_head_patterns > 1 or layout.pattern.is_random:
        return [function(call, of_queries, of_keys)]
    # a layout of one head: all heads have the same pattern
    one = replace(layout, num_heads=1, num_model_heads=layout.num_model_heads or layout.num_heads)
    call, group = replace(call, layout=one), of_queries[0].shape[1] // num_key_heads
    bounds, jobs = [num_key_heads * number // num_threads for number in range(num_threads + 1)], []
    for first, last in zip(bounds, bounds[1:], strict=False):
        queries = [tensor[:, first * group : last * group] for tensor in of_queries]
        keys = [tensor[:, first:last] for tensor in of_keys]
        jobs.append(_pool(num_threads).submit(_run, torch.is_inference_mode_enabled(), function, call, queries, keys))
    wait(jobs)
    return [job.result() for job in jobs]


def _run(is_inference: bool, function: Callable[..., T], *args: Any) -> T:
    with torch.inference_mode(is_inference), torch.no_grad():
        return function(*args)


@lru_cache
def _pool(num_threads: int) -> ThreadPoolExecutor:
    """Return a pool of threads in each of which torch uses a single thread."""
    pool, barrier = ThreadPoolExecutor(num_threads, "attention"), Barrier(num_threads)
    wait([pool.submit(_compute_alone, barrier) for _ in range(num_threads)])
    # `_compute_alone` has also changed the default for later threads
    torch.set_num_threads(num_threads)
    return pool


def _compute_alone(barrier: Barrier) -> None:
    barrier.wait()
    # the first call in a thread sets its number to the default, and must come before another number is set
    torch.get_num_threads()
    torch.set_num_threads(1)


# a forked process has none of the threads
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)
