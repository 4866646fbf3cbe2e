"""One of the processes that share a text: it computes its part in every way in turn, and writes what it measured."""

import gc
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from transformers.utils import logging

from hf_efficient_attn.attention.sharded.sequence_shards import SequenceShards
from hf_efficient_attn.bench.harness.memory import highest_resident
from hf_efficient_attn.bench.sequence.contestants import WAITING, WAYS, Attention, attention_of, states_of
from hf_efficient_attn.bench.sequence.links import Link

Sample = dict[str, Any]


def work(rank: int, num_processes: int, settings: dict[str, Any], folder: str) -> None:
    """Measure as process `rank`, and write FOLDER/{rank}.json: by way and link the samples of all rounds."""
    torch.set_num_threads(settings["threads"])
    store = distributed.FileStore(f"{folder}/store", num_processes)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=num_processes)
    try:
        shards = SequenceShards(init_device_mesh("cpu", (num_processes,)))
        found = rounds_of(settings, shards)
        Path(folder, f"{rank}.json").write_text(json.dumps({"samples": found, "resident_bytes": highest_resident()}))
    finally:
        distributed.destroy_process_group()


def rounds_of(settings: dict[str, Any], shards: SequenceShards) -> list[Sample]:
    """Return a sample per round, link and way; one more round, which is not counted, comes first."""
    attentions = {way: attend for way in WAYS if (attend := attention_of(way, settings, shards)) is not None}
    states = states_of(settings, shards)
    samples = []
    rounds = range(-1, settings["repeats"])
    if shards.rank == 0:
        rounds = logging.tqdm(rounds, desc=f"{shards.size} processes", unit="round", leave=False)
    for number in rounds:
        for gigabits in settings["gigabits"]:
            for way, attend in attentions.items():
                sample = sample_of(attend, states, Link(gigabits, way == WAITING))
                if number >= 0:
                    samples.append({"way": way, "gigabits": gigabits, "round": number, **sample})
    return samples


def sample_of(attend: Attention, states: Any, link: Link) -> Sample:
    """Return the seconds and bytes of a forward and a backward pass that all processes begin together."""
    *inputs, gradient = states
    gc.collect()
    distributed.barrier()
    with link:
        start = time.perf_counter()
        out = attend(*inputs)
        middle, forward = time.perf_counter(), (link.sent, link.reduced)
        out.backward(gradient)
        stop = time.perf_counter()
    for each in inputs:
        each.grad = None
    return {
        "forward_seconds": middle - start,
        "seconds": stop - start,
        "forward_bytes": forward[0],
        "backward_bytes": link.sent - forward[0],
        "reduced_bytes": link.reduced,
    }
