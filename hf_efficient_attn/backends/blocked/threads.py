"""The heads of a call divided among threads, each of which computes its own from the first kernel to the last.

OpenMP computes every kernel with all threads, which spin until the last of them is done. Where another program has
taken the core of one, each of the many kernels of a call waits for it. Threads with heads of their own wait for each
other once a pass.
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
# Python runs one thread at a time between kernels: for more of them OpenMP is faster
MAX_THREADS = 4
# elements of q below which a call takes about as long as to hand it to threads
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
        of_queries, of_keys: tensors [batch, heads, tokens, ...] that it reads or writes; the first is q.
        may_divide: whether heads may be computed apart.
    """
    layout, num_threads, num_key_heads = call.layout, torch.get_num_threads(), of_keys[0].shape[1]
    is_worth_it = may_divide and 1 < num_threads <= min(MAX_THREADS, num_key_heads) and call.inputs.device == "cpu"
    is_worth_it = is_worth_it and of_queries[0].numel() >= MIN_ELEMENTS
    if not is_worth_it or layout.pattern.num_head_patterns > 1 or layout.pattern.is_random:
        return [function(call, of_queries, of_keys)]
    # of one head, like which all others are
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
    """Return threads in each of which torch computes alone."""
    pool, barrier = ThreadPoolExecutor(num_threads, "attention"), Barrier(num_threads)
    wait([pool.submit(_compute_alone, barrier) for _ in range(num_threads)])
    # a thread that sets its number sets the default of later threads, too
    torch.set_num_threads(num_threads)
    return pool


def _compute_alone(barrier: Barrier) -> None:
    barrier.wait()
    # a new thread takes the default when it is first asked
    torch.get_num_threads()
    torch.set_num_threads(1)


# a child process has none of the threads
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)
