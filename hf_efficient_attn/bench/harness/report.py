"""Where results go: a description of the machine, JSON, a Markdown table, a picture."""

import argparse
import datetime
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from hf_efficient_attn.errors import EfficientAttentionError, InputError
from hf_efficient_attn.pictures import can_draw

DEVICES = ("auto", "cpu", "cuda")


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Return what a timing depends on, in JSON types: processor, threads, versions, GPU, date."""
    return {
        "device": device.type,
        "cpu": cpu_model(),
        "cpu_cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def cpu_model() -> str:
    """Return the name of the processor as the system knows it."""
    listing = Path("/proc/cpuinfo")
    if listing.exists():
        for line in listing.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def machine_line(machine: dict[str, Any]) -> str:
    """Return the description of `describe_machine` as one line."""
    where = machine["gpu"] or f"{machine['cpu']}, {machine['torch_threads']} of {machine['cpu_cores']} cores"
    versions = f"torch {machine['torch']}, transformers {machine['transformers']}"
    return f"{where}; {versions}; {machine['date'][:10]}"


def clock_line(settings: dict[str, Any]) -> str:
    """Return the sentence on what the clock counted, empty where it is the usual one; see `counts_processor_time`."""
    return "Seconds of the processor, on one thread. " if settings.get("processor_time") else ""


def resolve_device(name: str) -> torch.device:
    """Return the device called `name`, one of `DEVICES`; `auto` is CUDA where there is one.

    Raises:
        EfficientAttentionError: CUDA is asked for, but torch sees none.
    """
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise EfficientAttentionError(
            f"device='cuda', but torch {torch.__version__} sees no CUDA device. Use 'cpu' or 'auto'."
        )
    return torch.device("cuda" if has_cuda and name == "auto" else "cpu" if name == "auto" else name)


def check_at_least_one(**counts: int) -> None:
    """Raise InputError if one of the named counts is below 1."""
    for name, count in counts.items():
        if count < 1:
            raise InputError(f"{name}={count} must be at least 1.")


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table: first column flush left, the others flush right, padded to read well unrendered.

    >>> print(markdown_table(["block", "speed"], [["sas", "1.2"]]))
    | block | speed |
    |:------|------:|
    | sas   |   1.2 |
    """
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = [_line(header, widths)]
    lines.append("|".join(["", f":{'-' * (widths[0] + 1)}", *(f"{'-' * (width + 1)}:" for width in widths[1:]), ""]))
    return "\n".join(lines + [_line(row, widths) for row in rows])


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [
        cells[0].ljust(widths[0]),
        *(cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)),
    ]
    return f"| {' | '.join(padded)} |"


def publish(
    args: argparse.Namespace,
    name: str,
    results: dict[str, Any],
    markdown: str,
    draw: Callable[[dict[str, Any]], Any] | None = None,
) -> None:
    """Print the tables, or JSON, write NAME.json, NAME.md and NAME.png into the folder, and say where.

    Without matplotlib there is no picture, and a line says so: what was measured is never lost for it.

    Args:
        args: with the options of `add_results`.
        draw: None: there is no picture.
    """
    written, said = json.dumps(results, indent=2), sys.stderr if args.json else sys.stdout
    print(written if args.json else markdown)
    paths = [args.output / f"{name}.{suffix}" for suffix in ("json", "md")]
    paths[0].write_text(written + "\n", encoding="utf-8")
    paths[1].write_text(markdown + "\n", encoding="utf-8")
    if draw is not None and can_draw():
        paths.append(args.output / f"{name}.png")
        draw(results).savefig(paths[2], dpi=160)
    elif draw is not None:
        print("\nNo picture: matplotlib is not installed. Run: pip install matplotlib", file=said)
    print("\nWritten: " + ", ".join(str(path) for path in paths), file=said)
