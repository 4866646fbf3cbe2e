"""What the benchmarks of this folder share: contestants take turns at every length, and a report compares them.

A script says what it compares, as a `Contest`, which does the rest.
"""

import argparse
import runpy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from hf_efficient_attn.bench.memory import peak_memory
from hf_efficient_attn.bench.options import (
    RECOMPILE_LIMIT,
    add_counts,
    add_device,
    add_dtype,
    add_max_seconds,
    add_results,
    add_threads,
    check_counts,
    dtype_of,
    fill_options,
    flag,
    leave_open,
    make_folder,
    set_threads,
)
from hf_efficient_attn.bench.report import (
    MEBIBYTE,
    NONE,
    PALETTE,
    Line,
    Panel,
    Row,
    clock_line,
    crossover,
    curve,
    describe_machine,
    draw_panels,
    growth,
    machine_line,
    markdown_table,
    publish,
    resolve_device,
)
from hf_efficient_attn.bench.timing import (
    LEAST_ROUNDS,
    Case,
    clock_of,
    counts_processor_time,
    time_once,
    time_within,
    times_faster,
)
from hf_efficient_attn.errors import EfficientAttentionError

# measure -> its name in tables
MEASURES = {"forward": "forward", "training": "training step"}

Settings = dict[str, Any]
# a value of the group, and a length; None if the contest has no group or no lengths
Combination = tuple[Any, int | None]


@dataclass(frozen=True)
class Built:
    """A contestant that was built.

    Attributes:
        cases: {measure: the case that is timed}.
        facts: further entries of its row, in JSON types.
        units: {measure: number of steps or tokens of a case, by which its time is divided}; 1 if it is missing.
    """

    cases: dict[str, Case]
    facts: dict[str, Any] = field(default_factory=dict)
    units: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Contest:
    """A benchmark as a script: what is compared, in which shapes, and how the report is worded.

    Its results are {"machine", "settings", "results"}; "results" has a row per length and contestant. A measure in a
    row is {"milliseconds": quartiles, "speed_against": {other: quartiles}}, or empty if it was not measured.

    Attributes:
        script: `__file__` of the script, which must define the contest as `CONTEST`, because memory is measured in
            processes that run the script. Its stem names the results.
        title: title of the report and the picture; settings in braces are filled in.
        kind: the word for a contestant: the key of its name in a row; the plural is the key of all names in settings.
        contestants: {name: what it is}, in the order of tables; settings in braces are filled in.
        shape: a dataclass of JSON types whose fields are counts, options, the names in `length` and `group`, `dtype`
            and `device`.
        build: (name, shape) → a new contestant.
        lengths: lengths that are measured; with `--quick`, only the first two.
        memory_lengths: lengths at which peak memory is measured.
        counts: {option: (default, what it counts)}, each at least 1.
        options: further options, {flag: arguments of argparse's `add_argument`}; their values are settings.
        group: an option whose values are measured one after the other, each in rounds of its own.
        limits: {contestant: the count that is its longest length}.
        against: contestants that the others are compared with; tables say from which length on they beat the first.
        measures: {measure: its name in tables}.
        check: raises InputError for settings that cannot be measured.
        finish: changes the results, with samples, before they are written.
        tables: returns {heading: table}; None: the tables of `sections`.
        panels: returns the panels of the picture; None: time by measure, and memory.
        about: sentences at the end of the report; settings in braces are filled in.
        length, axis: the key of the length in a row, and its unit.
        beyond: what memory holds before a step, which its peak does not include.
    """

    script: str
    title: str
    kind: str
    contestants: Mapping[str, str]
    shape: type
    build: Callable[[str, Any], Built]
    lengths: tuple[int, ...]
    counts: Mapping[str, tuple[int, str]]
    memory_lengths: tuple[int, ...] = ()
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    quick: Mapping[str, Any] = field(default_factory=dict)
    group: str | None = None
    limits: Mapping[str, str] = field(default_factory=dict)
    against: tuple[str, ...] = ()
    measures: Mapping[str, str] = field(default_factory=lambda: MEASURES)
    check: Callable[[Settings], None] = lambda settings: None
    finish: Callable[[dict[str, Any]], None] = lambda results: None
    tables: Callable[[dict[str, Any]], dict[str, str]] | None = None
    panels: Callable[[dict[str, Any]], list[Panel]] | None = None
    about: str = ""
    length: str = "tokens"
    axis: str = "tokens"
    beyond: str = "the weights"
    max_seconds: float = 30.0

    @property
    def name(self) -> str:
        """The name of the files with the results, without suffix."""
        return Path(self.script).stem

    @property
    def lists(self) -> tuple[str, str]:
        """The names of the settings with the lengths, and with the lengths at which memory is measured."""
        plural = "lengths" if self.length == "tokens" else f"{self.length}s"
        return plural, f"memory_{plural}"

    def run(self, description: str | None, words: Sequence[str] | None = None) -> None:
        """Read the command line, measure, print the tables, and write JSON, Markdown and a picture."""
        parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        self.add_arguments(parser)
        run_main(parser, self.main, words)

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the options of the benchmark."""
        lengths, memory_lengths = self.lists
        if self.lengths:
            text = f"lengths in {self.axis} (default {min(self.lengths)} to {max(self.lengths)})"
            parser.add_argument(flag(lengths), nargs="+", type=int, default=list(self.lengths), metavar="N", help=text)
            text = f"lengths at which peak memory is measured (default {' '.join(map(str, self.memory_lengths))})"
            parser.add_argument(
                flag(memory_lengths), nargs="*", type=int, default=list(self.memory_lengths), metavar="N", help=text
            )
        else:
            parser.add_argument("--no-memory", action="store_true", help="do not measure peak memory")
        text = f"{self.kind}s to compare (default all)"
        parser.add_argument(f"--{self.kind}s", nargs="+", choices=self.contestants, help=text)
        for name, how in self.options.items():
            parser.add_argument(name, **how)
        counts = {**self.counts, "repeats": (10, "largest number of timed rounds; a round runs each contestant once")}
        add_counts(parser, counts)
        if self.group != "dtype":
            add_dtype(parser, f"all {self.kind}s")
        add_device(parser)
        add_threads(parser)
        add_max_seconds(parser, self.max_seconds)
        parser.add_argument("--quick", action="store_true", help="measure the first two lengths, in two rounds")
        add_results(parser, f"outputs/bench_{self.name}")
        leave_open(parser, "repeats", *([lengths, memory_lengths] if self.lengths else ["no_memory"]), *self.quick)

    def main(self, args: argparse.Namespace) -> None:
        """Measure, print the tables, and write JSON, Markdown and a picture into `args.output`.

        Raises:
            EfficientAttentionError: a count below 1, what cannot be measured, or CUDA without a device.
        """
        lengths, memory_lengths = self.lists
        quick = {lengths: list(self.lengths[:2]), memory_lengths: [], "no_memory": True, "repeats": 2}
        fill_options(args, {**quick, **self.quick})
        check_counts(args, [*self.counts, "repeats"], *(self.lists if self.lengths else ()))
        set_threads(args)
        device = resolve_device(args.device)
        settings = self.settings_of(args, device)
        self.check(settings)
        for group, length in self.combinations(settings):
            self.shape_of(group, length, settings, device)
        make_folder(args)
        results = self.measure(settings, device)
        publish(args, self.name, results, self.markdown(results), self.figure)

    def settings_of(self, args: argparse.Namespace, device: torch.device) -> Settings:
        """Return the options that the results depend on."""
        settings = {name: getattr(args, name) for name in (*self.counts, "repeats", "max_seconds")}
        if self.group != "dtype":
            settings["dtype"] = dtype_of(args, device)
        settings["processor_time"] = counts_processor_time(device)
        for name, how in self.options.items():
            key = how.get("dest", name.removeprefix("--").replace("-", "_"))
            value = getattr(args, key)
            settings[key] = list(dict.fromkeys(value)) if isinstance(value, list) else value
        if self.lengths:
            settings |= {name: sorted(set(getattr(args, name))) for name in self.lists}
        else:
            settings["no_memory"] = args.no_memory
        wanted = getattr(args, f"{self.kind}s") or list(self.contestants)
        return {**settings, f"{self.kind}s": [name for name in self.contestants if name in wanted]}

    def combinations(self, settings: Settings) -> Iterator[Combination]:
        """Yield each (value of the group, length) that has rounds of its own; None if there is no group or length."""
        for group in settings[self.group] if self.group else [None]:
            for length in settings[self.lists[0]] if self.lengths else [None]:
                yield group, length

    def shape_of(self, group: Any, length: int | None, settings: Settings, device: torch.device) -> Any:
        """Return the shape of the contestants of one group and length."""
        known = {**settings, "device": device.type}
        known |= {self.group: group} if self.group else {}
        known |= {self.length: length} if self.lengths else {}
        return self.shape(**{each.name: known[each.name] for each in fields(self.shape) if each.name in known})

    def names_of(self, length: int | None, settings: Settings) -> list[str]:
        """Return the contestants that are measured at a length."""
        limits = {name: settings[limit] for name, limit in self.limits.items()}
        return [name for name in settings[f"{self.kind}s"] if length is None or length <= limits.get(name, length)]

    def measure(self, settings: Settings, device: torch.device) -> dict[str, Any]:
        """Return all results, in JSON types."""
        combinations = list(self.combinations(settings))
        # memory first, while this process holds little
        peaks = self.measure_memory(combinations, settings, device)
        rows: list[Row] = []
        for group, length in logging.tqdm(combinations, desc=self.name, unit="length", leave=False):
            shape = self.shape_of(group, length, settings, device)
            found = self.measure_together(self.names_of(length, settings), shape, settings)
            for name in settings[f"{self.kind}s"]:
                row: Row = {self.group: group} if self.group else {}
                row |= {self.length: length} if self.lengths else {}
                row |= {self.kind: name, **found.get(name, dict.fromkeys(self.measures, {}))}
                rows.append({**row, "peak_memory_bytes": peaks.get((group, length, name))})
        results = {"machine": describe_machine(device), "settings": settings, "results": rows}
        self.finish(results)
        return results

    def measure_memory(
        self, combinations: list[Combination], settings: Settings, device: torch.device
    ) -> dict[tuple[Any, int | None, str], int]:
        """Return the peak bytes of a training step by group, length and contestant; on a CPU in separate processes."""
        if self.lengths:
            combinations = [each for each in combinations if each[1] in settings[self.lists[1]]]
        elif settings["no_memory"]:
            combinations = []
        wanted = [(*each, name) for each in combinations for name in self.names_of(each[1], settings)]
        peaks = {}
        for group, length, name in logging.tqdm(wanted, desc="memory", unit=self.kind, leave=False):
            shape = asdict(self.shape_of(group, length, settings, device))
            arguments = {"script": str(Path(self.script).resolve()), "name": name, "shape": shape}
            peaks[group, length, name] = peak_memory(training_of_script, arguments, device)
        return peaks

    def measure_together(self, names: list[str], shape: Any, settings: Settings) -> dict[str, dict[str, Any]]:
        """Return {contestant: its facts and measures}, all timed in the same rounds."""
        built = {name: self.build(name, shape) for name in names}
        cases = {(name, measure): case for name, each in built.items() for measure, case in each.cases.items()}
        if not cases:
            return {}
        device = torch.device(shape.device)
        with torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT, accumulated_recompile_limit=RECOMPILE_LIMIT):
            # the first calls build layouts, caches and optimizer states
            for case in cases.values():
                time_once(case, device)
            timings = time_within(
                cases, settings["repeats"], settings["max_seconds"], self.name, device, clock_of(device)
            )
        found: dict[str, dict[str, Any]] = {name: dict(each.facts) for name, each in built.items()}
        for (name, measure), timing in timings.items():
            found[name][measure] = timing.record(built[name].units.get(measure, 1))
        for name, row in found.items():
            for measure in built[name].cases:
                others = [other for other in self.against if other != name and measure in found.get(other, {})]
                own = row[measure]["samples"]
                speeds = {other: times_faster(own, found[other][measure]["samples"]) for other in others}
                row[measure] |= {"speed_against": speeds} if self.against else {}
        return found

    def markdown(self, results: dict[str, Any]) -> str:
        """Return the report."""
        parts = [f"# {self.heading(results['settings'])}", machine_line(results["machine"])]
        for heading, table in self.sections(results).items():
            parts += [f"## {heading}", table]
        return "\n\n".join([*parts, self.legend(results["settings"])])

    def heading(self, settings: Settings) -> str:
        """Return what is compared, and in which shape."""
        return self.title.format(**settings)

    def sections(self, results: dict[str, Any]) -> dict[str, str]:
        """Return the tables by their headings."""
        if self.tables is not None:
            return self.tables(results)
        settings, rows = results["settings"], results["results"]
        timed = {name: title for name, title in self.measures.items() if any(row.get(name) for row in rows)}
        found = {}
        for measure, title in timed.items():
            for other in self.against:
                found[f"Speed against {other}, {title}"] = self.table(rows, settings, partial(_speed, measure, other))
        for measure, title in timed.items():
            found[f"Milliseconds, {title}"] = self.table(rows, settings, partial(_time, measure))
        found["Growth, and the length from which dense attention is slower"] = self._summary(rows, settings, timed)
        bytes_known = {"peak_memory_bytes": f"Peak MiB of a training step beyond {self.beyond}"}
        bytes_known["cache_bytes"] = "MiB of the cache after the text"
        for name, title in bytes_known.items():
            found[title] = self.table(rows, settings, partial(_mebibytes, name))
        # a table without lines consists of its header and is left out
        return {title: table for title, table in found.items() if table.count("\n") > 1}

    def of(self, name: str, rows: list[Row]) -> list[Row]:
        """Return the rows of a contestant."""
        return [row for row in rows if row[self.kind] == name]

    def table(self, rows: list[Row], settings: Settings, cell: Callable[[Row], str]) -> str:
        """Return a table with a line per contestant and group, and a column per length; empty lines are left out."""
        lines = []
        for group in settings[self.group] if self.group else [None]:
            for name in settings[f"{self.kind}s"]:
                own = self.of(name, [row for row in rows if group is None or row.get(str(self.group)) == group])
                cells = [cell(row) for row in own]
                if set(cells) - {NONE}:
                    lines.append([name if group is None else f"{name}, {group}", *cells])
        return markdown_table([self.kind, *(f"{length:,}" for length in settings[self.lists[0]])], lines)

    def _summary(self, rows: list[Row], settings: Settings, timed: Mapping[str, str]) -> str:
        dense = self.against[0] if self.against else None
        lines = []
        for name in settings[f"{self.kind}s"]:
            cells = [name]
            for measure in timed:
                points = curve(self.of(name, rows), measure)
                factor, place = growth(points), crossover(curve(self.of(str(dense), rows), measure), points)
                cells.append(NONE if factor is None else f"{factor:.2f}×")
                cells.append(NONE if place is None or name == dense else f"{place[0]:,.0f}")
            if set(cells[1:]) - {NONE}:
                lines.append(cells)
        titles = (cell for title in timed.values() for cell in (f"{title}: growth", f"beats {dense} from"))
        return markdown_table([self.kind, *titles], lines)

    def legend(self, settings: Settings) -> str:
        """Return what was measured, and how."""
        known = {
            name: text
            for name, text in self.contestants.items()
            if name in settings.get(f"{self.kind}s", self.contestants)
        }
        about = "; ".join(f"{name}: {text.format(**settings)}" for name, text in known.items())
        limits: dict[int, list[str]] = {}
        for name, limit in self.limits.items():
            if name in known and limit in settings:
                limits.setdefault(settings[limit], []).append(name)
        up_to = " ".join(f"Only up to {most:,} {self.axis}: {', '.join(names)}." for most, names in limits.items())
        fitting = f", as many as fit into {settings['max_seconds']:g} seconds" if "max_seconds" in settings else ""
        rounds = (
            f"Up to {settings['repeats']} rounds{fitting}, at least {LEAST_ROUNDS}, after a warm-up round; medians; "
            "ratios are of times in the same round."
        )
        growing = "Growth: factor of time per doubling of the length, between the two longest." if self.lengths else ""
        parts = [f"{about}.", self.about.format(**settings), rounds, growing, clock_line(settings).strip(), up_to]
        return " ".join(part for part in parts if part)

    def figure(self, results: dict[str, Any]) -> Any:
        """Return the picture: time by measure, and peak memory, against the length."""
        settings, rows = results["settings"], results["results"]
        panels = self.panels(results) if self.panels is not None else self._time_and_memory(rows, settings)
        heading = f"{self.heading(settings)}\n{machine_line(results['machine'])}"
        lengths = settings[self.lists[0]] if self.lengths else [1]
        return draw_panels(heading, panels, self.axis, lengths)

    def _time_and_memory(self, rows: list[Row], settings: Settings) -> list[Panel]:
        panels = []
        for measure, title in self.measures.items():
            points = {name: curve(self.of(name, rows), measure) for name in self.contestants}
            panels.append(Panel(title.capitalize(), "milliseconds", self.lines(settings, points)))
        titles = {"peak_memory_bytes": "Peak memory of a training step", "cache_bytes": "Cache after the text"}
        for key, title in titles.items():
            known = [row for row in rows if row.get(key) is not None]
            points = {
                name: [(row[self.length], row[key] / MEBIBYTE) for row in self.of(name, known)]
                for name in self.contestants
            }
            panels.append(Panel(title, "MiB", self.lines(settings, points)))
        return [panel for panel in panels if any(line.points for line in panel.lines)]

    def lines(self, settings: Settings, points: Mapping[str, list[tuple[int, float]]]) -> list[Line]:
        """Return a line per contestant, styled alike in all panels; the one that others are compared with is black."""
        places = {name: index for index, name in enumerate(self.contestants)}
        lines = []
        for name in (each for each in settings[f"{self.kind}s"] if each in points):
            color = "black" if name in self.against[:1] else PALETTE[places[name] % len(PALETTE)]
            marker = "os^vD"[places[name] // len(PALETTE)]
            lines.append(Line(name, points[name], {"color": color, "marker": marker}))
        return lines


def run_main(
    parser: argparse.ArgumentParser, main: Callable[[argparse.Namespace], None], words: Sequence[str] | None = None
) -> None:
    """Run the main function of a script; errors that a user can correct end it with one line and exit code 2.

    words: arguments of the command line; None: those of the process.
    """
    args = parser.parse_args(words)
    try:
        main(args)
    except (EfficientAttentionError, OSError, ImportError) as error:
        parser.exit(2, f"{parser.prog}: error: {' '.join(str(error).split())}\n")


def training_of_script(script: str, name: str, shape: dict[str, Any]) -> Callable[[], object]:
    """Return the training step of a contestant of a script's contest; all arguments are of JSON types."""
    contest = runpy.run_path(script)["CONTEST"]
    case = contest.build(name, contest.shape(**shape)).cases["training"]
    return lambda: case.run(case.prepare())


def drawn_states(batch_size: int, tokens: int, width: int, dtype: str, device: str) -> Tensor:
    """Return random states [batch_size, tokens, width], always the same."""
    states = torch.randn(batch_size, tokens, width, generator=torch.Generator().manual_seed(0))
    return states.to(device, getattr(torch, dtype))


def forward_case(module: nn.Module, states: Tensor) -> Case:
    """Return the case of a forward pass in eval mode, without gradients."""

    @torch.no_grad()
    def run(_: object) -> object:
        return module(states)

    return Case(run, module.eval)


def training_case(module: nn.Module, step: Callable[[], object]) -> Case:
    """Return the case of a step in training mode."""
    return Case(lambda _: step(), module.train)


def _speed(measure: str, other: str, row: Row) -> str:
    speed = row.get(measure, {}).get("speed_against", {}).get(other)
    return NONE if speed is None else f"{speed['median']:.2f}"


def _time(measure: str, row: Row) -> str:
    return f"{row[measure]['milliseconds']['median']:,.1f}" if row.get(measure) else NONE


def _mebibytes(name: str, row: Row) -> str:
    size = row.get(name)
    return NONE if size is None else f"{size / MEBIBYTE:,.{2 if size < MEBIBYTE else 0}f}"
