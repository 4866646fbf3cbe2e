"""Tables and pictures of what trains or reads at length, for `figures.py`."""

import json
from pathlib import Path
from statistics import median
from typing import Any

from hf_efficient_attn.bench.harness.panels import label_decades
from hf_efficient_attn.bench.harness.report import machine_line, markdown_table
from hf_efficient_attn.pictures import new_figure

NOT_MEASURED = "–"


def learning(found: dict[str, Any]) -> str:
    """Return the bits per byte that `compare_blocks.py` reached by block and learning rate, the best in bold."""
    lines = []
    for block, best in found["blocks"].items():
        reached = [(tried["learning_rate"], f"{tried['bits_per_byte']:.3f}") for tried in best["tried"]]
        cells = [f"**{bits}**" if rate == best["learning_rate"] else bits for rate, bits in reached]
        lines.append([f"`{block}`", f"{best['parameters']:,}", *cells])
    rates = [f"rate {tried['learning_rate']:g}" for tried in best["tried"]]
    corpus = found["corpus"]
    return f"""{markdown_table(["bits per byte", "parameters", *rates], lines)}

Of {corpus["held_out_tokens"]:,} tokens of files that were held out of {corpus["source"]}, after {best["num_steps"]:,} \
steps of {best["tokens_per_step"]:,} tokens; one seed; {best["shape"]}; {best["optimizer"]}. \
*{machine_line(found["machine"])}. {found["note"]}*"""


def learning_figure(found: dict[str, Any]) -> Any:
    """Return the picture of `learning` by step: a colour for each block, a kind of line for each rate."""
    figure = new_figure(7.5, 4.5)
    panel = figure.subplots()
    for color, (block, best) in enumerate(found["blocks"].items()):
        for style, tried in zip(("-", "--", ":"), best["tried"], strict=False):
            points = [(entry["step"], entry["eval_loss"]) for entry in tried["history"] if "eval_loss" in entry]
            options = {"color": f"C{color}", "linestyle": style, "marker": "o", "markersize": 4}
            panel.plot(*zip(*points, strict=True), label=f"{block}, rate {tried['learning_rate']:g}", **options)
    panel.set(title="Held-out loss while training", xlabel="step", ylabel="nats per token")
    panel.grid(alpha=0.3)
    panel.legend(handlelength=4)
    return figure


def answers(found: dict[str, Any]) -> str:
    """Return how well `run_qa.py` answers, by how many tokens it reads at once."""
    windows = json.loads((Path(__file__).parent / "examples" / "run_qa_512.json").read_text(encoding="utf-8"))
    first = {name: found["metrics"][f"{name}_of_first_sentence"] for name in ("exact_match", "f1")}
    lines = [["the text's first sentence", *(f"{score:.1f}" for score in first.values()), NOT_MEASURED]]
    for reads, run in {"4,096 tokens at once": found, "512 tokens at once": windows}.items():
        scores = [f"{run['metrics'][f'eval_{name}']:.1f}" for name in first]
        lines.append([reads, *scores, f"{run['cpu_seconds']:.0f}"])
    return f"""{markdown_table(["reads", "exact match", "F1", "CPU seconds of the run"], lines)}

`{found["command"]}`, `{windows["command"]}`; one seed. *{machine_line(found["machine"])}. {found["note"]}.*"""


def made_long(found: dict[str, Any]) -> str:
    """Return how many bits masked tokens take before and after a BERT is made long in `compare_long_mlm.py`."""
    lines = [
        [row["model"], f"{row['bits_per_masked_token']:.2f}", f"{row['bits_per_character']:.3f}"]
        for row in found["rows"]
    ]
    return f"""{markdown_table(["model", "bits per masked token", "bits per character"], lines)}

The same {found["masked_tokens"]:,} of {found["held_out_tokens"]:,} held-out tokens are masked for all; a step has \
{found["tokens_per_step"]:,} tokens; one seed. *{machine_line(found["machine"])}*"""


def prefill(found: dict[str, Any]) -> dict[str, dict[int, float]]:
    """Return by model and length how many times as fast as dense attention a prompt is read, in the median round."""
    ways = {
        way: {int(tokens): seconds for tokens, seconds in of.items()} for way, of in found["prompt_seconds"].items()
    }
    return {
        way: {
            tokens: median(slow / fast for slow, fast in zip(ways["dense"][tokens], seconds, strict=True))
            for tokens, seconds in of.items()
        }
        for way, of in ways.items()
    }


def faster_llama(found: dict[str, Any]) -> str:
    """Return what a band and the first tokens save and cost in the Llama of `sparsify_llama.py`."""
    sparse = {"band + first tokens": "all layers", "the same, every second layer": "every second layer"}
    settings, speeds, perplexity = found["settings"], prefill(found), found["perplexity"]
    sparse = {way: layers for way, layers in sparse.items() if way in speeds}
    lengths = [tokens for tokens in speeds["dense"] if tokens > settings["left"]]
    lines = []
    for way, layers in sparse.items():
        times = (f"{speeds[way][tokens]:.2f}" for tokens in lengths)
        lines.append([f"prompt read, times as fast as by causal SDPA: {layers}", *times])
    for way, layers in {"dense": "dense", **sparse}.items():
        lines.append([f"perplexity: {layers}", *(_perplexity(perplexity[way], tokens) for tokens in lengths)])
    return f"""{markdown_table(["a pretrained Llama, tokens", *(f"{tokens:,}" for tokens in lengths)], lines)}

{_name(found)}, not fine-tuned; each token reads the {settings["left"]:,} before it and the first \
{settings["num_first"]}; perplexity in the second half of the text. Medians of {_rounds(found)}. `{found["command"]}`, \
[more](model_cards/engine.md#a-faster-llama); {machine_line(found["machine"])}."""


def llama_perplexity(found: dict[str, Any]) -> str:
    """Return perplexity by position for every way in which the Llama reads."""
    ends = [int(end) for end in found["perplexity"]["dense"]]
    lines = [[way, *(_perplexity(of, end) for end in ends)] for way, of in found["perplexity"].items()]
    header = ["perplexity at positions", *(f"{start:,}–{end:,}" for start, end in zip([0, *ends], ends, strict=False))]
    settings = found["settings"]
    return f"""{markdown_table(header, lines)}

{_llama(found)}. Band: {settings["left"]:,} tokens; first tokens: {settings["num_first"]}. {settings["texts"]} texts \
of {settings["text_tokens"]:,} tokens: {settings["text_file"] or "pages of Python's documentation"}."""


def llama_prefill(found: dict[str, Any]) -> str:
    """Return the time to read a prompt, and the speed against dense attention."""
    speeds, lines = prefill(found), []
    for way, of in found["prompt_seconds"].items():
        times = [1000 * median(seconds) for seconds in of.values()]
        cells = zip(times, speeds[way].values(), strict=True)
        lines.append([way, *(f"{time:,.0f}" if way == "dense" else f"{time:,.0f} ({x:.2f}×)" for time, x in cells)])
    header = ["milliseconds (× dense) at tokens", *(f"{tokens:,}" for tokens in speeds["dense"])]
    return f"{markdown_table(header, lines)}\n\nMedians of {_rounds(found)}. *{machine_line(found['machine'])}*"


def _rounds(found: dict[str, Any]) -> str:
    """Return how many rounds there were, and how far apart they are at most."""
    times = [seconds for of in found["prompt_seconds"].values() for seconds in of.values()]
    spread = max(max(seconds) / min(seconds) for seconds in times) - 1
    return f"{len(times[0])} interleaved rounds, of which the slowest took up to {spread:.0%} longer than the fastest"


def llama_figure(found: dict[str, Any]) -> Any:
    """Return the picture of both: perplexity by position, and the time of a prompt by its length."""
    figure = new_figure(11, 4.5)
    seconds = {way: {end: median(each) for end, each in of.items()} for way, of in found["prompt_seconds"].items()}
    titles = {"perplexity": "tokens at positions up to", "seconds to read a prompt": "tokens of the prompt"}
    for panel, ways, (title, axis) in zip(
        figure.subplots(1, 2), (found["perplexity"], seconds), titles.items(), strict=True
    ):
        for number, (way, of) in enumerate(ways.items()):
            ends = [int(end) for end in of]
            panel.plot(ends, list(of.values()), marker="o^sDv"[number], markersize=5, label=way)
        panel.set(title=title.capitalize(), xlabel=axis, yscale="log")
        panel.set_xscale("log", base=2)
        panel.set_xticks(ends, [f"{end:,}" for end in ends])
        panel.minorticks_off()
        label_decades(panel)
        panel.grid(alpha=0.3)
        panel.legend()
    return figure


def _perplexity(by_position: dict[str, float], end: int) -> str:
    found = by_position.get(str(end))
    return NOT_MEASURED if found is None else f"{found:,.1f}" if found < 1000 else f"{found:,.0f}"


def _name(found: dict[str, Any]) -> str:
    return found["settings"]["model_name_or_path"] or "SmolLM2-135M-Instruct"


def _llama(found: dict[str, Any]) -> str:
    model = found["model"]
    size = f"{model['parameters'] / 1e6:.0f} million weights and {model['positions']:,} positions"
    return f"{_name(found)}, a decoder of {size}"
