r"""Train language models of bytes whose heads read a fixed, an adaptive or a dynamic span, and compare them.

    pip install "hf-efficient-attn[train]"
    python examples/train_char_lm.py

needs no network and no argument. It trains three networks that are equal but for their spans on the source of the
Python standard library, segment by segment with the states of the past remembered (Sukhbaatar et al.,
arXiv:1905.07799): equal text, equal steps, and the picture shows them at equal time, too. A table compares bits per
byte of held-out text, spans, multiply-adds, speed and memory. Expect 3.58 (fixed), 2.81 (adaptive) and 2.84 (dynamic)
bits per byte and average spans of 1,024, 49 and 109 bytes (Python 3.11), in about a quarter of an hour on one core. So
early in training a span of 1,024 bytes is a burden: a fixed one of 64 reaches 2.96 by the last command below.
`outputs/train_char_lm` then holds `fixed`, `adaptive` and `dynamic` (folders that `AutoModelForCausalLM` and `pipeline`
load), results.json, results.md and curves.png. More:

    python examples/train_char_lm.py --spans fixed adaptive --span_limit 4096 --max_steps 5000
    python examples/train_char_lm.py --train_file enwik8 --config_overrides "hidden_size=256,num_hidden_layers=8"
    python examples/train_char_lm.py --optimizer adagrad --corpus python_docs --max_steps 2000
    python examples/train_char_lm.py --spans fixed --span_limit 64 --output_dir outputs/fixed_64
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from char_lm.char_lm_arguments import CharTrainingArguments, DataArguments, ModelArguments
from char_lm.char_lm_data import byte_tokenizer, load_bytes
from char_lm.char_lm_memory import peak_of_a_step
from char_lm.char_lm_report import draw_curves, model_card, results_text
from char_lm.char_lm_training import train_kind
from shared.arguments import parse_arguments
from shared.saved_model import check_saved_model, save_model
from shared.task_run import closing_words, open_run_folder, run_example, save_picture, with_overrides, write_results

import hf_efficient_attn as hea

PICTURE = "curves.png"


@dataclass(frozen=True)
class Run:
    """Everything the kinds of one run share."""

    model: ModelArguments
    data: DataArguments
    training: CharTrainingArguments
    segments: dict[str, hea.TextSegments]
    num_bytes: dict[str, int]
    folder: Path

    def config(self, kind: str) -> hea.AdaptiveSpanConfig:
        """Return the config of a kind, `--config_overrides` included."""
        return with_overrides(self.model.config(kind), self.model.config_overrides)


def main() -> None:
    """Parse, train every kind, report."""
    run = prepare_run(*parse_arguments((ModelArguments, DataArguments, CharTrainingArguments)))
    report(run, {kind: train_and_save(run, kind) for kind in run.model.spans})


def prepare_run(model: ModelArguments, data: DataArguments, training: CharTrainingArguments) -> Run:
    """Check every argument, read the text and cut it into rows."""
    folder = open_run_folder(training)
    texts = load_bytes(data)
    segments = {
        name: hea.TextSegments(
            text, training.train_batch_size if name == "train" else training.eval_batch_size, data.segment_bytes
        )
        for name, text in texts.items()
    }
    run = Run(model, data, training, segments, {name: len(text) for name, text in texts.items()}, folder)
    for kind in model.spans:
        run.config(kind)  # refused now, not after the first model is trained
    print(f"Text: {data.source}. {run.num_bytes['train']:,} bytes to train on.", flush=True)
    return run


def train_and_save(run: Run, kind: str) -> dict[str, Any]:
    """Train and test one kind, save it, and return the result with what a fresh process finds in the saved folder."""
    folder, config = run.folder / kind, run.config(kind)
    print(f"\n{kind} span", flush=True)
    model, result = train_kind(config, run.segments, run.training, folder)
    save_model(model, byte_tokenizer(config.span_limit), folder, **model_card(run.data.source, kind, result))
    input_ids = run.segments["test"][0]["input_ids"][None]
    batch = {"input_ids": input_ids, "labels": input_ids.clone()}
    reloaded = check_saved_model(model, folder, batch, ["logits"], "AutoModelForCausalLM")
    peak = peak_of_a_step(folder, run.segments["train"], run.training.optimizer, config.span_limit)
    return {**result, "reload_difference": reloaded["reload_difference"], "peak_bytes": peak}


def report(run: Run, kinds: dict[str, dict[str, Any]]) -> None:
    """Write the table and the picture, and print the closing summary."""
    sizes = {f"{name}_bytes": count for name, count in run.num_bytes.items()}
    content = {"data": {"source": run.data.source, **sizes}, "kinds": kinds}
    text = results_text(content, run.training)
    text = write_results(run.folder, "Attention spans on bytes", content, text, run.training.device)
    save_picture(draw_curves(kinds), run.folder / PICTURE)
    print(closing_words(run.folder, text, list(kinds), [PICTURE]))


if __name__ == "__main__":
    sys.exit(run_example(main))
