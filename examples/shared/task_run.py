"""What the task examples share, whatever their task: how they end, the folder of a run, its results and pictures."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from causal_lm.run_folder import command_line, public_words
from corpora.packages import PackageError
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig, TrainingArguments
from transformers.utils import logging

import hf_efficient_attn as hea
from hf_efficient_attn.bench.harness.report import describe_machine, machine_line, markdown_table
from shared.arguments import UsageError

Columns = Mapping[str, tuple[str, str]]


def run_example(work: Callable[[], None]) -> int:
    """Do `work` and return the exit code: 0, 2 after one line about what cannot be done, 130 after Ctrl-C."""
    logging.disable_progress_bar()  # of saving and loading; training keeps its own
    try:
        work()
    except (UsageError, PackageError, hea.EfficientAttentionError, StrictDataclassError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nInterrupted: no results were written.", file=sys.stderr)
        return 130
    return 0


def open_run_folder(training: TrainingArguments) -> Path:
    """Return the empty folder `--output_dir` of a new run on one device.

    Raises:
        UsageError: the folder holds a finished run, or several devices are to take part.
    """
    if training.world_size > 1 or training.n_gpu > 1:
        raise UsageError(
            f"This example runs on one device, not on {max(training.world_size, training.n_gpu)}. Start it with "
            "`python`, and where there are several GPUs with CUDA_VISIBLE_DEVICES=0."
        )
    folder = Path(training.output_dir)
    if (folder / "results.json").exists():
        raise UsageError(f"{folder} already holds a run. Name another --output_dir.")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def with_overrides(config: PreTrainedConfig, overrides: str | None) -> PreTrainedConfig:
    """Return the config with `--config_overrides` ("hidden_size=256,num_hidden_layers=6") in it, checked as a whole.

    Raises:
        UsageError: a field that the config does not have, or a value that it refuses.
    """
    if not overrides:
        return config
    try:
        config.update_from_string(overrides)
        return type(config).from_dict(config.to_dict())
    except (ValueError, StrictDataclassError) as error:  # the package's own errors are ValueErrors
        reason = " ".join(str(error).split())
        raise UsageError(f'--config_overrides "{overrides}": {reason}. The form is "name=value,name=value".') from error


def results_table(columns: Columns, results: Sequence[Mapping[str, Any]]) -> str:
    """Return the results as a Markdown table, one row each; "–" stands for a value that a row does not have.

    Args:
        columns: key of the result → its title and format.

    >>> print(results_table({"model": ("model", "{}"), "seconds": ("time (s)", "{:.1f}")}, [{"model": "sparse"}]))
    | model  | time (s) |
    |:-------|---------:|
    | sparse |        – |
    """
    rows = [
        ["–" if result.get(key) is None else form.format(result[key]) for key, (_, form) in columns.items()]
        for result in results
    ]
    return markdown_table([title for title, _ in columns.values()], rows)


def write_results(folder: Path, title: str, content: Mapping[str, Any], text: str, device: torch.device) -> str:
    """Write results.json (`content`, the command and the machine) and results.md (`text` under `title`).

    Returns:
        the text with the line about the machine, for the terminal.
    """
    command, machine = command_line(public_words(), 1), describe_machine(device)
    everything = {"command": command, "machine": machine, **content}
    (folder / "results.json").write_text(json.dumps(everything, indent=2, ensure_ascii=False) + "\n")
    text = f"{text}\n\nOn {machine_line(machine)}."
    (folder / "results.md").write_text(f"# {title}\n\n    {command}\n\n{text}\n")
    return text


def closing_words(folder: Path, text: str, models: Sequence[str], pictures: Sequence[str]) -> str:
    """Return what to print last: the results, and where everything is."""
    return "\n".join(
        [
            "",
            text,
            "",
            f"Models     {', '.join(str(folder / name) for name in models)}",
            f"Results    {folder / 'results.json'}, {folder / 'results.md'}",
            f"Picture    {', '.join(str(folder / name) for name in pictures)}",
        ]
    )


def save_picture(figure: Any, file: Path) -> None:
    """Write a matplotlib figure (`hf_efficient_attn.pictures.new_figure`) at the resolution of all pictures here."""
    for panel in figure.axes:
        panel.grid(alpha=0.3)
    figure.savefig(file, dpi=130)


def smoothed(losses: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Return the seconds and the running means of (second, loss) pairs, each new loss weighing a tenth.

    >>> smoothed([(1.0, 5.0), (2.0, 5.0), (3.0, 4.0)])
    ([1.0, 2.0, 3.0], [5.0, 5.0, 4.9])
    """
    means = [losses[0][1]]
    for _, loss in losses[1:]:
        means.append(means[-1] + (loss - means[-1]) / 10)
    return [second for second, _ in losses], means
