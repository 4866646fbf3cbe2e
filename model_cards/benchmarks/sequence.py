"""Bytes and time of processes that share a text, by how they get each other's keys.

One layer, forward and backward, in four ways: `halo` exchanges the keys that the pattern needs, and computes meanwhile;
`halo, waiting` does not compute meanwhile; `all-gather` exchanges all keys, like engines that do not know the pattern;
`heads` exchanges whole texts of some heads (Ulysses). All use the same kernels, and take turns. The processes are on
this machine; `--gigabits` simulates a link between them, in gigabits per second; 0: no link:
    python model_cards/benchmarks/sequence.py --processes 2 4 --gigabits 0 1
"""

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from contest import run_main
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing import start_processes
from transformers.utils import logging

from hf_efficient_attn.attention.sharded.halo import attend_halo
from hf_efficient_attn.attention.sharded.shards import (
    KeyExchange,
    Scores,
    SequenceShards,
    ShardedCall,
    key_exchange,
    sequences_of,
    shard_bounds,
)
from hf_efficient_attn.attention.sharded.ulysses import attend_heads
from hf_efficient_attn.attention.sharded.wide_queries import with_wide_queries
from hf_efficient_attn.bench.memory import highest_resident
from hf_efficient_attn.bench.options import (
    DTYPES,
    add_counts,
    add_results,
    check_counts,
    fill_options,
    leave_open,
    make_folder,
)
from hf_efficient_attn.bench.report import (
    MEBIBYTE,
    Line,
    Panel,
    describe_machine,
    draw_panels,
    machine_line,
    markdown_table,
    publish,
)
from hf_efficient_attn.bench.timing import fresh_processes, summarize, times_faster
from hf_efficient_attn.errors import EfficientAttentionError, InputError
from hf_efficient_attn.integration.explain import explain
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.patterns.config_spec import parse_pattern

HALO, WAITING, ALL_GATHER, HEADS = "halo", "halo, waiting", "all-gather", "heads"
WAYS = (HALO, WAITING, ALL_GATHER, HEADS)
SEED = 0

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Sample = dict[str, Any]
COLORS = ("#4477aa", "#99bbdd", "#ee8866", "#44bb99")
PATTERN = "band(1024, 0)"
COUNTS = {
    "tokens": (131072, "tokens of the text"),
    "heads": (8, "query heads"),
    "key_heads": (2, "key heads"),
    "head_dim": (64, "width of a head"),
    "batch_size": (1, "texts"),
    "threads": (1, "threads of torch in each process"),
    "repeats": (3, "rounds; each runs every way once, after one that is not counted"),
}
QUICK = {"tokens": 8192, "processes": [2], "repeats": 2}


@dataclass
class Arrival:
    """An exchange on its way over a link; `wait` returns when it has arrived."""

    work: Any
    at: float

    def wait(self) -> None:
        """Wait for the processes, and then for the link."""
        self.work.wait()
        time.sleep(max(0.0, self.at - time.perf_counter()))


class Link:
    """Takes the place of torch's exchange in this process, and counts the bytes that it sends to others.

    Args:
        gigabits: speed of the link of each process in Gbit/s, in each direction; 0: as fast as the processes are.
        is_waiting: whether a sender waits until everything has arrived, instead of computing meanwhile.
    """

    def __init__(self, gigabits: float, is_waiting: bool = False) -> None:
        self.gigabits, self.is_waiting = gigabits, is_waiting
        self.sent = self.received = self.reduced = 0

    def __enter__(self) -> "Link":
        self.plain = distributed.all_to_all_single, distributed.all_reduce
        distributed.all_to_all_single, distributed.all_reduce = self.exchange, self.reduce  # type: ignore[assignment]
        return self

    def __exit__(self, *error: Any) -> None:
        distributed.all_to_all_single, distributed.all_reduce = self.plain

    def exchange(
        self, out: Tensor, rows: Tensor, received: list[int], sent: list[int], group: Any, **how: Any
    ) -> Arrival:
        """Do what `all_to_all_single` does."""
        rank, start = distributed.get_rank(group), time.perf_counter()
        num_sent, num_received = ((sum(each) - each[rank]) * rows.element_size() for each in (sent, received))
        self.sent, self.received = self.sent + num_sent, self.received + num_received
        seconds = 8 * max(num_sent, num_received) / (self.gigabits * 1e9) if self.gigabits else 0.0
        arrival = Arrival(self.plain[0](out, rows, received, sent, group, **how), start + seconds)
        if self.is_waiting:
            arrival.wait()
        return arrival

    def reduce(self, tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        """Do what `all_reduce` does; it is small, and not slowed down."""
        self.reduced += tensor.numel() * tensor.element_size()
        return self.plain[1](tensor, *arguments, **options)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--pattern", default=PATTERN, help="the attention pattern (default %(default)s)")
    parser.add_argument(
        "--processes",
        nargs="+",
        type=int,
        default=[2, 4],
        metavar="N",
        help="numbers of processes that share the text (default 2 4)",
    )
    parser.add_argument(
        "--gigabits", nargs="+", type=float, default=[0, 1], metavar="G", help="speed of the link (default 0 1)"
    )
    add_counts(parser, COUNTS)
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="dtype of the states (default %(default)s)")
    parser.add_argument(
        "--quick", action="store_true", help="unless said otherwise, 8192 tokens, 2 processes and 2 rounds"
    )
    add_results(parser, "outputs/bench_sequence")
    leave_open(parser, *QUICK)


def main(args: argparse.Namespace) -> None:
    """Measure, print the table, and write sequence.json, sequence.md and sequence.png into `args.output`.

    Raises:
        EfficientAttentionError: a count below 1, fewer than two processes, heads or a pattern that do not fit.
    """
    fill_options(args, QUICK)
    check_counts(args, COUNTS, "processes")
    if min(args.processes) < 2:
        raise InputError(f"processes={min(args.processes)} share no text. Give at least 2.")
    if min(args.gigabits) < 0:
        raise InputError(f"gigabits={min(args.gigabits)} must be at least 0, which is as fast as this machine.")
    settings = settings_of(args)
    make_folder(args)
    results = measure(settings)
    publish(args, "sequence", results, results_markdown(results), results_figure)


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options that the results depend on."""
    settings = {name: getattr(args, name) for name in (*COUNTS, "dtype")}
    # refused here, before any process is started
    parse_pattern(args.pattern)
    settings["pattern"] = args.pattern
    return {**settings, **{name: sorted(set(getattr(args, name))) for name in ("processes", "gigabits")}}


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """Return all results in JSON types: `machine`, `settings`, `results` with a row per processes, link and way.

    Raises:
        EfficientAttentionError: processes sent other numbers of bytes than `explain` says.
    """
    rows = []
    for count in settings["processes"]:
        found = run_processes(count, settings)
        rows += rows_of(count, settings, found)
        check_bytes(count, settings, rows)
    return {"machine": describe_machine(torch.device("cpu")), "settings": settings, "results": rows}


def run_processes(count: int, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what each of `count` processes has measured."""
    method = fresh_processes().get_start_method()
    with tempfile.TemporaryDirectory() as folder:
        start_processes(work, (count, settings, folder), count, start_method=method)
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(count)]


def rows_of(count: int, settings: dict[str, Any], found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row per link and way, with the times of the slowest process and the bytes of the one that sends most."""
    by_process = [{(each["gigabits"], each["way"], each["round"]): each for each in one["samples"]} for one in found]
    rounds = range(settings["repeats"])
    rows = []
    for gigabits, way in dict.fromkeys(key[:2] for key in by_process[0]):
        samples = [[each[gigabits, way, number] for each in by_process] for number in rounds]
        others = [[each[gigabits, ALL_GATHER, number] for each in by_process] for number in rounds]
        row: dict[str, Any] = {"processes": count, "gigabits": gigabits, "way": way}
        for name in ("forward_bytes", "backward_bytes", "reduced_bytes"):
            row[name] = max(each[name] for each in samples[0])
        for name in ("forward_seconds", "seconds"):
            own, theirs = (slowest(each, name) for each in (samples, others))
            row[name] = {**summarize(own), "samples": own}
            row[f"{name}_against_all_gather"] = times_faster(own, theirs)
        row["resident_bytes"] = max(each["resident_bytes"] for each in found)
        rows.append(row)
    return rows


def slowest(samples: list[list[Sample]], name: str) -> list[float]:
    """Return the seconds of the slowest process in every round."""
    return [max(each[name] for each in of_round) for of_round in samples]


def check_bytes(count: int, settings: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Raise EfficientAttentionError if other numbers of bytes were sent than `explain` says."""
    heads = {"num_heads": settings["heads"], "num_key_heads": settings["key_heads"], "head_dim": settings["head_dim"]}
    dtype = getattr(torch, settings["dtype"])
    said: Any = explain(settings["pattern"], settings["tokens"], dtype=dtype, sequence_ranks=count, **heads).exchange
    expected = {
        said.mode: (max(said.forward_bytes), max(said.backward_bytes)),
        ALL_GATHER: (said.gathered_bytes, said.gathered_bytes),
    }
    for row in rows:
        sent = (row["forward_bytes"], row["backward_bytes"])
        wanted = expected.get(row["way"])
        if row["processes"] == count and wanted and sent != tuple(settings["batch_size"] * each for each in wanted):
            raise EfficientAttentionError(
                f"{row['way']} among {count} processes sent {sent} bytes, forward and backward, but {wanted} of each "
                "text were expected. Report this."
            )


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
    """Return the seconds and bytes of a forward and a backward pass that all processes start together."""
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


def attention_of(way: str, settings: dict[str, Any], shards: SequenceShards) -> Attention | None:
    """Return what computes the output of a process's tokens in one way; None: the heads cannot be divided.

    All compute the same with the same kernels. "halo" exchanges the keys and values that the pattern needs,
    "all-gather" all keys and values, like engines that do not know the pattern, "heads" whole texts of some heads.
    """
    num_tokens, num_heads = settings["tokens"], settings["heads"]
    if way == HEADS and num_heads % shards.size:
        return None
    tokens = TokenMask(torch.ones(settings["batch_size"], num_tokens, dtype=torch.bool))
    layout = Layout(parse_pattern(settings["pattern"]), num_heads, num_tokens, num_tokens)
    bounds = shard_bounds(num_tokens, shards.size)
    examples = sequences_of(tokens, settings["batch_size"], num_tokens)
    if way == ALL_GATHER:
        others = [((0, first), (stop, num_tokens)) for first, stop in bounds]
        wanted = tuple(tuple(each for each in two if each[0] < each[1]) for two in others)
        exchange = KeyExchange(wanted, (), ((),) * shards.size)
    else:
        exchange = key_exchange(
            layout, tuple(dict.fromkeys(examples)), bounds, True, num_heads // settings["key_heads"]
        )
    call = ShardedCall(layout, tokens, shards, bounds, examples, exchange, Scores(settings["head_dim"] ** -0.5))

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if way == HEADS:
            return attend_heads(query, key, value, call)
        out = attend_halo(query, key, value, call)
        return with_wide_queries(out, query, key, value, call) if exchange.wide else out

    return attend


def states_of(settings: dict[str, Any], shards: SequenceShards) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the queries, keys and values of this process's tokens, and the gradient of its output."""
    first, stop = shard_bounds(settings["tokens"], shards.size)[shards.rank]
    generator = torch.Generator().manual_seed(SEED + shards.rank)
    dtype, sizes = getattr(torch, settings["dtype"]), (stop - first, settings["head_dim"])

    def draw(num_heads: int) -> Tensor:
        return torch.randn(settings["batch_size"], num_heads, *sizes, generator=generator, dtype=dtype)

    heads, key_heads = settings["heads"], settings["key_heads"]
    query, key, value = (draw(count).requires_grad_() for count in (heads, key_heads, key_heads))
    return query, key, value, draw(heads)


def results_markdown(results: dict[str, Any]) -> str:
    """Return the tables of bytes and of times, and what they mean."""
    settings = results["settings"]
    parts = [f"# A text of {settings['tokens']:,} tokens on several processes", machine_line(results["machine"])]
    for heading, text in sections(results).items():
        parts += [f"## {heading}", text]
    return "\n\n".join([*parts, legend(settings)])


def sections(results: dict[str, Any]) -> dict[str, str]:
    """Return the tables by their headings."""
    return {"Bytes": bytes_table(results), "Times": times_table(results)}


def bytes_table(results: dict[str, Any]) -> str:
    """Return the bytes that the busiest process sends, by number of processes and way."""
    first = results["settings"]["gigabits"][0]
    rows = [row for row in results["results"] if row["gigabits"] == first]
    gathered = {row["processes"]: row for row in rows if row["way"] == ALL_GATHER}
    lines = [
        [
            f"{row['processes']} processes, {row['way']}",
            *(f"{row[name] / MEBIBYTE:,.2f}" for name in ("forward_bytes", "backward_bytes", "reduced_bytes")),
            f"{gathered[row['processes']]['forward_bytes'] / row['forward_bytes']:,.1f}×",
        ]
        for row in rows
    ]
    header = ["MiB sent by the busiest process", "forward", "backward", "added up", "fewer than all-gather"]
    return markdown_table(header, lines)


def times_table(results: dict[str, Any]) -> str:
    """Return the seconds of the forward pass and of both passes, by number of processes, link and way."""
    lines = [
        [
            f"{row['processes']} processes, {link(row['gigabits'])}, {row['way']}",
            *(
                cell
                for name in ("forward_seconds", "seconds")
                for cell in (f"{row[name]['median']:.2f}", f"{row[f'{name}_against_all_gather']['median']:.2f}×")
            ),
        ]
        for row in results["results"]
    ]
    header = ["seconds of the slowest process", "forward", "faster", "forward + backward", "faster"]
    return markdown_table(header, lines)


def link(gigabits: float) -> str:
    """Return the name of a link."""
    return f"{gigabits:g} Gbit/s" if gigabits else "one machine"


def legend(settings: dict[str, Any]) -> str:
    """Return what was measured, and what the columns mean."""
    heads = f"{settings['heads']} heads of {settings['head_dim']} ({settings['key_heads']} of keys)"
    return (
        f"One layer, {settings['pattern']}: {heads}, {settings['dtype']}, batch {settings['batch_size']}, "
        f"{settings['tokens']:,} tokens; gloo, torch threads in a process: {settings['threads']}. Medians of "
        f"{settings['repeats']} interleaved rounds; faster is against all-gather in the same round. Processes are on "
        "one machine; where a link is named, an exchange takes at least as long as its bytes would on it."
    )


def results_figure(results: dict[str, Any]) -> Any:
    """Return the picture: bars of bytes, and of seconds of both passes, in a panel each per number of processes."""
    settings, rows = results["settings"], results["results"]
    first, panels = settings["gigabits"][0], []
    for count in settings["processes"]:
        own = [row for row in rows if row["processes"] == count]
        sent = [bar(row, row["way"], row["forward_bytes"] / MEBIBYTE) for row in own if row["gigabits"] == first]
        panels.append(Panel("MiB sent forward by the busiest process", "MiB", sent))
        taken = [bar(row, f"{row['way']}, {link(row['gigabits'])}", row["seconds"]["median"]) for row in own]
        panels.append(Panel("Forward and backward", "seconds", taken))
    heading = f"{settings['pattern']}, {settings['tokens']:,} tokens\n{machine_line(results['machine'])}"
    return draw_panels(heading, panels, "processes", settings["processes"])


def bar(row: dict[str, Any], label: str, value: float) -> Line:
    """Return the bar of a row, in the color of its way."""
    return Line(label, [(row["processes"], value)], {"color": COLORS[WAYS.index(row["way"])]})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    run_main(parser, main)
