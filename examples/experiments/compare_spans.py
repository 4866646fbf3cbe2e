r"""Train byte-level language models whose heads have a fixed, an adaptive or a dynamic span, and compare them.

    pip install ".[train]"
    python examples/experiments/compare_spans.py

The command needs no network and no argument. It trains three models that differ only in their spans on the source of
the Python standard library, segment by segment, with the states of earlier segments remembered (Sukhbaatar et al.,
arXiv:1905.07799). All three get the same text and the same number of steps; the picture also compares them at equal
time. A table compares bits per byte of held-out text, spans, multiply-adds and speed. Expect 3.58 (fixed), 2.81
(adaptive) and 2.84 (dynamic) bits per byte and average spans of 1,024, 49 and about 100 bytes (Python 3.11), in a
quarter of an hour on one core. `outputs/compare_spans` then holds `fixed_1024`, `adaptive_1024` and `dynamic_1024`
(folders that `AutoModelForCausalLM` and `pipeline` load), results.json, results.md and a picture. To compare several
limits, as in figure 3 of the paper, or to train on your own text:

    python examples/experiments/compare_spans.py --spans fixed adaptive --span_limits 64 128 256 512 1024 \
        --max_steps 800 --output_dir outputs/limits
    python examples/experiments/compare_spans.py --spans adaptive --train_file enwik8 --max_steps 5000 \
        --hidden_size 256 --num_hidden_layers 8 --output_dir outputs/enwik8

Then see what the heads have learned: hf-efficient-attn analyze spans outputs/compare_spans/adaptive_1024
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from comparison.byte_text import byte_tokenizer, load_bytes
from comparison.option_checks import known_once
from comparison.run_folder import (
    open_run,
    reload_difference,
    results_table,
    run_experiment,
    save,
    save_picture,
    say_where,
    write_results,
)
from comparison.shape import Shape
from comparison.span_curves import add_equal_time, draw_limits, draw_span_curves
from comparison.training import BitsPerByteTrainer, share, training_arguments
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments, set_seed
from transformers.hf_argparser import HfArg

import hf_efficient_attn as hea
from hf_efficient_attn.models.spans.training import span_flops
from hf_efficient_attn.training.span_callback import span_log

KINDS = ("fixed", "adaptive", "dynamic")
NETWORKS = {"authors": hea.AdaptiveSpanConfig, "modern": hea.AdaptiveSpanConfig.modern}
BITS_OF_ONE_NAT = 1 / math.log(2)
COLUMNS = {
    "span": ("span", "{}"),
    "limit": ("limit", "{:,}"),
    "parameters": ("parameters", "{:,}"),
    "bits_per_byte": ("bits per byte", "{:.3f}"),
    "bits_per_byte_at_equal_time": ("validation, equal time", "{:.3f}"),
    "average_span": ("average span", "{:,.0f}"),
    "max_span": ("longest span", "{:,.0f}"),
    "mega_flops": ("multiply-adds/byte (M)", "{:.2f}"),
    "train_seconds": ("training (s)", "{:.0f}"),
    "train_tokens_per_second": ("trained bytes/s", "{:,.0f}"),
    "test_tokens_per_second": ("tested bytes/s", "{:,.0f}"),
}


@dataclass
class Arguments(Shape):
    """The spans, the network, the text and the training."""

    output_dir: str = HfArg(default="outputs/compare_spans", help="Folder of the run.")
    spans: list[str] = HfArg(default_factory=lambda: list(KINDS), help=f"Kinds of span, of {', '.join(KINDS)}.")
    network: str = HfArg(
        default="authors", help="authors (post-norm, relative positions) or modern (pre-norm, gated, rotary)."
    )
    span_limits: list[int] = HfArg(
        default_factory=lambda: [1024],
        help="Longest spans in bytes, for every kind; a `fixed` span is always this long.",
    )
    span_penalty: float = HfArg(default=2e-6, help="What a byte of span costs in a layer, in nats.")
    train_file: str | None = HfArg(default=None, help="A file of any bytes. Default: the standard library's source.")
    segment_bytes: int = HfArg(default=256, help="Bytes in a segment; the memory of a model is longer.")
    max_train_bytes: int = HfArg(default=8_000_000, help="Train on at most this many bytes of text.")
    max_eval_bytes: int = HfArg(default=32_768, help="Text of an evaluation during training.")
    max_test_bytes: int = HfArg(default=262_144, help="Text of the last evaluation, which is reported.")
    max_steps: int = HfArg(default=200, help="Optimizer steps of each kind.")
    batch_size: int = HfArg(default=8, help="Segments in a step.")
    learning_rate: float = HfArg(default=2e-3, help="Rate of AdamW.")
    span_learning_rate: float = HfArg(
        default=5e-3, help="Rate of the spans: a step changes them by about this share of the limit."
    )
    seed: int = HfArg(default=42, help="Seed of the weights.")
    resume: bool = HfArg(default=False, help="Continue the run in --output_dir; finished models are kept.")

    def __post_init__(self) -> None:
        self.spans = known_once("spans", self.spans, KINDS)
        self.span_limits = sorted(set(self.span_limits))
        known_once("network", [self.network], NETWORKS)

    def config(self, kind: str, limit: int) -> hea.AdaptiveSpanConfig:
        """Return the config of one model."""
        return NETWORKS[self.network](
            span=kind,
            span_limit=limit,
            span_penalty=self.span_penalty,
            vocab_size=256,
            **self.shape(),
        )


class SpansOfEvaluation(TrainerCallback):
    """Keeps the spans after each batch of an evaluation, because dynamic spans differ from text to text."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.seen.append(span_log(kwargs["model"]))

    def summary(self) -> dict[str, float]:
        """Return the average of the average spans, and the longest of all, in tokens."""
        averages = [entry["average_span"] for entry in self.seen]
        return {
            "average_span": sum(averages) / len(averages),
            "max_span": max(entry["max_span"] for entry in self.seen),
        }


def main(args: Arguments) -> None:
    """Train every kind with every limit, and report."""
    runs = {f"{kind}_{limit}": (kind, limit) for limit in args.span_limits for kind in args.spans}
    for run in runs.values():
        args.config(*run)  # refused now, not after the first model is trained
    # a segment in every row, and the byte after it
    least_bytes = args.batch_size * (args.segment_bytes + 1)
    limits = (args.max_train_bytes, args.max_eval_bytes, args.max_test_bytes)
    texts = load_bytes(args.train_file, *limits, least_bytes)
    segments = {
        name: hea.training.TextSegments(text, args.batch_size, args.segment_bytes) for name, text in texts.items()
    }
    folder = open_run(args, args.resume)
    source = Path(args.train_file).name if args.train_file else "the source of the standard library of Python"
    print(f"Text: {source}. {len(texts['train']):,} bytes to train on.", flush=True)
    models = {name: train(args, *run, segments, folder / name) for name, run in runs.items()}
    data = {"source": source, **{f"{name}_bytes": len(text) for name, text in texts.items()}}
    report(args, folder, {"data": data, "models": models})


def train(
    args: Arguments, kind: str, limit: int, segments: dict[str, hea.training.TextSegments], folder: Path
) -> dict[str, Any]:
    """Train and test one model, save it, and return the result."""
    done = folder / "result.json"
    if done.exists():
        return json.loads(done.read_text())
    print(f"\n{kind} span, at most {limit:,} bytes", flush=True)
    trainer = build_trainer(args, kind, limit, segments, folder)
    trainer.run()
    model, seconds = trainer.model, trainer.clock.seconds
    tokens = args.max_steps * args.batch_size * args.segment_bytes
    result = {
        "span": kind,
        "limit": limit,
        "parameters": model.num_parameters(),
        "num_steps": trainer.state.global_step,
        "train_tokens": tokens,
        "train_seconds": seconds,
        "train_tokens_per_second": tokens / seconds,
        **test(trainer, segments["test"]),
        "history": trainer.history("loss", "eval_bits_per_byte", "average_span", "max_span"),
    }
    text = (
        f"{result['parameters']:,} parameters, trained on {tokens:,} bytes: {result['bits_per_byte']:.3f} bits per "
        f"byte of held-out text; reads {result['average_span']:.0f} bytes back on average."
    )
    title = f"A language model of bytes, {kind} attention span (arXiv:1905.07799)"
    save(model, byte_tokenizer(limit), folder, "text-generation", title, text)
    result["reload_difference"] = reload_difference(model, folder, segments["test"][0]["input_ids"][None])
    done.write_text(json.dumps(result, indent=2) + "\n")
    return result


def build_trainer(
    args: Arguments, kind: str, limit: int, segments: dict[str, hea.training.TextSegments], folder: Path
) -> BitsPerByteTrainer:
    """Return the trainer of a new model; all start from the same weights and read the same text."""
    training = training_arguments(
        folder,
        args.seed,
        max_steps=args.max_steps,
        learning_rate=args.learning_rate,
        per_device_train_batch_size=args.batch_size,
        per_device_eval_batch_size=args.batch_size,
        warmup_steps=share(args.max_steps, 0.1),
        eval_strategy="steps",
        eval_steps=share(args.max_steps, 0.1),
        logging_steps=share(args.max_steps, 0.025),
        # each segment continues the one before
        train_sampling_strategy="sequential",
    )
    set_seed(args.seed)
    model = hea.AdaptiveSpanForCausalLM(args.config(kind, limit))
    groups = hea.optimizer_groups(model, 0.0, None if kind == "fixed" else args.span_learning_rate)
    return BitsPerByteTrainer(
        model=model,
        args=training,
        train_dataset=segments["train"],
        eval_dataset=segments["validation"],
        data_collator=hea.training.SegmentCollator(),
        optimizers=(torch.optim.AdamW(groups, lr=args.learning_rate), None),
        callbacks=[hea.training.SpanCallback()],
        bits_per_byte_of_one_nat=BITS_OF_ONE_NAT,
    )


def test(trainer: BitsPerByteTrainer, segments: hea.training.TextSegments) -> dict[str, Any]:
    """Return bits per byte of the test text, in the order of its segments and with memory, and the spans on it."""
    spans = SpansOfEvaluation()
    trainer.add_callback(spans)
    metrics = trainer.evaluate(segments, metric_key_prefix="test")
    trainer.remove_callback(spans)
    summary = spans.summary()
    return {
        "bits_per_byte": metrics["test_loss"] * BITS_OF_ONE_NAT,
        "test_tokens_per_second": metrics["test_samples_per_second"] * segments.segment_tokens,
        **summary,
        "flops_per_token": span_flops(trainer.model.config, summary["average_span"]),
    }


def report(args: Arguments, folder: Path, content: dict[str, Any]) -> None:
    """Write the table and the picture, and print the table."""
    data, models = content["data"], content["models"]
    seconds = add_equal_time(models)
    rows = [{**one, "mega_flops": one["flops_per_token"] / 1e6} for one in models.values()]
    text = f"""{results_table(COLUMNS, rows)}

Bytes of {data["source"]}: {rows[0]["train_tokens"]:,} read in {args.max_steps:,} steps, {data["test_bytes"]:,} tested \
on. All models start
from the same weights and read the same text in the same order. Equal time: bits per byte of the validation text when
the fastest model had finished, after {seconds:.0f} s. Spans are in bytes, the ramp included; the average is over layers
and heads, and over the test text, where a dynamic span changes from byte to byte. Multiply-adds are those of the
network's maps and of attention over the average span. A short training does not say how a long one ends."""
    picture = "limits.png" if len(args.span_limits) > 1 else "curves.png"
    save_picture(draw_limits(models) if len(args.span_limits) > 1 else draw_span_curves(models), folder / picture)
    print(write_results(folder, "Attention spans on bytes", content, text))
    say_where(folder, models, picture)


if __name__ == "__main__":
    run_experiment(main, Arguments, hidden_size=128, num_hidden_layers=4, num_attention_heads=4)
