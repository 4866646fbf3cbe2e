"""Write the tables and draw the pictures of the README and the cards from committed results.

    python model_cards/figures.py                    write every table between its marks, and draw the pictures
    python model_cards/figures.py --keep FILE NAME   keep the JSON of a benchmark, an experiment or an example

A table stands between `<!-- figures: NAME, TABLE -->` and `<!-- end of figures -->`: NAME is a file of `results/`,
TABLE an entry of `TABLES`. `--keep` writes `results/NAME.json` with one record per line, six digits and no raw samples.
The `all_results.json` of an example contains neither its command nor its machine, so also give `--command`.
"""

import argparse
import io
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from string import Formatter
from typing import Any

import torch

from hf_efficient_attn.bench.report import describe_machine, json_text, machine_line
from hf_efficient_attn.patterns import parse_pattern

CARDS = Path(__file__).parent
MARKS = re.compile(r"(<!-- figures: (\w+), ([^\n]+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)
NONE, DIGITS = "–", 6
RAW = {"samples", "seeds", "history", "reason", "loss_by_place", "shortest", "longest", "along_text", "calls"}
Record = dict[str, Any]


def main() -> None:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", nargs=2, metavar=("FILE", "NAME"), help="keep FILE as results/NAME.json")
    parser.add_argument("--command", help="the command that wrote the all_results.json")
    args = parser.parse_args()
    if args.keep:
        return keep(Path(args.keep[0]), args.keep[1], args.command)
    for page, text in pages().items():
        page.write_text(text, encoding="utf-8")
    for name, draw in PICTURES.items():
        save(draw(), CARDS / "pictures" / f"{name}.png")


def keep(source: Path, name: str, command: str | None = None) -> None:
    """Write the medians and spreads of a file of results into `results/NAME.json`."""
    found = json.loads(source.read_text(encoding="utf-8"))
    if command:
        found = {"command": command, "machine": describe_machine(torch.device("cpu")), "metrics": found}
    (CARDS / "results" / f"{name}.json").write_text(json_text(reduced(found)) + "\n", encoding="utf-8")


def reduced(value: Any) -> Any:
    """Return JSON data without raw samples and with six digits of every number."""
    if isinstance(value, dict):
        return {name: reduced(entry) for name, entry in value.items() if name not in RAW and entry is not None}
    if isinstance(value, list):
        return [reduced(entry) for entry in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def results(name: str) -> Any:
    """Return the results of a benchmark, an experiment or an example."""
    return json.loads((CARDS / "results" / f"{name}.json").read_text(encoding="utf-8"))


# tables


class Text(Formatter):
    """Templates with the forms "MiB" of bytes, "x" of a speed, and "ratio" of a median with its quartiles."""

    def format_field(self, value: Any, form: str) -> str:
        if form == "MiB":
            return f"{value / 2**20:,.{0 if value >= 2**23 else 1}f}"
        if form == "x":
            return f"{value:.1f}" if value < 9.95 else f"{value:.0f}"
        if form == "ratio":
            return f"{value['median']:.2f} ({value['first_quartile']:.2f}–{value['third_quartile']:.2f})"
        return super().format_field(value, form)

    def cell(self, template: str, record: Record) -> str:
        """Return a template filled from a record; a dash if the record lacks a number."""
        if " / " in template:
            return " / ".join(self.cell(part, record) for part in template.split(" / "))
        try:
            return self.vformat(template, (), record)
        except (KeyError, TypeError):
            return NONE


TEXT = Text()
Rows = Callable[[Any], Iterable[Record]]


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table whose first column is text, and all others numbers."""
    lines = [header, [":--", *["--:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines)


def pages() -> dict[Path, str]:
    """Return the text that every page should have."""

    def between_marks(block: re.Match[str]) -> str:
        begin, name, title, end = block.groups()
        found = results(name)
        return begin + f"{TABLES[title](found)}\n\n{origin(found)}".strip() + f"\n{end}"

    files = [CARDS.parent / "README.md", *sorted(CARDS.glob("*.md"))]
    return {file: MARKS.sub(between_marks, file.read_text(encoding="utf-8")) for file in files}


def origin(found: Any) -> str:
    """Return the command, the machine and the versions with which something was measured."""
    if "machine" not in found:
        return ""
    said = [f"`{found['command']}`"] if "command" in found else []
    note = f" {found['note'].strip('.')}." if found.get("note") else ""
    return f"*{'; '.join([*said, machine_line({'gpu': None, **found['machine']})])}.{note}*"


def records(found: Record, name: str = "results") -> Iterator[Record]:
    """Yield the records of a list, or of an object together with their names; "dense" ones first."""
    listed = found[name]
    if isinstance(listed, dict):
        listed = [{"name": key, **entry} for key, entry in listed.items()]
    yield from found.get("dense", ()) if name == "results" else ()
    yield from listed


@dataclass(frozen=True)
class Listing:
    """A table with a row for each record; columns: "title = template | title = template"."""

    columns: str
    rows: Rows = records

    def __call__(self, found: Record) -> str:
        titles, templates = zip(*(column.strip().split(" = ") for column in self.columns.split("|")), strict=True)
        return markdown(titles, ([TEXT.cell(template, row) for template in templates] for row in self.rows(found)))


@dataclass(frozen=True)
class Pivot:
    """A table with a row and a column for each value of a template, and a third template for the cells."""

    row: str
    cell: str
    column: str = "{tokens:,}"
    rows: Rows = records

    def __call__(self, found: Record) -> str:
        cells: dict[str, dict[str, str]] = {}
        known: dict[str, bool] = {}
        for record in self.rows(found):
            text, column = TEXT.cell(self.cell, record), TEXT.cell(self.column, record)
            is_filled = bool(set(text) - set(f"{NONE} /"))
            known[column] = known.get(column, False) or is_filled
            if is_filled:
                cells.setdefault(TEXT.cell(self.row, record), {})[column] = text
        columns = [column for column, is_filled in known.items() if is_filled]
        body = ([row, *(of.get(column, NONE) for column in columns)] for row, of in cells.items())
        return markdown(["", *columns], body)


def against_dense(found: Record) -> Iterator[Record]:
    """Yield records of some lengths, contestant by contestant."""
    for contestant, name, lengths in (
        ("auto", "ours", (2048, 8192, 32768)),
        ("flex", "flex", (8192, 32768)),
        ("masked", "SDPA with a mask", (4096,)),
    ):
        of = [record for record in found["results"] if record["contestant"] == contestant]
        yield from ({**each, "by": name} for tokens in lengths for each in of if each["tokens"] == tokens)


def compared(found: Record, key: str) -> Iterator[Record]:
    """Yield a record for each model and each other one with which it is compared."""
    for record in found["results"]:
        for peer, ratios in record.get(key, {}).items():
            yield {**record, "peer": peer, "over": ratios}


def llama(found: Record) -> Iterator[Record]:
    """Yield the speed and the perplexity of a pretrained Llama by what its layers attend to, and by length."""
    seconds = found["prompt_seconds"]
    for way, of in seconds.items():
        for tokens in of if way != "dense" else ():
            pairs = zip(seconds["dense"][tokens], of[tokens], strict=True)
            speed = f"{median(dense / ours for dense, ours in pairs):.2f}"
            yield {"what": f"speed: {way}", "tokens": int(tokens), "text": speed}
    for way, of in found["perplexity"].items():
        for tokens, value in of.items():
            yield {"what": f"perplexity: {way}", "tokens": int(tokens), "text": f"{value:.1f}"}


def learning_rates(found: Record) -> Iterator[Record]:
    """Yield the bits per byte of models by learning rate: the mean over seeds, the lowest and the highest; or NaN."""
    models = list(records(found, "models"))
    for model in models:
        for rate in sorted({trial["learning_rate"] for each in models for trial in each["tried"]}):
            trials = [trial for trial in model["tried"] if trial["learning_rate"] == rate]
            bits = [trial["bits_per_byte"] for trial in trials if not trial.get("stopped")]
            text = NONE if not trials else "NaN" if len(bits) < len(trials) else f"{fmean(bits):.3f}"
            spread = f" ({min(bits):.3f}–{max(bits):.3f})" if len(bits) > 1 else ""
            yield {"name": model["name"], "rate": rate, "bits": text + spread}


def sparse_llama(found: Record) -> Iterator[Record]:
    """Yield the scores of each pattern and training, perplexities as `at POSITION`."""
    for one in found["results"]:
        yield {**one, **one["recall"], **{f"at {end}": value for end, value in one["perplexity"].items()}}


def spam(found: Record) -> Iterator[Record]:
    """Yield the accuracy of each model and of a bag of words by how much of a text they read."""
    for model, entry in [*found["models"].items(), ("bag of words", {"scores": found["bag_of_words"]})]:
        yield from ({"name": f"{model}, {read}", **score} for read, score in entry["scores"].items())


def span_limits(found: Record) -> Iterator[Record]:
    """Yield the bits per byte, the average span and the cost of models by kind and limit of their spans."""
    values = {"bits per byte": "{bits_per_byte:.3f}", "average span": "{average_span:,.0f}"}
    for what, form in {**values, "multiply-adds a byte": "{flops_per_token:,.0f}"}.items():
        for model in found["models"].values():
            yield {"what": f"{model['span']}: {what}", "limit": model["limit"], "text": form.format(**model)}


def with_windows(found: Record) -> Iterator[Record]:
    """Yield the scores of answers from the whole text, from windows of it, and from its first sentence."""
    for name, run in {"4,096 tokens": found, "windows of 512 tokens": results("run_qa_512")}.items():
        yield {"name": name, "exact": run["metrics"]["eval_exact_match"], "f1": run["metrics"]["eval_f1"]}
    first = {key: found["metrics"][f"{key}_of_first_sentence"] for key in ("exact_match", "f1")}
    yield {"name": "the text's first sentence", "exact": first["exact_match"], "f1": first["f1"]}


def scores(found: Record, names: dict[str, str], baseline: str, form: str) -> str:
    """Return a table of the scores of an example's model and of a baseline."""
    ways = {baseline.replace("_", " "): f"{{}}_of_{baseline}", "the model": "eval_{}"}
    rows = ([way, *(f"{found['metrics'][key.format(name)]:{form}}" for name in names)] for way, key in ways.items())
    return markdown(["", *names.values()], rows)


BY, SPANS = "{pattern}, {contestant}", "{model} / {peer}, {positions}"
MODELS, OVER = partial(compared, key="speed_against"), partial(compared, key="time_over")
AGAINST_DENSE = "{forward_backward[speed_against_dense][median]:x} / {forward[speed_against_dense][median]:x}"
MILLISECONDS = "[milliseconds][median]:,.0f}"
BLOCKS = (
    "times as fast as pre_ln = {model} | training = {speed_against_reference[training]:ratio} | layers alone = "
    "{speed_against_reference[layers]:ratio} | prefill = {speed_against_reference[prefill]:ratio} | decoding = "
    "{speed_against_reference[decode]:ratio} | peak MiB = {peak_memory_bytes:MiB}"
)
ROUGE = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"}
TABLES: dict[str, Callable[[Record], str]] = {
    "against dense": Pivot("{pattern}", AGAINST_DENSE, "{by}: {tokens:,}", against_dense),
    "efficiency, forward": Pivot(BY, "{forward[efficiency][median]:.0%}"),
    "efficiency, forward + backward": Pivot(BY, "{forward_backward[efficiency][median]:.0%}"),
    "milliseconds, forward": Pivot(BY, "{forward" + MILLISECONDS),
    "milliseconds, forward + backward": Pivot(BY, "{forward_backward" + MILLISECONDS),
    "milliseconds of a decoding step": Pivot(BY, "{decode[milliseconds][median]:.3g}"),
    "encoders, training step": Pivot("{encoder}", "{training" + MILLISECONDS),
    "encoders, peak MiB": Pivot("{encoder}", "{peak_memory_bytes:MiB}"),
    "layers, training step": Pivot("{layer}", "{training" + MILLISECONDS),
    "mechanisms, training step": Pivot("{mechanism}", "{training" + MILLISECONDS),
    "mechanisms, one more token": Pivot("{mechanism}", "{decoding[milliseconds][median]:.1f}"),
    "models, training step": Pivot(
        "{model} / {peer}", "{over[training]:ratio}", "{tokens:,}, layers: {layers}", MODELS
    ),
    "models, peak MiB": Pivot("{model}, {by}", "{peak_memory_bytes:MiB}"),
    "spans, training step": Pivot(SPANS, "{over[training]:ratio}", "{limit:,}", OVER),
    "spans, decoding of one text": Pivot(SPANS, "{over[decode_1]:ratio}", "{limit:,}", OVER),
    "blocks, float32": Listing(BLOCKS, lambda found: (it for it in records(found) if it["dtype"] == "float32")),
    "blocks, bfloat16": Listing(BLOCKS, lambda found: (it for it in records(found) if it["dtype"] == "bfloat16")),
    "sequence": Listing(
        "processes, way = {processes}, {way} | MiB sent, forward = {forward_bytes:MiB} | seconds, forward + backward = "
        "{seconds[median]:.2f} | times as fast as all-gather = {seconds_against_all_gather[median]:.2f}"
    ),
    "llama": Pivot("{what}", "{text}", rows=llama),
    "learning rates": Pivot("`{name}`", "{bits}", "rate {rate:g}", learning_rates),
    "readings": Listing(
        "reads = {reading} | F1 = {f1:.1f} ({lowest:.1f}–{highest:.1f}) | up to 256 tokens apart = {up to 256:.1f} | "
        "up to 1,024 = {up to 1,024:.1f} | more = {more:.1f} | exact match = {exact_match:.1f} | training steps = "
        "{num_steps:,.0f}",
        partial(records, name="models"),
    ),
    "spam": Listing("reads = {name} | accuracy = {accuracy:.3f} | of texts above 512 = {accuracy_long:.3f}", spam),
    "sparse llama": Listing(
        "attends to = {pattern} | training = {training} | perplexity up to 512 = {at 512:.1f} | up to 1,024 = "
        "{at 1024:.1f} | up to 2,048 = {at 2048:.1f} | up to 4,096 = {at 4096:.1f} | up to 8,192 = {at 8192:.1f} | "
        "recall, near = {near:.0f}% | far = {far:.0f}% | first time = {first time:.0f}% | seconds a step = "
        "{seconds_per_step:.0f}",
        sparse_llama,
    ),
    "span kinds": Listing(
        "span = {name} | bits per byte = {bits_per_byte:.3f} | average span = {average_span:,.0f} | multiply-adds "
        "a byte = {flops_per_token:,.0f}",
        partial(records, name="models"),
    ),
    "span limits": Pivot("{what}", "{text}", "limit {limit:,}", span_limits),
    "answers": Listing("reads = {name} | exact match = {exact:.1f} | F1 = {f1:.1f}", with_windows),
    "summaries": partial(scores, names=ROUGE, baseline="first_words", form=".3f"),
    "translations": partial(scores, names={"bleu": "BLEU", "chrf": "chrF"}, baseline="sources", form=".1f"),
    "versions": Listing(
        "Python = {python} | torch = {torch} | transformers = {transformers} | all tests passed on = {date}",
        lambda rows: (row for row in rows if not row["failed"]),
    ),
}


# pictures

BLUE, ORANGE = "#0072B2", "#D55E00"
PATTERNS = {
    "Band": "band(6, 6)",
    "Dilated": "dilated(24, 24, 6)",
    "Strided": "strided(6)",
    "BlockLocal": "block_local(12)",
    "Band | GlobalTokens": "band(4, 4) | global(0, 20, 41)",
    "BigBird": "bigbird(3, 2)",
    "Band | GlobalTokens, causal": "(band(16, 0) | global(0)) & causal()",
    "SpanTree": "span_tree(2)",
}
PRESETS = {
    "longformer": "band(5, 5) | global(0)",
    "longformer, causal": "(band(10, 0) | global(0)) & causal()",
    "bigbird_itc": "bigbird(4, 2)",
    "bigbird_itc, causal": "bigbird(4, 2, 0, 'seeded', True)",
    "block_local": "block_local(8)",
    "strided": "(band(6, 0) | strided(6)) & causal()",
    "sliding, causal": "band(8, 0)",
    "longformer, dilated": "dilated(20, 20, 4)",
}


def save(figure: Any, file: Path) -> None:
    """Write a figure as a PNG with few colors."""
    from PIL import Image

    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=150, format="png")
    Image.open(drawn).convert("RGB").quantize(48, dither=Image.Dither.NONE).save(file, optimize=True)
    print(f"{file} drawn")


def panels(width: float, height: float, num_rows: int, num_columns: int, **options: Any) -> tuple[Any, Any]:
    """Return a figure and its panels, row by row."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(num_rows, num_columns, squeeze=False, **options).flatten()


def patterns(expressions: dict[str, str], num_tokens: int, is_icon: bool = False) -> Any:
    """Return the picture of patterns by title: queries are rows, keys are columns."""
    from matplotlib.colors import ListedColormap

    colors = ListedColormap(["#FFFFFF", BLUE])
    figure, axes = panels(3.2, 2.0, 1, len(expressions)) if is_icon else panels(11.2, 6.4, 2, 4)
    for axis, (title, expression) in zip(axes, expressions.items(), strict=True):
        rows = [[sign == "■" for sign in row] for row in parse_pattern(expression).draw(num_tokens).splitlines()]
        axis.imshow(rows, cmap=colors, vmin=0, vmax=1, interpolation="none", aspect="auto" if is_icon else "equal")
        axis.set_title(title, fontsize=11)
        axis.set(xticks=[], yticks=[])
        if not is_icon:
            pairs = sum(map(sum, rows))
            axis.set(xlabel=f"key\n{pairs:,} of {num_tokens**2:,} pairs, {pairs / num_tokens**2:.1%}", ylabel="query")
    return figure


def attention() -> Any:
    """Return the time of attention by pattern and length."""
    found = results("attention")
    figure, axes = panels(11, 5.6, 2, 4, sharex=True)
    names = {"dense": ("dense SDPA", "black"), "auto": ("hea.attention", BLUE), "flex": ("flex, compiled", ORANGE)}
    for row, measure in enumerate(("forward", "forward_backward")):
        for axis, pattern in zip(axes[4 * row :], found["settings"]["patterns"], strict=False):
            for contestant, (name, color) in names.items():
                shown = (it for it in records(found) if it["pattern"] in ("full", pattern))
                of = (it for it in shown if it["contestant"] == contestant and it[measure].get("milliseconds"))
                points = {it["tokens"]: it[measure]["milliseconds"]["median"] for it in of}
                style = {"color": color, "markersize": 4}
                axis.plot(list(points), list(points.values()), "o-", **style, label=name)
                if contestant == "dense":
                    far = [(tokens, points[tokens]) for tokens in points if tokens > found["settings"]["dense_limit"]]
                    axis.plot(*zip(*far, strict=True), "o", markerfacecolor="white", **style, label="extrapolated")
            axis.set(xscale="log", yscale="log", title="" if row else pattern)
            axis.grid(alpha=0.3)
        axes[4 * row].set_ylabel(f"ms, {measure.replace('_', ' + ')}")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    figure.supxlabel("tokens")
    return figure


def deep_blocks() -> Any:
    """Return the held-out loss of 12 layers of each block, by step and by second: mean and range over seeds."""
    found = results("compare_blocks_deep")
    tokens = found["size"]["batch_size"] * found["size"]["block_size"]
    figure, axes = panels(11, 4.4, 1, 2, sharey=True)
    for index, (name, model) in enumerate(found["models"].items()):
        steps, means, lows, highs = zip(*model["held_out"], strict=True)
        for axis, unit in zip(axes, (1, tokens / model["tokens_per_second"]["median"]), strict=True):
            place = [step * unit for step in steps]
            label = f"{name}, rate {model['best_rate']:g}"
            axis.plot(place, means, "o-", color=f"C{index}", markersize=3, label=label)
            axis.fill_between(place, lows, highs, color=f"C{index}", alpha=0.15, linewidth=0)
            axis.grid(alpha=0.3)
    axes[0].set(xlabel="training step", ylabel="bits per byte of held-out text")
    axes[1].set(xlabel="training time (s), one thread")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return figure


def limits_of_spans() -> Any:
    """Return the average span, the cost and the loss of models by the limit of their spans."""
    sys.path.append(str(CARDS.parent / "examples" / "experiments"))
    from comparison.span_curves import draw_limits

    return draw_limits(results("compare_span_limits")["models"])


def adaptive_span() -> Any:
    """Return the bands that the four heads of the layer with the longest span have learned."""
    keys = max((layer["keys"] for layer in results("spans_adaptive")["layers"]), key=max)
    named = {f"{near} keys{' ' * head}": f"band({(near - 1) // 5}, 0)" for head, near in enumerate(sorted(keys))}
    return patterns(named, 46, is_icon=True)


def span_tree() -> Any:
    """Return what one of 16 tokens attends to in a binary tree: its neighbour, and spans, longer ones farther away."""
    figure, (panel,) = panels(3.2, 2.0, 1, 1)
    query, first_of_level = 5, {0: 4, 1: 6, 2: 0, 3: 8}
    for token in range(16):
        panel.bar(token, 0.7, width=0.8, color=ORANGE if token == query else "#BBBBBB")
    for level, first in first_of_level.items():
        width, bottom = 2**level, 1.1 * level
        panel.bar(first - 0.4, 0.7, width=width - 0.2, bottom=bottom, color=BLUE, align="edge")
        if level:
            middle = first + (width - 1) / 2
            panel.plot([query, middle], [0.7, bottom + 0.35], color=ORANGE, linewidth=3, zorder=0)
    panel.set_title("near tokens, far spans", fontsize=18)
    panel.set_axis_off()
    return figure


SPARSIFIED = {"yours": "causal()", "sparsified": "(band(6, 0) | global(0, 1)) & causal()"}
SPARSE = {"Longformer": "band(3, 3) | global(0)", "BigBird": "bigbird(2, 1)"}
PICTURES: dict[str, Callable[[], Any]] = {
    "patterns": partial(patterns, PATTERNS, 63),
    "sparse_presets": partial(patterns, PRESETS, 48),
    "bench_attention": attention,
    "deep_blocks": deep_blocks,
    "span_limits": limits_of_spans,
    "families/adaptive_span": adaptive_span,
    "families/bp_transformer": span_tree,
    "families/any_model": partial(patterns, SPARSIFIED, 32, is_icon=True),
    "families/sparse_transformer": partial(patterns, SPARSE, 32, is_icon=True),
}

if __name__ == "__main__":
    main()
