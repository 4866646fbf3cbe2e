"""Measure time and memory of whole encoders, against Longformer, LED, BigBird and BERT with the same weights.

    hf-efficient-attn bench models --peers longformer bert --lengths 512 4096

Our models are converted from those of transformers, and their outputs are compared before anything is timed. The peer
`self_only`, whose tokens attend only to themselves, shows the time of everything except attention. Each round runs
every encoder of a length once; on a CPU each has a process of its own. A training step is a forward pass, the mean
squared distance of the last hidden state from a fixed one, a backward pass, and an AdamW step. Times are in
milliseconds, memory is in MiB, lengths are in tokens.
"""

import argparse
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedModel
from transformers.utils import logging

from hf_efficient_attn.bench.memory import peak_memory
from hf_efficient_attn.bench.options import (
    add_attention_dropout,
    add_counts,
    add_device,
    add_dtype,
    add_max_seconds,
    add_results,
    add_threads,
    check_attention_dropout,
    check_counts,
    make_folder,
    set_threads,
)
from hf_efficient_attn.bench.report import (
    MEBIBYTE,
    NONE,
    Line,
    Panel,
    Row,
    describe_machine,
    draw_panels,
    machine_line,
    markdown_table,
    one_line,
    publish,
    resolve_device,
)
from hf_efficient_attn.bench.timing import LEAST_ROUNDS, Case, Timing, cases_apart, time_once, time_within, times_faster
from hf_efficient_attn.convert.conversion import convert
from hf_efficient_attn.errors import EfficientAttentionError
from hf_efficient_attn.messages import shown

OURS, THEIRS = "ours", "transformers"
# the bound of any attention: BERT with tokens that attend only to themselves
SELF_ONLY = "self_only"
SEED = 0
# a small vocabulary: the encoder is measured, not AdamW on a table of tokens
VOCAB_SIZE = 1024
WINDOW_TOKENS = 512
# largest difference of last hidden states, after the final norm, that rounding explains
TOLERANCES = {"float32": 1e-4, "float16": 0.05, "bfloat16": 0.3}
# ours -> transformers' encoders that it is compared with, if both were measured
OPPONENTS = {
    "longformer": ("longformer", "bert"),
    "led": ("led",),
    "big_bird": ("big_bird", "bert"),
    "bert": ("bert",),
    SELF_ONLY: ("longformer", "big_bird", "bert"),
}
LENGTHS = [512, 1024, 2048, 4096, 8192, 16384]
MEASURES = ("forward", "training")
COUNTS = {
    "layers": (12, "largest number of layers of a model"),
    "hidden_size": (768, "hidden size of the models"),
    "num_heads": (12, "attention heads"),
    "intermediate_size": (3072, "width of the MLP"),
    "batch_size": (1, "batch size: examples in a step"),
    "layer_tokens": (
        2048,
        "long sequences are timed with fewer layers: N / tokens, but at least one",
    ),
    "memory_layers": (2, "number of layers of the models whose peak memory is measured"),
    "repeats": (10, "largest number of timed rounds for each length; a round runs every encoder once"),
}
# device -> dtype, and the longest input of transformers' sparse encoders and of those of ours not in `UNLIMITED`
DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {"dtype": "float32", "peer_limit": 4096},
    "cuda": {"dtype": "bfloat16", "peer_limit": 16384},
}
# measured at every length: our Longformer and BigBird, the bound, and transformers' dense encoder
UNLIMITED = (("longformer", OURS), ("big_bird", OURS), (SELF_ONLY, OURS), ("bert", THEIRS))
TITLES = {"training": "training step", "forward": "forward"}
COLORS = {"longformer": "#4477aa", "led": "#44bb99", "big_bird": "#ee8866", "bert": "#333333", SELF_ONLY: "#bbbbbb"}
LINES = {OURS: "-", THEIRS: "--"}


@dataclass(frozen=True)
class Shape:
    """What the compared encoders have in common. Dropout of hidden states is transformers' default, 0.1."""

    num_layers: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    tokens: int
    batch_size: int
    attention_dropout: float
    dtype: str
    device: str

    def bert_like(self, model_type: str, **fields: Any) -> PreTrainedModel:
        """Return a new model of a type whose config has BERT's names, without pooler, with SDPA if it supports it."""
        config = AutoConfig.for_model(
            model_type,
            vocab_size=VOCAB_SIZE,
            num_hidden_layers=self.num_layers,
            hidden_size=self.hidden_size,
            num_attention_heads=self.num_heads,
            intermediate_size=self.intermediate_size,
            attention_probs_dropout_prob=self.attention_dropout,
            **{"max_position_embeddings": self.tokens, **fields},
        )
        return AutoModel.from_config(config, add_pooling_layer=False)  # type: ignore[no-any-return]

    def longformer(self) -> PreTrainedModel:
        """Return Longformer with a window of 512 in every layer."""
        # its positions count from pad_token_id + 1
        fields = {"max_position_embeddings": self.tokens + 2, "pad_token_id": 1, "type_vocab_size": 1}
        return self.bert_like("longformer", attention_window=WINDOW_TOKENS, **fields)

    def big_bird(self) -> PreTrainedModel:
        """Return BigBird-ITC with blocks of 64, three of them random."""
        return self.bert_like("big_bird", block_size=64, num_random_blocks=3)

    def bert(self) -> PreTrainedModel:
        """Return BERT, whose attention is torch's SDPA."""
        return self.bert_like("bert")

    def led(self) -> PreTrainedModel:
        """Return LED with a window of 512 in every layer; only its encoder is used."""
        config = AutoConfig.for_model(
            "led",
            vocab_size=VOCAB_SIZE,
            d_model=self.hidden_size,
            encoder_layers=self.num_layers,
            encoder_attention_heads=self.num_heads,
            encoder_ffn_dim=self.intermediate_size,
            decoder_layers=1,
            decoder_attention_heads=self.num_heads,
            decoder_ffn_dim=self.intermediate_size,
            attention_dropout=self.attention_dropout,
            attention_window=WINDOW_TOKENS,
            max_encoder_position_embeddings=self.tokens,
        )
        return AutoModel.from_config(config)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Architecture:
    """An encoder of transformers and what it becomes here.

    Attributes:
        build: Shape → transformers' model.
        convert_options: options of `convert` besides the length.
        has_global_token: whether the first token is global.
        makers: whose encoders are measured; only ours if the encoder of transformers computes something else.
    """

    build: Callable[[Shape], PreTrainedModel]
    convert_options: dict[str, Any]
    has_global_token: bool = False
    makers: tuple[str, ...] = (OURS, THEIRS)


ARCHITECTURES = {
    "longformer": Architecture(Shape.longformer, {}, has_global_token=True),
    "led": Architecture(Shape.led, {}, has_global_token=True),
    "big_bird": Architecture(Shape.big_bird, {"parity": True}),
    "bert": Architecture(Shape.bert, {"pattern": "full()"}),
    SELF_ONLY: Architecture(Shape.bert, {"pattern": "band(0, 0)"}, makers=(OURS,)),
}


@dataclass(frozen=True)
class Encoder:
    """An encoder and its inputs.

    Attributes:
        model: the model that owns the parameters; an encoder-decoder also has those of a decoder.
        inputs: keyword arguments of a call, of shape [batch, tokens].
    """

    model: PreTrainedModel
    inputs: dict[str, Tensor]

    def run(self) -> Tensor:
        """Return the last hidden state [batch, tokens, hidden_size]."""
        encoder = self.model.get_encoder() if self.model.config.is_encoder_decoder else self.model
        return encoder(**self.inputs).last_hidden_state  # type: ignore[no-any-return]


def build_encoder(name: str, by: str, shape: Shape) -> Encoder:
    """Return the encoder called `name`, by transformers or by us, both with the same weights."""
    architecture = ARCHITECTURES[name]
    torch.manual_seed(SEED)
    model: Any = architecture.build(shape)
    generator = torch.Generator().manual_seed(SEED)
    # ids above those of padding and separators
    input_ids = torch.randint(8, VOCAB_SIZE, (shape.batch_size, shape.tokens), generator=generator)
    inputs = {"input_ids": input_ids}
    if by == OURS:
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            model = convert(model, max_position_embeddings=shape.tokens, **architecture.convert_options)
        model.config.global_tokens = "first" if architecture.has_global_token else None
        model.config.random_blocks_in_eval = "fixed"
    elif architecture.has_global_token:
        inputs["global_attention_mask"] = torch.zeros_like(input_ids).index_fill_(1, torch.tensor(0), 1)
    model = model.to(shape.device, getattr(torch, shape.dtype))
    return Encoder(model, {key: tensor.to(shape.device) for key, tensor in inputs.items()})


def training_step(encoder: Encoder) -> Callable[[], None]:
    """Return a function that trains for one step: forward, loss, backward, AdamW, gradients freed.

    The loss is the mean squared distance of the last hidden state from a fixed random one; there is no head.
    """
    model = encoder.model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    generator = torch.Generator().manual_seed(SEED)
    size = (*encoder.inputs["input_ids"].shape, model.config.hidden_size)
    target = torch.randn(size, generator=generator).to(model.device, model.dtype)

    def step() -> None:
        nn.functional.mse_loss(encoder.run(), target).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def read_new_encoder(name: str, by: str, shape: Shape) -> Tensor:
    """Return the output of `read_comparably` for a new encoder."""
    return read_comparably(build_encoder(name, by, shape))


def build_cases(name: str, by: str, shape: Shape) -> dict[str, Case]:
    """Return the cases of a new encoder by measure."""
    encoder = build_encoder(name, by, shape)
    step = training_step(encoder)
    return {
        "forward": Case(lambda _: read(encoder), encoder.model.eval),
        "training": Case(lambda _: step(), encoder.model.train),
    }


def build_training_step(name: str, by: str, shape: dict[str, Any]) -> Callable[[], None]:
    """Return the training step of a new encoder; all arguments are of JSON types, `shape` has the fields of `Shape`."""
    return training_step(build_encoder(name, by, Shape(**shape)))


def largest_difference(name: str, ours: Tensor, theirs: Tensor, shape: Shape) -> float:
    """Return the largest difference between last hidden states, as `read_comparably` returns them.

    Raises:
        EfficientAttentionError: a difference larger than rounding explains.
    """
    difference = float((ours.float() - theirs.float()).abs().max())
    if not difference <= TOLERANCES[shape.dtype]:
        raise EfficientAttentionError(
            f"The outputs of our {name} and transformers' differ by {difference:.1e} at {shape.tokens:,} tokens, more "
            f"than rounding ({TOLERANCES[shape.dtype]:.0e}), so their speeds cannot be compared. Report this, or leave "
            f"out {shown(name)}."
        )
    return difference


def read_comparably(encoder: Encoder) -> Tensor:
    """Return the last hidden state in eval mode; our BigBird computes it as transformers' does.

    In eval mode transformers attends to copies of block 0 in place of random blocks. When it is timed, ours always
    attends to its random blocks.
    """
    encoder.model.config.random_blocks_in_eval = "transformers"
    output = read(encoder)
    encoder.model.config.random_blocks_in_eval = "fixed"
    return output


@torch.no_grad()
def read(encoder: Encoder) -> Tensor:
    """Return the last hidden state in eval mode, without gradients."""
    encoder.model.eval()
    return encoder.run()


def add_ratios(rows: list[Row]) -> None:
    """Write `speed_against`, {architecture of transformers: {measure: quartiles}}, into our rows.

    Rounds are compared one by one; above 1, ours is faster.
    """
    theirs = {(row["model"], row["tokens"]): row for row in rows if row["by"] == THEIRS}
    for row in rows:
        if row["by"] == OURS:
            others = {name: theirs.get((name, row["tokens"])) for name in OPPONENTS[row["model"]]}
            row["speed_against"] = {name: _speeds(row, other) for name, other in others.items() if other is not None}


def _speeds(own: Row, other: Row) -> dict[str, dict[str, float]]:
    measures = [name for name in ("forward", "training") if "samples" in own[name] and "samples" in other[name]]
    return {name: times_faster(own[name]["samples"], other[name]["samples"]) for name in measures}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `bench models`."""
    names = list(ARCHITECTURES)
    text = f"architectures to compare with: {', '.join(names)} (default all)"
    parser.add_argument("--peers", nargs="+", choices=names, default=names, metavar="PEER", help=text)
    parser.add_argument(
        "--lengths",
        nargs="+",
        type=int,
        default=LENGTHS,
        metavar="N",
        help="lengths of the sequences in tokens (default 512 to 16384)",
    )
    add_counts(parser, COUNTS)
    add_attention_dropout(parser)
    add_dtype(parser, "all models")
    add_device(parser)
    add_threads(parser)
    add_max_seconds(parser, 30)
    parser.add_argument(
        "--peer-limit",
        type=int,
        metavar="N",
        help="longest sequence, in tokens, on which transformers' sparse encoders are timed (default 4096, on a GPU "
        "16384)",
    )
    parser.add_argument(
        "--memory-lengths",
        nargs="*",
        type=int,
        default=[4096, 16384],
        metavar="N",
        help="lengths at which peak memory is measured, in tokens (default 4096 16384)",
    )
    add_results(parser, "outputs/bench_models")


def main(args: argparse.Namespace) -> None:
    """Measure, print the tables, and write models.json, models.md and models.png into `args.output`.

    Raises:
        EfficientAttentionError: a count below 1, a dropout out of range, outputs that differ, CUDA without a device.
    """
    check_counts(args, COUNTS, "lengths")
    check_attention_dropout(args)
    set_threads(args)
    device = resolve_device(args.device)
    make_folder(args)
    results = measure(settings_of(args, device), device)
    publish(args, "models", results, results_markdown(results), results_figure)


def settings_of(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Return the options that the results depend on, with the defaults of the device."""
    settings = {name: getattr(args, name) for name in (*COUNTS, "attention_dropout", "max_seconds")}
    for name, default in DEFAULTS[device.type].items():
        settings[name] = default if getattr(args, name) is None else getattr(args, name)
    lengths = {name: sorted(set(getattr(args, name))) for name in ("lengths", "memory_lengths")}
    return {**settings, **lengths, "peers": list(dict.fromkeys(args.peers))}


def measure(settings: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Return all results in JSON types: `machine`, `settings`, `differences`, `results`.

    `results` has a row per length, architecture and maker; `differences` has the largest difference between outputs per
    architecture and length.
    """
    rows: list[Row] = []
    differences: dict[str, dict[str, float]] = {}
    peaks = measure_memory(settings, device)
    for tokens in logging.tqdm(settings["lengths"], desc="lengths", unit="length", leave=False):
        its_rows, its_differences = measure_length(shape_of(settings, tokens, device), settings)
        rows += its_rows
        for name, difference in its_differences.items():
            differences.setdefault(name, {})[str(tokens)] = difference
    for row in rows:
        row["peak_memory_bytes"] = peaks.get((row["model"], row["by"], row["tokens"]))
    add_ratios(rows)
    return {"machine": describe_machine(device), "settings": settings, "differences": differences, "results": rows}


def shape_of(settings: dict[str, Any], tokens: int, device: torch.device) -> Shape:
    """Return the shape of the encoders that are timed at a length."""
    return Shape(
        num_layers=max(1, min(settings["layers"], settings["layer_tokens"] // tokens)),
        hidden_size=settings["hidden_size"],
        num_heads=settings["num_heads"],
        intermediate_size=settings["intermediate_size"],
        tokens=tokens,
        batch_size=settings["batch_size"],
        attention_dropout=settings["attention_dropout"],
        dtype=settings["dtype"],
        device=device.type,
    )


def contestants(settings: dict[str, Any], tokens: int) -> list[tuple[str, str]]:
    """Return (architecture, maker) of the encoders that are measured at a length."""
    pairs = [(name, by) for name in settings["peers"] for by in ARCHITECTURES[name].makers]
    return [pair for pair in pairs if tokens <= settings["peer_limit"] or pair in UNLIMITED]


def measure_length(shape: Shape, settings: dict[str, Any]) -> tuple[list[Row], dict[str, float]]:
    """Return a row per encoder, and the largest difference of outputs per architecture.

    A measure is {"milliseconds": quartiles}, or {"reason": why there is none} if transformers' encoder fails.
    """
    rows: list[Row] = []
    outputs: dict[tuple[str, str], Tensor] = {}
    for name, by in contestants(settings, shape.tokens):
        row: Row = {"model": name, "by": by, "tokens": shape.tokens, "layers": shape.num_layers}
        rows.append(row)
        output = attempt(row, partial(read_new_encoder, name, by, shape))
        if output is not None:
            outputs[name, by] = output
    differences = compare(outputs, shape)
    timings = time_encoders(list(outputs), shape, settings)
    for row in rows:
        for measure in MEASURES:
            timing = timings.get(f"{row['model']} {row['by']} {measure}")
            if timing is not None:
                row[measure] = timing.record(1)
    return rows, differences


def time_encoders(encoders: list[tuple[str, str]], shape: Shape, settings: dict[str, Any]) -> dict[str, Timing]:
    """Return the timings by "architecture maker measure", all from the same rounds.

    Before them every case runs once untimed, to build optimizer states and layouts.
    """
    device = torch.device(shape.device)
    with ExitStack() as processes:
        cases = {
            f"{name} {by} {measure}": case
            for name, by in encoders
            for measure, case in processes.enter_context(cases_apart(build_cases, (name, by, shape), device)).items()
        }
        for case in cases.values():
            time_once(case, device)
        return time_within(cases, settings["repeats"], settings["max_seconds"], f"{shape.tokens:,} tokens", device)


def attempt(row: Row, function: Callable[[], Any]) -> Any:
    """Return the result of a function; if it fails for transformers, write the reason into the row and return None."""
    try:
        return function()
    except Exception as error:
        if row["by"] == OURS:
            raise
        row |= {measure: {"reason": one_line(error)} for measure in MEASURES}
        return None


def compare(outputs: dict[tuple[str, str], Tensor], shape: Shape) -> dict[str, float]:
    """Return the largest difference between ours and theirs for every architecture that both have computed."""
    pairs = {name: (outputs[name, OURS], outputs.get((name, THEIRS))) for name, by in outputs if by == OURS}
    return {
        name: largest_difference(name, ours, theirs, shape)
        for name, (ours, theirs) in pairs.items()
        if theirs is not None
    }


def measure_memory(settings: dict[str, Any], device: torch.device) -> dict[tuple[str, str, int], int]:
    """Return the peak bytes of a training step, beyond the weights, by architecture, maker and length.

    Encoders of transformers are measured up to `peer_limit`; one that fails is left out, and fails again when timed.
    """
    lengths = [tokens for tokens in settings["memory_lengths"] if tokens in settings["lengths"]]
    wanted = [(*pair, tokens) for tokens in lengths for pair in contestants(settings, tokens)]
    wanted = [key for key in wanted if key[1] == OURS or key[2] <= settings["peer_limit"]]
    peaks = {}
    for name, by, tokens in logging.tqdm(wanted, desc="memory", unit="encoder", leave=False):
        shape = replace(shape_of(settings, tokens, device), num_layers=settings["memory_layers"])
        arguments = {"name": name, "by": by, "shape": asdict(shape)}
        try:
            peaks[name, by, tokens] = peak_memory(build_training_step, arguments, device)
        except RuntimeError:
            if by == OURS:
                raise
    return peaks


def results_markdown(results: dict[str, Any]) -> str:
    """Return the tables, what could not be measured and why, and what the numbers mean."""
    settings = results["settings"]
    parts = [f"# Encoders: {_caption(settings)}", machine_line(results["machine"])]
    for heading, table in sections(results).items():
        parts += [f"## {heading}", table]
    return "\n\n".join([*parts, _reasons(results["results"]), _legend(settings)])


def sections(results: dict[str, Any]) -> dict[str, str]:
    """Return the tables by their headings."""
    settings, rows = results["settings"], results["results"]
    found = {}
    for measure, title in TITLES.items():
        found[f"Speed of ours, {title}"] = _speed_table(rows, settings, measure)
    for measure, title in TITLES.items():
        found[f"Milliseconds, {title}"] = _table(rows, settings["lengths"], _time_of(measure))
    if any(row["peak_memory_bytes"] for row in rows):
        heading = f"Peak MiB of a training step beyond the weights, {settings['memory_layers']} layers"
        found[heading] = _table(rows, settings["memory_lengths"], _memory)
    found["Largest difference between ours and theirs"] = _differences(results)
    return found


def _caption(settings: dict[str, Any]) -> str:
    return (
        f"width {settings['hidden_size']}, {settings['num_heads']} heads, MLP {settings['intermediate_size']:,}, "
        f"{settings['dtype']}, batch {settings['batch_size']}, attention dropout {settings['attention_dropout']:g}"
    )


def by_encoder(rows: list[Row]) -> Iterator[tuple[str, str, list[Row]]]:
    """Yield (architecture, maker, its rows) in the order of their first appearance."""
    for name, by in dict.fromkeys((row["model"], row["by"]) for row in rows):
        yield name, by, [row for row in rows if (row["model"], row["by"]) == (name, by)]


def _table(rows: list[Row], lengths: list[int], cell: Callable[[Row], str]) -> str:
    lines = []
    for name, by, its_rows in by_encoder(rows):
        cells = {row["tokens"]: cell(row) for row in its_rows}
        lines.append([f"{name}, {by}", *(cells.get(tokens, NONE) for tokens in lengths)])
    return markdown_table(["encoder, by", *(f"{tokens:,}" for tokens in lengths)], lines)


def _speed_table(rows: list[Row], settings: dict[str, Any], measure: str) -> str:
    lengths = settings["lengths"]
    lines = []
    for name, others in OPPONENTS.items():
        own = {row["tokens"]: row["speed_against"] for row in rows if row["model"] == name and row["by"] == OURS}
        for other in others:
            cells = [_speed(own.get(tokens, {}).get(other, {}).get(measure)) for tokens in lengths]
            if set(cells) != {NONE}:
                lines.append([f"{name} / {other}", *cells])
    found = {row["tokens"]: row for row in rows if "milliseconds" in row[measure]}
    header = [f"{tokens:,} ({row['layers']} layers)" for tokens, row in found.items()]
    return markdown_table(["ours / transformers'", *header], lines)


def _speed(speed: dict[str, float] | None) -> str:
    if speed is None:
        return NONE
    return f"{speed['median']:.2f} ({speed['first_quartile']:.2f}–{speed['third_quartile']:.2f})"


def _time_of(measure: str) -> Callable[[Row], str]:
    return lambda row: f"{row[measure]['milliseconds']['median']:,.0f}" if "milliseconds" in row[measure] else NONE


def _memory(row: Row) -> str:
    amount = _mebibytes(row)
    return NONE if amount is None else f"{amount:,.0f}"


def _mebibytes(row: Row) -> float | None:
    return None if row["peak_memory_bytes"] is None else row["peak_memory_bytes"] / MEBIBYTE


def _differences(results: dict[str, Any]) -> str:
    lengths = results["settings"]["lengths"]
    lines = []
    for name, by_length in results["differences"].items():
        cells = (by_length.get(str(tokens)) for tokens in lengths)
        lines.append([name, *(NONE if cell is None else f"{cell:.0e}" for cell in cells)])
    return markdown_table(["last hidden state", *(f"{tokens:,}" for tokens in lengths)], lines)


def _reasons(rows: list[Row]) -> str:
    reasons = dict.fromkeys(
        f"- {row['model']}, {row['by']}, {row['tokens']:,} tokens, {title}: {row[measure]['reason']}"
        for row in rows
        for measure, title in TITLES.items()
        if "reason" in row[measure]
    )
    return "\n".join(["Not measured:", "", *reasons]) if reasons else "Everything requested was measured."


def _legend(settings: dict[str, Any]) -> str:
    return (
        f"Speed: medians and quartiles of the ratios within a round; above 1, ours is faster. Up to "
        f"{settings['repeats']} rounds, as many as fit into {settings['max_seconds']:g} seconds per length, at least "
        f"{LEAST_ROUNDS}, after a warm-up round; on a CPU every encoder has a process of its own. All layers of an "
        f"encoder are alike, so long inputs have fewer of them (layers × tokens at most {settings['layer_tokens']:,}), "
        f"and at most {settings['layers']}. Weights are the same: ours are converted from transformers' models, and "
        "the last hidden states are compared first, in eval mode (BigBird with parity). Training step: forward, mean "
        "squared distance of the last hidden state from a fixed random one, backward, AdamW (fused), gradients freed; "
        f"no head, a vocabulary of {VOCAB_SIZE:,}. Forward: eval mode, no gradients; our BigBird attends to random "
        "blocks in eval mode too, transformers' to copies of block 0. Dropout of hidden states is 0.1, the default of "
        "transformers; dropout of attention weights is above. longformer and led: window 512, first token global; led: "
        "only the encoder; big_bird: blocks of 64, 3 random, full attention on up to 704 tokens, as in transformers; "
        "bert: SDPA; self_only: BERT converted to ours, in which each token attends only to itself. This takes a few "
        "percent of the time, and an encoder with the same linear maps and any other attention can be faster by no "
        "more than that. Sparse encoders of transformers, and our led and bert, are timed only up to "
        f"{settings['peer_limit']:,} tokens."
    )


def results_figure(results: dict[str, Any]) -> Any:
    """Return the picture: time per layer of a training step and of a forward pass, and peak memory, against length."""
    settings, rows = results["settings"], results["results"]
    memory_title = f"Peak memory of a training step, {settings['memory_layers']} layers"
    panels = [
        Panel(title.capitalize(), "milliseconds per layer", _lines(rows, _per_layer(measure)))
        for measure, title in TITLES.items()
    ]
    panels.append(Panel(memory_title, "MiB beyond the weights", _lines(rows, _mebibytes)))
    heading = f"Encoders: {_caption(settings)}\n{machine_line(results['machine'])}"
    return draw_panels(heading, panels, "tokens", settings["lengths"])


def _lines(rows: list[Row], value: Callable[[Row], float | None]) -> list[Line]:
    lines = []
    for name, by, its_rows in by_encoder(rows):
        values = {row["tokens"]: value(row) for row in its_rows}
        points = [(tokens, found) for tokens, found in values.items() if found is not None]
        style = {"color": COLORS[name], "linestyle": LINES[by], "marker": "o"}
        lines.append(Line(f"{name}, {by}", points, style))
    return lines


def _per_layer(measure: str) -> Callable[[Row], float | None]:
    def milliseconds(row: Row) -> float | None:
        found = row[measure].get("milliseconds")
        return None if found is None else found["median"] / row["layers"]

    return milliseconds
