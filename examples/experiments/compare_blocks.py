r"""Train language models that differ only in their block, side by side: GPT-2, Pre-LN and SAS-P.

    pip install ".[train]"
    python examples/experiments/compare_blocks.py

The command needs no network and no argument. It trains transformers' own GPT-2, this package's `pre_ln` and its `sas_p`
on the source of the Python standard library, each for about a minute on two cores, with the same text, width, depth,
positions (learned), activation, batches and schedule. Each has the learning rate that was best for it in
`model_cards/results/compare_blocks.json`. The last screen says which has the lowest held-out loss, by how much, and how
much the seed alone changed in that search. In `outputs/compare_blocks` it leaves, for each model, a folder that
`AutoModelForCausalLM.from_pretrained` and `pipeline` load, and results.json, results.md, loss_curves.png.

After Ctrl-C the same command with `--resume` continues from the last checkpoint. With other models and other fields of
their config; with your own text and two models of equal size; to search for the learning rates:

    python examples/experiments/compare_blocks.py --models pre_ln "pre_ln,position_embedding_type=rope"
    python examples/experiments/compare_blocks.py --models gpt2 sas_p --equal_sizes --train_file my.txt \
        --learning_rates 1e-3 2e-3 4e-3 8e-3
    python examples/experiments/compare_blocks.py --learning_rates 1e-3 2e-3 4e-3 8e-3 --seeds 1 2 3
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from comparison.loss_curves import draw_loss_curves
from comparison.option_checks import known_once
from comparison.run_folder import (
    open_run,
    reload_difference,
    results_table,
    run_experiment,
    save,
    save_picture,
    write_results,
)
from comparison.shape import Shape
from comparison.token_blocks import TokenBlocks, prepare_token_blocks
from comparison.training import BitsPerByteTrainer, share, training_arguments
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedConfig, Trainer, pipeline, set_seed
from transformers.hf_argparser import HfArg
from transformers.utils import logging

import hf_efficient_attn as hea
from hf_efficient_attn.bench.report import markdown_table

SEARCH = Path(__file__).parents[2] / "model_cards" / "results" / "compare_blocks.json"
# the rate for blocks that the search has not tried: He & Hofmann (arXiv:2311.01906), appendix D
PAPER_RATE = 1e-3
# models count as equally large if their numbers of weights differ by at most this share
EQUAL_SIZE = 0.01
# trainings of equal models with other seeds have differed by 0.02 bits per byte (model_cards/simplified_transformer.md)
CHANCE = 0.03
# steps of a training after which the order of models counts
ENOUGH_STEPS = 400
# a text that is read more often is repeated
MOST_REPEATS = 1.5
MODELS = ("gpt2", *hea.SimplifiedTransformerConfig.blocks)
COLUMNS = {
    "model": ("model", "{}"),
    "parameters": ("parameters", "{:,}"),
    "learning_rate": ("learning rate", "{:g}"),
    "seed": ("seed", "{}"),
    "eval_loss": ("held-out nats/token", "{:.4f}"),
    "bits_per_byte": ("bits per byte", "{:.4f}"),
    "train_seconds": ("training (s)", "{:.0f}"),
    "tokens_per_second": ("tokens/s", "{:,.0f}"),
}


@dataclass
class Arguments(Shape):
    """The models, their shape and their training."""

    output_dir: str = HfArg(default="outputs/compare_blocks", help="Folder of the run.")
    models: list[str] = HfArg(
        default_factory=lambda: ["gpt2", "pre_ln", "sas_p"],
        help=f"Models to train, of {', '.join(MODELS)}. Fields of the config follow a name: sas,norm_type=layernorm.",
    )
    learning_rates: list[float] | None = HfArg(
        default=None, help="Train each model at each of these. Default: the rate that was best for it in the search."
    )
    seeds: list[int] = HfArg(
        default_factory=lambda: [42], help="Seeds of weights and order: each model is trained with each."
    )
    equal_sizes: bool = HfArg(
        default=False, help="Change the width of the MLPs so that all models have as many weights as the first."
    )
    train_file: str | None = HfArg(
        default=None, help="Your text; its last tenth is held out. Default: the standard library's source."
    )
    max_steps: int = HfArg(default=400, help="Optimizer steps of each model.")
    batch_size: int = HfArg(default=8, help="Blocks of tokens in a step.")
    block_size: int = HfArg(default=128, help="Tokens of a training sequence.")
    vocab_size: int = HfArg(default=4096, help="Tokens of the tokenizer, which is trained on the text.")
    max_train_bytes: int = HfArg(default=8_000_000, help="Train on at most this many bytes of text.")
    max_eval_blocks: int = HfArg(default=128, help="Evaluate on this many blocks of held-out text, evenly spaced.")
    resume: bool = HfArg(default=False, help="Continue the run in --output_dir.")

    def __post_init__(self) -> None:
        known_once("models", [model.split(",")[0] for model in self.models], MODELS)
        self.models = list(dict.fromkeys(self.models))


def main(args: Arguments) -> None:
    """Train every model, and report."""
    # Trainer reports the head as missing at every load, because a checkpoint holds only the tied embedding
    logging.get_logger("transformers.trainer").addFilter(lambda record: "lm_head.weight" not in record.getMessage())
    for model in args.models:
        config_of(args, model)  # refused now, not after the first model is trained
    data = prepare_token_blocks(
        args.train_file, args.max_train_bytes, args.vocab_size, args.block_size, args.max_eval_blocks
    )
    if args.equal_sizes:
        args.models = with_equal_sizes(args, len(data.tokenizer))
    folder = open_run(args, args.resume)
    print("Text: {source}, {train_tokens:,} tokens to train on.".format(**data.describe()), end=" ")
    print(f"Each model reads it {repeats_of(args, data):.1f} times.", flush=True)
    try:
        results = [train_model(args, data, model, folder / model) for model in args.models]
    except KeyboardInterrupt:
        raise SystemExit("\nInterrupted. The same command with --resume goes on from the last checkpoint.") from None
    report(args, data, folder, results)


def config_of(args: Arguments, model: str, **fields: Any) -> PreTrainedConfig:
    """Return the config of a model in the run's shape: GPT-2's has other names for the same fields."""
    name, *given = model.split(",")
    for field, value in (each.split("=") for each in given):
        try:
            fields[field] = json.loads(value)
        except json.JSONDecodeError:
            fields[field] = value
    if name == "gpt2":
        # the other models have no dropout either
        none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        shape = {"n_embd": args.hidden_size, "n_layer": args.num_hidden_layers, "n_head": args.num_attention_heads}
        return GPT2Config(n_positions=args.block_size, **{**none, **shape, **fields})
    like_gpt2 = {"position_embedding_type": "learned", "hidden_act": "gelu_new"}
    shape = {**args.shape(), "max_position_embeddings": args.block_size}
    return hea.SimplifiedTransformerConfig(block=name, **{**like_gpt2, **shape, **fields})


def repeats_of(args: Arguments, data: TokenBlocks) -> float:
    """Return how many times a training reads the text."""
    return args.max_steps * args.batch_size * args.block_size / data.describe()["train_tokens"]


def with_equal_sizes(args: Arguments, vocab_size: int) -> list[str]:
    """Return the models, with MLPs of a width that gives each as many weights as the first has."""

    def weights(model: str) -> int:
        config = config_of(args, model, vocab_size=vocab_size, bos_token_id=0, eos_token_id=0)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config).num_parameters()

    found = args.models[:1]
    for model in args.models[1:]:
        field = "n_inner" if model.split(",")[0] == "gpt2" else "intermediate_size"
        # the number of weights is a linear function of the width
        narrow, wide = args.hidden_size, 2 * args.hidden_size
        fewest, most = (weights(f"{model},{field}={width}") for width in (narrow, wide))
        width = narrow + (weights(found[0]) - fewest) * (wide - narrow) / (most - fewest)
        found.append(f"{model},{field}={max(1, round(width))}")
    return found


def train_model(args: Arguments, data: TokenBlocks, model: str, folder: Path) -> dict[str, Any]:
    """Train a model at each of its rates with each seed, leave the best in `folder`, and return its result."""
    rates = args.learning_rates or [best_rate(model)]
    trials = [(rate, seed) for rate in rates for seed in args.seeds]
    if len(trials) == 1:
        only = train(args, data, model, *trials[0], folder)
        return {**only, "tried": [only]}
    places = {trial: folder / "lr_{:g}_seed_{}".format(*trial) for trial in trials}
    tried = [train(args, data, model, *trial, place) for trial, place in places.items()]
    of_rate = bits_by_rate(tried)
    diverged = {one["learning_rate"] for one in tried if one["stopped"]}
    best = min(
        tried,
        key=lambda one: (one["learning_rate"] in diverged, mean(of_rate[one["learning_rate"]]), one["eval_loss"]),
    )
    print(f"{model}:\n{results_table(COLUMNS, tried)}", flush=True)
    for file in places[best["learning_rate"], best["seed"]].iterdir():
        if file.is_file():
            shutil.copy2(file, folder / file.name)
    return {**best, "tried": tried}


def read_search() -> dict[str, Any]:
    """Return the committed search for learning rates."""
    return json.loads(SEARCH.read_text()) if SEARCH.exists() else {"size": None, "models": {}}


def bits_by_rate(tried: list[dict[str, Any]]) -> dict[float, list[float]]:
    """Return the bits per byte that a model reached in trainings, by learning rate: one for each seed."""
    found: dict[float, list[float]] = {}
    for trial in tried:
        found.setdefault(trial["learning_rate"], []).append(trial["bits_per_byte"])
    return found


def best_rate(model: str) -> float:
    """Return the learning rate that was best for a model, over the seeds of the search."""
    of_rate = bits_by_rate(read_search()["models"].get(model.split(",")[0], {}).get("tried", []))
    return min(of_rate, key=lambda rate: mean(of_rate[rate]), default=PAPER_RATE)


def size_of(args: Arguments) -> dict[str, int]:
    """Return the arguments on which the best learning rate depends."""
    names = ("max_steps", "batch_size", "block_size", "vocab_size", "max_train_bytes")
    return {**args.shape(), **{name: getattr(args, name) for name in names}}


def train(
    args: Arguments, data: TokenBlocks, model_name: str, learning_rate: float, seed: int, folder: Path
) -> dict[str, Any]:
    """Train one model, keep its best weights in `folder`, and return the result."""
    done = folder / "result.json"
    if done.exists():
        print(f"\n{model_name} at learning rate {learning_rate:g}, seed {seed}, is finished.", flush=True)
        return json.loads(done.read_text())
    trainer = build_trainer(args, data, model_name, learning_rate, seed, folder)
    model, last = trainer.model, hea.training.last_complete_checkpoint(folder) if args.resume else None
    # resumed from its very last step, Trainer would take one more step, so this model starts again
    last = None if last is None or last.endswith(f"checkpoint-{args.max_steps}") else last
    start = f"continued from {Path(last).name}" if last else f"seed {seed}"
    print(
        f"\n{model_name}: {model.num_parameters():,} parameters, learning rate {learning_rate:g}, {start}", flush=True
    )
    trainer.train(resume_from_checkpoint=last)
    history, metrics = trainer.history("loss", "eval_loss"), trainer.evaluate()
    tokens, seconds = trainer.state.global_step * args.batch_size * args.block_size, trainer.clock.seconds
    result = {
        "model": model_name,
        "parameters": model.num_parameters(),
        "learning_rate": learning_rate,
        "seed": seed,
        "eval_loss": metrics["eval_loss"],
        "bits_per_byte": metrics["eval_bits_per_byte"],
        "best_step": trainer.state.best_global_step,
        "num_steps": trainer.state.global_step,
        "train_tokens": tokens,
        "train_seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "stopped": trainer.stopped,
        "history": history,
    }
    text = f"{model.num_parameters():,} parameters, trained on {tokens:,} tokens of {data.source}"
    text = f"{text}: {result['bits_per_byte']:.3f} bits per byte of held-out files."
    save(model, data.tokenizer, folder, "text-generation", model_name, text)
    row = torch.tensor([data.validation[0]["input_ids"]])
    result["reload_difference"] = reload_difference(model, folder, row)
    # written last, because it marks the model as finished
    done.write_text(json.dumps(result, indent=2) + "\n")
    return result


def build_trainer(
    args: Arguments, data: TokenBlocks, model_name: str, learning_rate: float, seed: int, folder: Path
) -> BitsPerByteTrainer:
    """Return the trainer of a new model: AdamW, weight decay 0.1 on matrices only, warm-up, then decay to 0."""
    training = training_arguments(
        folder,
        seed,
        max_steps=args.max_steps,
        learning_rate=learning_rate,
        per_device_train_batch_size=args.batch_size,
        per_device_eval_batch_size=32,
        weight_decay=0.1,
        warmup_steps=0.1,
        eval_strategy="steps",
        eval_steps=share(args.max_steps, 0.1),
        save_strategy="steps",
        save_steps=share(args.max_steps, 0.1),
        logging_steps=share(args.max_steps, 0.02),
        save_total_limit=2,
        load_best_model_at_end=True,
        data_seed=seed,
    )
    set_seed(seed)
    end = data.tokenizer.eos_token_id
    ends = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    model = AutoModelForCausalLM.from_config(config_of(args, model_name, vocab_size=len(data.tokenizer), **ends))
    optimizer_class, options = Trainer.get_optimizer_cls_and_kwargs(training, model)
    optimizer = optimizer_class(hea.optimizer_groups(model, training.weight_decay), **options)
    return BitsPerByteTrainer(
        model=model,
        args=training,
        train_dataset=data.train,
        eval_dataset=data.validation,
        data_collator=stack_blocks,
        optimizers=(optimizer, None),
        bits_per_byte_of_one_nat=data.bits_per_byte_of_one_nat,
    )


def stack_blocks(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Return a batch; the model shifts the labels itself. Shapes: [rows, block_size]."""
    input_ids = torch.tensor([row["input_ids"] for row in rows])
    return {"input_ids": input_ids, "labels": input_ids}


def report(args: Arguments, data: TokenBlocks, folder: Path, results: list[dict[str, Any]]) -> None:
    """Write the tables and the picture, and print the tables, a sample and where the models are."""
    scale = data.bits_per_byte_of_one_nat
    save_picture(draw_loss_curves({one["model"]: one["history"] for one in results}, scale), folder / "loss_curves.png")
    stops = [
        f"{one['model']} at learning rate {one['learning_rate']:g}, seed {one['seed']}, stopped early. {one['stopped']}"
        for one in (trial for result in results for trial in result["tried"])
        if one["stopped"]
    ]
    tables = [results_table(COLUMNS, results)]
    if any(len(one["tried"]) > 1 for one in results):
        tables = [rates_table(results), "The best seed of each model at its best rate:", *tables]
    text = "\n\n".join([*tables, verdict(args, data.describe(), results), *stops])
    if repeats_of(args, data) > MOST_REPEATS:
        text += (
            f"\n\nEach model has read the text {repeats_of(args, data):.1f} times: give more text to compare fairly."
        )
    best = min(results, key=lambda result: result["eval_loss"])["model"]
    content = {"corpus": data.describe(), "size": size_of(args), "models": {one["model"]: one for one in results}}
    prompt, sample = continue_text(folder / best, data)
    lines = "\n".join(f"    {line}" for line in f"{prompt}▮{sample}".rstrip().splitlines()[:14])
    print(f"\n{best} continues a held-out file, from ▮ on:\n\n{lines}")
    print(write_results(folder, f"Causal language models of {data.source}", content, text))
    print(
        f"Each model is a folder in {folder}. See their losses in {folder / 'loss_curves.png'}, all figures in\n"
        f"{folder / 'results.json'}. Use a model like any other of Transformers, after `import hf_efficient_attn`:\n\n"
        f'    pipeline("text-generation", model="{folder / best}")("def main(", max_new_tokens=50)\n\n'
        "Other examples, from long documents to translation, are in examples/run_*.py."
    )


def rates_table(results: list[dict[str, Any]]) -> str:
    """Return the bits per byte of models by learning rate: the mean over seeds, the lowest and the highest."""
    of_models = {one["model"]: bits_by_rate(one["tried"]) for one in results}
    rates = sorted({rate for of_rate in of_models.values() for rate in of_rate})
    rows = [
        [
            name,
            *(
                f"{mean(of[rate]):.3f}" + f" ({min(of[rate]):.3f} to {max(of[rate]):.3f})" * (len(of[rate]) > 1)
                if rate in of
                else "–"
                for rate in rates
            ),
        ]
        for name, of in of_models.items()
    ]
    return markdown_table(["bits per byte: mean (range over seeds)", *(f"rate {rate:g}" for rate in rates)], rows)


def verdict(args: Arguments, corpus: dict[str, Any], results: list[dict[str, Any]]) -> str:
    """Return which model has the lowest loss, by how much, whether several seeds agree, and what is not fair.

    The seeds are from this run, or from the search if it had the same text and sizes.
    """
    search, has_seeds = read_search(), len(args.seeds) > 1
    tried = {one["model"]: one["tried"] for one in results}
    from_search = not has_seeds and search["size"] == size_of(args) and search["corpus"] == corpus
    if from_search:
        tried = {name: search["models"].get(name, {}).get("tried", []) for name in tried}
    found = {one["model"]: bits_by_rate(tried[one["model"]]).get(one["learning_rate"], []) for one in results}
    values = {one["model"]: mean(found[one["model"]]) if has_seeds else one["bits_per_byte"] for one in results}
    lowest, *others = sorted(values, key=lambda name: values[name])
    if not others:
        return ""
    behind = ", ".join(f"{name} {values[name] - values[lowest]:.3f}" for name in others)
    lines = [f"Lowest {'mean ' * has_seeds}loss: {lowest}. Bits per byte above it: {behind}."]
    if min(map(len, found.values())) > 1:
        best = min(found, key=lambda name: mean(found[name]))
        ranges = ", ".join(f"{name} {min(of):.3f} to {max(of):.3f}" for name, of in found.items())
        worse = [
            name for name, of in found.items() if min(of) > max(found[best]) and mean(of) - mean(found[best]) > CHANCE
        ]
        close = [name for name in found if name not in (best, *worse)]
        said = [f"{best} is ahead of {' and '.join(worse)} with every seed"] if worse else []
        said += [f"the seeds do not tell {best} and {' and '.join(close)} apart"] if close else []
        where = f"In the search that chose the rates, {len(found[best])} seeds" if from_search else "The seeds"
        there = "There" if from_search else "So"
        lines += [f"{where} reached, in bits per byte: {ranges}.", f"{there}, {'; '.join(said)}."]
        if best != lowest:
            lines.append(f"This training disagrees, since {lowest} won: the seed decides between {lowest} and {best}.")
    else:
        missing = ["--seeds"] if args.learning_rates else ["--learning_rates", "--seeds"]
        lines.append(f"One seed can be chance. To compare fairly, give several {' and '.join(missing)}.")
    unsearched = [one["model"] for one in results if one["model"].split(",")[0] not in search["models"]]
    if unsearched and not args.learning_rates:
        lines.append(
            f"No rate was searched for {' and '.join(unsearched)}, which trained at {PAPER_RATE:g}: give several "
            "--learning_rates."
        )
    if len(results[0]["tried"]) > 1:
        lines.append(
            "Rates, seeds and checkpoints are chosen on the held-out text that is shown, for all models alike."
        )
    smallest, largest = (pick(results, key=lambda one: one["parameters"]) for pick in (min, max))
    more = largest["parameters"] / smallest["parameters"] - 1
    if more > EQUAL_SIZE:
        lines.append(f"The sizes differ: {largest['model']} has {more:.0%} more weights than {smallest['model']}.")
    if at_ends := [one["model"] for one in results if is_at_an_end(one)]:
        lines.append(
            f"The best rate of {' and '.join(at_ends)} is the lowest or highest one tried: try more rates there."
        )
    if args.max_steps < ENOUGH_STEPS:
        lines.append(f"After {args.max_steps} steps the order may still change: train longer.")
    return "\n".join(lines)


def is_at_an_end(result: dict[str, Any]) -> bool:
    """Return whether the best of several learning rates is the lowest or the highest of them."""
    rates = {trial["learning_rate"] for trial in result["tried"]}
    return len(rates) > 1 and result["learning_rate"] in (min(rates), max(rates))


def continue_text(folder: Path, data: TokenBlocks) -> tuple[str, str]:
    """Return the start of a held-out block and its continuation by the saved model."""
    block = data.validation[0]["input_ids"]
    prompt = data.tokenizer.decode(block[: len(block) // 4], skip_special_tokens=True)
    set_seed(0)
    generate = pipeline("text-generation", model=str(folder))
    options = {
        "max_new_tokens": len(block) // 2,
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 50,
        "return_full_text": False,
    }
    return prompt, generate(prompt, **options)[0]["generated_text"]


if __name__ == "__main__":
    run_experiment(main, Arguments, hidden_size=128, num_hidden_layers=6, num_attention_heads=4)
