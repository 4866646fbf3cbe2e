"""Train attention mechanisms on your own text for equal time or equal steps, and compare their loss on held-out text.

    hf-efficient-attn compare my.txt --mechanisms dense band bigbird reformer routing linformer --max-seconds 120
    hf-efficient-attn compare src/*.py --causal --max-length 1024 --keys 128 --learning-rates 1e-3 3e-3 --seeds 0 1 2

All models have the same width, layers and heads, the same tokenizer, the same learning rate schedule, and the same
batches in the same order. Training alternates between the models step by step: if the machine slows down, all of them
are affected. They are masked language models (15% of the tokens are masked), or causal ones with --causal. The
last tenth of every file is held out. The result is a table, a picture of the held-out loss against the training time,
and JSON. Lengths are in tokens, losses in nats per token.
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, DataCollatorForLanguageModeling, set_seed
from transformers.utils import logging

from hf_efficient_attn.bench.mechanisms import ALL, BLOCKS, DENSE, Shape, config_of
from hf_efficient_attn.bench.memory import peak_memory
from hf_efficient_attn.bench.options import (
    add_counts,
    add_device,
    add_results,
    add_threads,
    check_counts,
    make_folder,
    set_threads,
)
from hf_efficient_attn.bench.report import (
    MEBIBYTE,
    NONE,
    PALETTE,
    Row,
    clock_line,
    describe_machine,
    machine_line,
    markdown_table,
    publish,
    resolve_device,
)
from hf_efficient_attn.bench.text_blocks import LEAST_HELD_OUT_BLOCKS, TextBlocks, read_blocks
from hf_efficient_attn.bench.timing import clock_of, counts_processor_time, synchronize
from hf_efficient_attn.errors import InputError
from hf_efficient_attn.messages import shown
from hf_efficient_attn.pictures import new_figure
from hf_efficient_attn.training.optimizer_groups import optimizer_groups

MECHANISMS = ("dense", "band", "bigbird", "reformer", "routing", "linformer", "adaptive_span", "block_top_k")
SECONDS = 60.0
COUNTS = {
    "max_length": (512, "tokens in each block of text"),
    "keys": (64, "approximate number of keys per token, for mechanisms that let you choose it"),
    "batch_size": (4, "blocks of text in a step"),
    "hidden_size": (128, "hidden size; MLPs are four times as wide"),
    "layers": (2, "layers"),
    "heads": (4, "attention heads"),
    "vocab_size": (2048, "vocabulary size of the tokenizer that is trained on the text"),
    "eval_tokens": (
        65_536,
        "maximum number of held-out tokens (but at least 4 blocks): half to choose the learning rate, half as the test "
        "set",
    ),
}
# share of the training in which the learning rate rises; then it falls to 0
WARMUP = 0.1
WEIGHT_DECAY, MAX_GRAD_NORM, MASKED = 0.01, 1.0, 0.15
# how often a training evaluates the validation loss
EVALUATIONS = 10
# a difference of fewer standard errors is within the noise
NOISE = 2.0

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Budget:
    """How long a model is trained: `limit` steps or seconds."""

    limit: float
    unit: Literal["steps", "seconds"]

    def share(self, seconds: float, steps: int) -> float:
        """Return the share of the training that is over, from 0 to 1."""
        return min(1.0, (steps if self.unit == "steps" else seconds) / self.limit)


@dataclass(frozen=True)
class Comparison:
    """What all models have in common.

    Attributes:
        positions: "rope" or "learned", for mechanisms that support it.
        learning_rates: peak rates; every model is trained once per rate and seed.
    """

    text: TextBlocks
    shape: Shape
    positions: str
    budget: Budget
    learning_rates: list[float]
    seeds: list[int]

    def build(self, name: str) -> Any:
        """Return a new model."""
        return build_model(name, self.shape, self.positions, len(self.text.tokenizer)).to(self.shape.device)

    def batches(self, blocks: Tensor, seed: int) -> Iterator[Batch]:
        """Yield the arguments of a model for the blocks, in order; the seed decides which tokens are masked."""
        if not self.shape.is_causal:
            mask = DataCollatorForLanguageModeling(self.text.tokenizer, mlm_probability=MASKED, seed=seed)
        for rows in blocks.split(self.shape.batch_size):
            if self.shape.is_causal:
                ids = rows.to(self.shape.device)
                yield {"input_ids": ids, "labels": ids}
            else:
                yield {name: values.to(self.shape.device) for name, values in mask(list(rows)).items()}

    def training_batches(self, seed: int) -> Iterator[Batch]:
        """Yield batches forever; every epoch has another order and other masks."""
        generator = torch.Generator().manual_seed(seed)
        size, blocks = self.shape.batch_size, self.text.train
        while True:
            order = torch.randperm(len(blocks), generator=generator)[: len(blocks) // size * size]
            yield from self.batches(blocks[order], int(torch.randint(2**31, (), generator=generator)))

    @torch.no_grad()
    def losses(self, model: Any, blocks: Tensor) -> Tensor:
        """Return the nats of held-out blocks [blocks], scaled so that their mean is the loss per predicted token."""
        model.eval()
        sums, counts = [], []
        # for hashes and features that a model draws
        torch.manual_seed(0)
        for batch in self.batches(blocks, seed=0):
            labels = batch.pop("labels")
            logits = model(**batch).logits.float()
            if self.shape.is_causal:
                logits, labels = logits[:, :-1], labels[:, 1:]
            nats = cross_entropy(logits.transpose(1, 2), labels, ignore_index=-100, reduction="none")
            sums.append(nats.sum(1).cpu())
            counts.append((labels != -100).sum(1).cpu())
        model.train()
        return torch.cat(sums) / torch.cat(counts).float().mean()


def build_model(name: str, shape: Shape, positions: str, vocab_size: int) -> Any:
    """Return a new language model of a mechanism, without a cache and with an untied output matrix."""
    kind = positions_of(name, positions)
    fields: dict[str, Any] = {} if kind is None else {"position_embedding_type": kind}
    # families have different defaults: with tied matrices some would have far fewer parameters
    fields |= {"tie_word_embeddings": False, "use_cache": False}
    auto = AutoModelForCausalLM if shape.is_causal else AutoModelForMaskedLM
    return auto.from_config(config_of(name, shape, vocab_size=vocab_size, **fields))


def positions_of(name: str, wanted: str) -> str | None:
    """Return the positions of a mechanism: `wanted` if it supports them, else its first; None: only its own."""
    known = ALL[name].positions
    return wanted if wanted in known else next(iter(known), None)


def training_step(name: str, shape: dict[str, Any], positions: str, vocab_size: int) -> Callable[[], object]:
    """Return the forward and backward pass of a new model on a batch; all arguments are of JSON types."""
    of = Shape(**shape)
    model = build_model(name, of, positions, vocab_size).to(of.device)
    ids = torch.randint(vocab_size, (of.batch_size, of.tokens), device=of.device)

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad()

    return step


class Training:
    """One model in training.

    Only steps count as time; preparing batches and evaluating do not.

    Attributes:
        stopped: why its losses are not finite; None: they are.
        history: (seconds, step, validation loss).
        validation: the last validation loss; infinite if losses are not finite.
        test: nats of the test blocks [blocks], once the training is over.
    """

    def __init__(self, of: Comparison, name: str, rate: float, seed: int) -> None:
        self.of, self.rate, self.seed = of, rate, seed
        set_seed(seed)
        self.model = of.build(name).train()
        self.parameters = self.model.num_parameters()
        self.optimizer = torch.optim.AdamW(optimizer_groups(self.model, WEIGHT_DECAY), lr=rate)
        self.batches = of.training_batches(seed)
        self.seconds, self.steps, self.share = 0.0, 0, 0.0
        self.stopped: str | None = None
        self.history: list[tuple[float, int, float]] = []
        self.validation = math.inf
        self.test = torch.empty(0)

    @property
    def is_over(self) -> bool:
        """Whether the training has ended."""
        return self.share >= 1 or self.stopped is not None

    def step(self) -> float:
        """Train on one batch and return its loss."""
        device, before = torch.device(self.of.shape.device), self.share
        now, batch = clock_of(device), next(self.batches)
        # models take turns: what one draws must not depend on the others
        torch.manual_seed(self.seed + self.steps)
        synchronize(device)
        start = now()
        for group in self.optimizer.param_groups:
            # not 0 at the first step, which would be lost
            group["lr"] = self.rate * min(max(before, WARMUP / 10) / WARMUP, (1 - before) / (1 - WARMUP))
        loss = self.model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        value: float = loss.item()
        synchronize(device)
        self.seconds, self.steps = self.seconds + now() - start, self.steps + 1
        self.share = self.of.budget.share(self.seconds, self.steps)
        if not math.isfinite(value):
            self.stopped = f"the loss is {value} at step {self.steps:,} with the learning rate {self.rate:g}"
        elif int(self.share * EVALUATIONS) > int(before * EVALUATIONS):
            self.validation = self.of.losses(self.model, self.of.text.validation).mean().item()
            self.history.append((self.seconds, self.steps, self.validation))
            if not math.isfinite(self.validation):
                self.stopped = f"the held-out loss is {self.validation} with the learning rate {self.rate:g}"
        if self.stopped:
            self.validation = math.inf
        return value

    def finish(self) -> None:
        """Test the model and free it."""
        if not self.stopped:
            self.test = self.of.losses(self.model, self.of.text.test)
        del self.model, self.optimizer, self.batches


def train_in_turns(of: Comparison, names: list[str], rate: float, seed: int) -> dict[str, Training]:
    """Train a model of every mechanism.

    The next step is always that of the model that has completed the smallest share of its training, so that a machine
    that slows down slows all of them.
    """
    all_of_them = {name: Training(of, name, rate, seed) for name in names}
    left, done = dict(all_of_them), 0.0
    form = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"
    with logging.tqdm(total=len(names), desc=f"rate {rate:g}, seed {seed}", bar_format=form) as bar:
        while left:
            name = min(left, key=lambda name: left[name].share)
            training, before = left[name], left[name].share
            loss = training.step()
            bar.set_postfix_str(f"step {training.steps:,} of {name}: loss {loss:.3f}", refresh=False)
            # tqdm warns when rounding errors lift the sum above the total
            advance = min((1 if training.is_over else training.share) - before, len(names) - done)
            bar.update(advance)
            done += advance
            if training.is_over:
                left.pop(name).finish()
    return all_of_them


def compare(of: Comparison, names: list[str], measure_memory: bool) -> tuple[list[Row], dict[str, str]]:
    """Return the row of every mechanism in the order of names, and {mechanism: why it has none}.

    The first row is the reference of the others.

    Raises:
        InputError: no training ended with a finite loss.
    """
    device = torch.device(of.shape.device)
    for name in logging.tqdm(names, desc="one step of each", leave=False):
        # so that errors come before the first training, and what is computed only once does not count as training time
        of.build(name).train()(**next(of.training_batches(0))).loss.backward()
    # before the trainings, so that a process that fails does not lose their results
    peaks: dict[str, int] = {}
    for name in logging.tqdm(names if measure_memory else [], desc="memory", unit="mechanism", leave=False):
        arguments = {"name": name, "shape": asdict(of.shape), "positions": of.positions}
        peaks[name] = peak_memory(training_step, {**arguments, "vocab_size": len(of.text.tokenizer)}, device)
    tried = [[train_in_turns(of, names, rate, seed) for seed in of.seeds] for rate in of.learning_rates]
    reference: list[Training] = []
    failed: dict[str, str] = {}
    rows = []
    for name in names:
        by_rate = [[trainings[name] for trainings in of_rate] for of_rate in tried]
        runs = min(by_rate, key=_validation)
        if not math.isfinite(_validation(runs)):
            failed[name] = f"{next(run.stopped for run in runs if run.stopped)}; try a lower learning rate"
            continue
        reference = reference or runs
        row = row_of(of, name, runs, reference)
        row["tried"] = {f"{each[0].rate:g}": _validation(each) for each in by_rate if math.isfinite(_validation(each))}
        rows.append(row | ({"peak_memory_bytes": peaks[name]} if measure_memory else {}))
    if not rows:
        raise InputError(". ".join(f"{name}: {reason}" for name, reason in failed.items()) + ".")
    return rows, failed


def _validation(runs: list[Training]) -> float:
    return fmean(run.validation for run in runs)


def row_of(of: Comparison, name: str, runs: list[Training], reference: list[Training]) -> Row:
    """Return the results of a mechanism over its seeds, in JSON types.

    reference: the trainings of the reference mechanism, with the same seeds.
    """
    loss = fmean(run.test.mean().item() for run in runs)
    seconds, steps = sum(run.seconds for run in runs), sum(run.steps for run in runs)
    row = {
        "mechanism": name,
        "attends_to": ALL[name].about.format(keys=of.shape.keys),
        "positions": positions_of(name, of.positions) or "its own",
        "parameters": runs[0].parameters,
        "learning_rate": runs[0].rate,
        "loss": loss,
        "loss_deviation": stdev(run.test.mean().item() for run in runs) if len(runs) > 1 else None,
        "bits_per_byte": loss / math.log(2) / of.text.bytes_per_token,
        "steps": steps / len(runs),
        "train_seconds": seconds / len(runs),
        "tokens_per_second": steps * of.shape.batch_size * of.shape.tokens / seconds,
        "history": {run.seed: run.history for run in runs},
    }
    if runs is not reference:
        row |= difference(
            torch.stack([run.test - other.test for run, other in zip(runs, reference, strict=True)]).double()
        )
    return row


def difference(pairs: Tensor) -> dict[str, Any]:
    """Return the mean of differences [seeds, blocks], its standard error, and the verdict.

    The standard error is over blocks and, with several seeds, also over seeds.

    >>> difference(torch.tensor([[0.1, 0.1, 0.1, 0.3]]).double())["verdict"]
    'higher'
    >>> difference(torch.tensor([[0.1, -0.1, 0.1, 0.0]]).double())["verdict"]
    'within noise'
    """
    num_seeds, num_blocks = pairs.shape
    mean = pairs.mean().item()
    variance = pairs.mean(0).var().item() / num_blocks
    if num_seeds > 1:
        variance += pairs.mean(1).var().item() / num_seeds
    error = math.sqrt(variance)
    verdict = "within noise" if abs(mean) < NOISE * error else "lower" if mean < 0 else "higher"
    return {"difference": mean, "standard_error": error, "verdict": verdict}


def results_markdown(results: dict[str, Any]) -> str:
    """Return the table, and notes on how to read it."""
    rows, settings = results["results"], results["settings"]
    reference, has_rates = settings["reference"], len(settings["learning_rates"]) > 1
    has_memory = "peak_memory_bytes" in rows[0]
    columns: dict[str, Callable[[Row], str]] = {
        "mechanism": lambda row: row["mechanism"],
        "loss": lambda row: f"{row['loss']:.3f}" + (f" ± {row['loss_deviation']:.3f}" if settings["seeds"][1:] else ""),
        f"minus {reference}": lambda row: (
            f"{row['difference']:+.3f} ± {row['standard_error']:.3f}" if "difference" in row else NONE
        ),
        f"than {reference}": lambda row: row.get("verdict", NONE),
        "bits per byte": lambda row: f"{row['bits_per_byte']:.3f}",
        "parameters": lambda row: f"{row['parameters']:,}",
        "steps": lambda row: f"{row['steps']:,.0f}",
        "tokens/s": lambda row: f"{row['tokens_per_second']:,.0f}",
        **({"peak MiB": lambda row: f"{row['peak_memory_bytes'] / MEBIBYTE:,.0f}"} if has_memory else {}),
        "positions": lambda row: row["positions"],
        **({"learning rate": lambda row: f"{row['learning_rate']:g}"} if has_rates else {}),
    }
    ranked = sorted(rows, key=lambda row: row["loss"])
    table = markdown_table(list(columns), [[cell(row) for cell in columns.values()] for row in ranked])
    attended = [f"- {row['mechanism']}: {row['attends_to']}." for row in rows]
    left_out = [f"- {name}: {reason}." for name, reason in results["not_compared"].items()]
    parts = [
        f"# Attention mechanisms on {settings['text']}",
        machine_line(results["machine"]),
        table,
        *(["Not compared:\n" + "\n".join(left_out)] if left_out else []),
        "What a token attends to:\n" + "\n".join(attended),
        "How to read the table:\n" + "\n".join(f"- {note}" for note in results["notes"]),
    ]
    return "\n\n".join(parts)


def notes_of(of: Comparison, rows: list[Row], settings: dict[str, Any]) -> list[str]:
    """Return notes on how the numbers were computed, and on what they do not show."""
    shape, text, reference = of.shape, of.text, settings["reference"]
    num_tokens, clock = text.train.numel(), clock_line(settings).strip()
    read = [row["steps"] * shape.batch_size * shape.tokens / num_tokens for row in rows]
    times = " to ".join(dict.fromkeys(f"{value:.2g}" for value in (min(read), max(read))))
    of_what = "over all tokens except the first" if shape.is_causal else f"over the masked tokens, {MASKED:.0%} of all"
    notes = [
        f"Each model: {shape.layers} layers of width {shape.hidden_size} with {shape.heads} heads, trained for "
        f"{of.budget.limit:,g} {of.budget.unit}; a step is {shape.batch_size} blocks of {shape.tokens:,} tokens. The "
        f"training text has {num_tokens:,} tokens; models see it {times} times.{' ' * bool(clock)}{clock}",
        f"loss: nats per token, {of_what}, on {len(text.test)} held-out blocks. bits per byte: the loss divided by "
        f"ln 2 and by {text.bytes_per_token:.2f} bytes per token. Lower is better.",
        f"minus {reference}: mean difference of the loss over the held-out blocks ± its standard error"
        f"{' over blocks and seeds' if len(of.seeds) > 1 else ''}. Below {NOISE:g} standard errors it is within the "
        "noise: the table does not show which of the two is better.",
    ]
    if len(of.seeds) == 1:
        notes.append(
            "One seed: the standard error does not include how much a loss changes with other initial weights. "
            "--seeds 0 1 2 measures this."
        )
    if len(of.learning_rates) == 1:
        notes.append(
            f"One learning rate, {of.learning_rates[0]:g}, which may suit some mechanisms better than others. "
            "--learning-rates 1e-3 3e-3 keeps the better one for each."
        )
    else:
        notes.append(
            f"learning rate: the one of {', '.join(f'{rate:g}' for rate in of.learning_rates)} with the lowest loss on "
            "the validation blocks."
        )
    notes.append(
        f"The curves of the picture show the loss on the {len(text.validation)} validation blocks. These are not the "
        "held-out blocks of the table, so the curves end at other values."
    )
    others = [f"{row['mechanism']} ({row['positions']})" for row in rows if row["positions"] != of.positions]
    if others:
        notes.append(
            f"These mechanisms have another position encoding than {of.positions}, which may cause part of their "
            f"differences: {', '.join(others)}."
        )
    notes.append(
        "A short training of small models shows which mechanism learns fastest at this length, not which is best "
        "when trained for long."
    )
    return notes


def results_figure(results: dict[str, Any]) -> Any:
    """Return the picture: validation loss against training time, a line for each mechanism and seed."""
    figure = new_figure(9.0, 5.0)
    panel = figure.subplots()
    for index, row in enumerate(sorted(results["results"], key=lambda row: row["loss"])):
        is_reference = row["mechanism"] == results["settings"]["reference"]
        style = {"color": "black" if is_reference else PALETTE[index % len(PALETTE)], "marker": "os^vD"[index // 10]}
        for number, history in enumerate(row["history"].values()):
            label = f"{row['mechanism']} ({row['loss']:.3f})" if number == 0 else None
            seconds, _, losses = zip(*history, strict=True)
            panel.plot(seconds, losses, label=label, markersize=4, alpha=1 if number == 0 else 0.5, **style)
    panel.set(xlabel="training time (s)", ylabel="loss on the validation blocks (nats per token)", xlim=(0, None))
    panel.grid(color="#dddddd", linewidth=0.6)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(title="mechanism (loss on the test blocks)", fontsize=9)
    figure.suptitle(
        f"Attention mechanisms on {results['settings']['text']}\n{machine_line(results['machine'])}", fontsize=10
    )
    return figure


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `compare`."""
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="text, in UTF-8: about 1 MB for --max-length 4096"
    )
    text = f"mechanisms to train (default: {' '.join(MECHANISMS)}, without those that have no causal (--causal) or "
    text += "bidirectional form). The table shows differences in loss from dense, or from the first mechanism if dense "
    text += "is not among them. These are the names, and what a token attends to, where K is --keys: "
    text += "; ".join(f"{name}: {mechanism.about.format(keys='K')}" for name, mechanism in ALL.items())
    parser.add_argument("--mechanisms", nargs="+", metavar="M", help=text)
    parser.add_argument("--causal", action="store_true", help="train causal language models, not masked ones")
    group = parser.add_mutually_exclusive_group()
    text = f"seconds of training for each model (default {SECONDS:g}). Evaluation takes half a minute or more per "
    text += "model in addition, less with fewer --eval-tokens; so does measuring memory, which --no-memory leaves out. "
    text += "With --threads 1 on a CPU, seconds are processor time"
    group.add_argument("--max-seconds", type=float, default=SECONDS, metavar="S", help=text)
    group.add_argument("--max-steps", type=int, metavar="N", help="training steps for each model, instead of seconds")
    add_counts(parser, COUNTS)
    text = "peak learning rates of AdamW to try; the best is kept for each mechanism (default 2e-3)"
    parser.add_argument("--learning-rates", nargs="+", type=float, default=[2e-3], metavar="R", help=text)
    text = "seeds of the initial weights and of the order of the text; every model is trained once per seed (default 0)"
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], metavar="N", help=text)
    text = "position encoding of mechanisms that support both (default rope)"
    parser.add_argument("--positions", choices=("rope", "learned"), default="rope", help=text)
    text = "a saved tokenizer to use (default: byte-level BPE, trained on the text)"
    parser.add_argument("--tokenizer", metavar="FOLDER", help=text)
    parser.add_argument("--no-memory", action="store_true", help="do not measure peak memory")
    add_device(parser)
    add_threads(parser)
    add_results(parser, "outputs/compare")


def chosen_mechanisms(wanted: list[str] | None, is_causal: bool) -> tuple[list[str], dict[str, str]]:
    """Return the mechanisms to train, the reference first, and {mechanism: why it cannot be trained}.

    Args:
        wanted: names of mechanisms; None: those of `MECHANISMS` that have the form, causal or bidirectional.

    Raises:
        InputError: a mechanism is unknown, or none has this form.
    """
    if wanted is None:
        wanted = [name for name in MECHANISMS if is_causal in ALL[name].directions]
    unknown = [name for name in wanted if name not in ALL]
    if unknown:
        raise InputError(f"--mechanisms {' '.join(unknown)}: unknown. The mechanisms are: {', '.join(ALL)}.")
    form, change = ("causal", "without") if is_causal else ("bidirectional", "with")
    names = [name for name in dict.fromkeys(wanted) if is_causal in ALL[name].directions]
    left_out = {name: f"it has no {form} form; compare it {change} --causal" for name in wanted if name not in names}
    if not names:
        raise InputError(
            f"--mechanisms {' '.join(wanted)}: none of these has a {form} form. Compare them {change} --causal."
        )
    # the sort is stable, so that only dense moves
    return sorted(names, key=lambda name: name != DENSE), left_out


def check_numbers(args: argparse.Namespace) -> None:
    """Raise InputError for a number out of range."""
    check_counts(args, [*COUNTS, *(["max_steps"] if args.max_steps is not None else [])])
    if not BLOCKS <= args.keys < args.max_length:
        raise InputError(
            f"--keys {args.keys} must be at least {BLOCKS} and below --max-length {args.max_length}: otherwise every "
            "mechanism attends to the whole text. Give fewer keys or a longer length."
        )
    for option, values in (("--max-seconds", [args.max_seconds]), ("--learning-rates", args.learning_rates)):
        for value in values:
            if not 0 < value < math.inf:
                raise InputError(f"{option} {shown(value)} must be a finite number above 0.")
    if min(args.seeds) < 0:
        raise InputError(f"--seeds {min(args.seeds)} must be at least 0.")


def main(args: argparse.Namespace) -> None:
    """Train, print the table, and write compare.json, compare.md and compare.png into `args.output`.

    Raises:
        InputError: an unknown mechanism, none that has the requested form, a number out of range, a text that is too
            short, or a tokenizer without a mask token for masked language models.
        OSError: a file or the tokenizer cannot be read.
    """
    names, left_out = chosen_mechanisms(args.mechanisms, args.causal)
    check_numbers(args)
    set_threads(args)
    device = resolve_device(args.device)
    num_held_out = max(LEAST_HELD_OUT_BLOCKS, args.eval_tokens // args.max_length)
    text = read_blocks(*(args.files, args.max_length, args.batch_size, num_held_out, args.vocab_size, args.tokenizer))
    if not args.causal and text.tokenizer.mask_token_id is None:
        raise InputError(
            f"--tokenizer {args.tokenizer} has no mask token, which masked language models need. Add --causal, or "
            "leave out --tokenizer."
        )
    make_folder(args)
    for name, reason in left_out.items():
        # before the trainings, which may take long
        print(f"Not compared: {name}, because {reason}.", file=sys.stderr)
    shape = Shape(
        *(args.max_length, args.batch_size, args.hidden_size, args.heads, args.keys, args.causal, "float32"),
        *(device.type, args.layers),
    )
    budget = Budget(args.max_steps, "steps") if args.max_steps else Budget(args.max_seconds, "seconds")
    rates, seeds = (list(dict.fromkeys(values)) for values in (args.learning_rates, args.seeds))
    of = Comparison(text, shape, args.positions, budget, rates, seeds)
    rows, failed = compare(of, names, not args.no_memory)
    settings = {
        "text": ", ".join(file.name for file in args.files[:3]) + (", …" if len(args.files) > 3 else ""),
        "files": [str(file) for file in args.files],
        "reference": rows[0]["mechanism"],
        "budget": asdict(budget),
        "learning_rates": rates,
        "seeds": seeds,
        **{name: getattr(args, name) for name in (*COUNTS, "causal", "positions", "tokenizer")},
        "processor_time": counts_processor_time(device),
    }
    results = {
        "machine": describe_machine(device),
        "settings": settings,
        "results": rows,
        "not_compared": {**left_out, **failed},
        "notes": notes_of(of, rows, settings),
    }
    publish(args, "compare", results, results_markdown(results), results_figure)
