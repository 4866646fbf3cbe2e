"""Train causal language models that differ only in their block, side by side, and compare them.

    pip install ".[train]"
    python examples/experiments/compare_blocks.py

needs no network and no argument. It trains `pre_ln` and `sas_p` at equal shape on the source of the Python standard
library, for a hundred seconds each on two cores, and shows held-out loss, bits per byte, parameters and tokens/s of
both. Expect 2.05 and 2.01 bits per byte (Python 3.11). In `outputs/compare_blocks` it leaves, for each block, a folder
that `AutoModelForCausalLM.from_pretrained` and `pipeline` load, and results.json, results.md, loss_curves.png.

After Ctrl-C the same command with `--resume` goes on from the last checkpoint. More:

    python examples/experiments/compare_blocks.py --blocks pre_ln sas v_skipinit --output_dir outputs/three
    python examples/experiments/compare_blocks.py --learning_rates 1e-3 3e-3     # `sas_p` at 3e-3: 1.78 bits per byte
"""

import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
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
from transformers import Trainer, TrainingArguments, pipeline, set_seed
from transformers.hf_argparser import HfArg
from transformers.utils import logging

import hf_efficient_attn as hea

# He & Hofmann (arXiv:2311.01906, appendix D): 1e-3, and 3e-4 for V-SkipInit. SAS-P without norms has no causal rate in
# the paper; its BERT takes 2e-3 where SAS-P takes 3e-3, and the same ratio is kept here.
RATES = {"pre_ln": 1e-3, "parallel": 1e-3, "v_skipinit": 3e-4, "sas": 1e-3, "sas_p": 1e-3, "sas_p_no_norm": 6.7e-4}
COLUMNS = {
    "block": ("block", "{}"),
    "parameters": ("parameters", "{:,}"),
    "learning_rate": ("learning rate", "{:g}"),
    "eval_loss": ("held-out nats/token", "{:.4f}"),
    "bits_per_byte": ("bits per byte", "{:.4f}"),
    "train_seconds": ("training (s)", "{:.0f}"),
    "tokens_per_second": ("tokens/s", "{:,.0f}"),
}


@dataclass
class Arguments(Shape):
    """Which blocks, in which shape, trained for how long."""

    output_dir: str = HfArg(default="outputs/compare_blocks", help="Folder of the run.")
    blocks: list[str] = HfArg(
        default_factory=lambda: ["pre_ln", "sas_p"], help=f"Blocks to train, of {', '.join(RATES)}."
    )
    learning_rates: list[float] | None = HfArg(
        default=None, help="Train each block at each of these, keep the best. Default: the paper's rate of each block."
    )
    max_steps: int = HfArg(default=400, help="Optimizer steps of each model.")
    batch_size: int = HfArg(default=8, help="Blocks of tokens in a step.")
    block_size: int = HfArg(default=128, help="Tokens of a training sequence.")
    vocab_size: int = HfArg(default=4096, help="Tokens of the tokenizer, which is trained on the text.")
    max_train_bytes: int = HfArg(default=8_000_000, help="Train on at most so much text.")
    max_eval_blocks: int = HfArg(default=128, help="Evaluate on so many blocks of held-out text, evenly spaced.")
    seed: int = HfArg(default=42, help="Of weights and order.")
    resume: bool = HfArg(default=False, help="Go on with the run in --output_dir.")

    def __post_init__(self) -> None:
        self.blocks = known_once("blocks", self.blocks, RATES)


def main(args: Arguments) -> None:
    """Train every block, and report."""
    # the head is tied to the embedding, which a checkpoint holds; Trainer reports it missing at every load
    logging.get_logger("transformers.trainer").addFilter(lambda record: "lm_head.weight" not in record.getMessage())
    folder = open_run(args, args.resume)
    for block in args.blocks:
        config_of(args, block)  # refused now, not after the first model is trained
    data = prepare_token_blocks(args.max_train_bytes, args.vocab_size, args.block_size, args.max_eval_blocks)
    print("{source}: {train_tokens:,} tokens to train on.".format(**data.describe()).capitalize(), flush=True)
    try:
        results = [train_best_rate(args, data, block, folder / block) for block in args.blocks]
    except KeyboardInterrupt:
        raise SystemExit("\nInterrupted. The same command with --resume goes on from the last checkpoint.") from None
    report(args, data, folder, results)


def config_of(args: Arguments, block: str, **fields: Any) -> hea.SimplifiedTransformerConfig:
    """Return the config of a block in the run's shape."""
    return hea.SimplifiedTransformerConfig(
        block=block,
        **args.shape(),
        # reaches the same loss in half the steps of the family's sinusoids
        position_embedding_type="rope",
        max_position_embeddings=args.block_size,
        **fields,
    )


def train_best_rate(args: Arguments, data: TokenBlocks, block: str, folder: Path) -> dict[str, Any]:
    """Train a block at each of its rates, leave the best model in `folder`, and return its result."""
    rates = args.learning_rates or [RATES[block]]
    if len(rates) == 1:
        only = train(args, data, block, rates[0], folder)
        return {**only, "tried": [only]}
    tried = [train(args, data, block, rate, folder / f"lr_{rate:g}") for rate in rates]
    best = min(tried, key=lambda result: (result["stopped"] is not None, result["eval_loss"]))
    print(f"{block}: best learning rate {best['learning_rate']:g}\n{results_table(COLUMNS, tried)}", flush=True)
    for file in (folder / f"lr_{best['learning_rate']:g}").iterdir():
        if file.is_file():
            shutil.copy2(file, folder / file.name)
    return {**best, "tried": tried}


def train(args: Arguments, data: TokenBlocks, block: str, learning_rate: float, folder: Path) -> dict[str, Any]:
    """Train one model, keep its best weights in `folder`, and return the result."""
    done = folder / "result.json"
    if done.exists():
        print(f"\n{block} at learning rate {learning_rate:g} is finished.", flush=True)
        return json.loads(done.read_text())
    trainer = build_trainer(args, data, block, learning_rate, folder)
    model, last = trainer.model, hea.training.last_complete_checkpoint(folder) if args.resume else None
    # from the last step of all Trainer would take one step more: that model starts again
    last = None if last is None or last.endswith(f"checkpoint-{args.max_steps}") else last
    start = f"continued from {Path(last).name}" if last else "from the start"
    print(f"\n{block}: {model.num_parameters():,} parameters, learning rate {learning_rate:g}, {start}", flush=True)
    trainer.train(resume_from_checkpoint=last)
    history, metrics = trainer.history("loss", "eval_loss"), trainer.evaluate()
    tokens, seconds = trainer.state.global_step * args.batch_size * args.block_size, trainer.clock.seconds
    result = {
        "block": block,
        "parameters": model.num_parameters(),
        "learning_rate": learning_rate,
        "eval_loss": metrics["eval_loss"],
        "perplexity": math.exp(min(metrics["eval_loss"], 700.0)),
        "bits_per_byte": metrics["eval_bits_per_byte"],
        "best_step": trainer.state.best_global_step,
        "num_steps": trainer.state.global_step,
        "train_tokens": tokens,
        "tokens_per_step": args.batch_size * args.block_size,
        "train_seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "stopped": trainer.stopped,
        "shape": f"width {args.hidden_size}, {args.num_hidden_layers} layers, {args.num_attention_heads} heads, rotary",
        "optimizer": optimizer_words(trainer.args),
        "history": history,
    }
    text = f"{model.num_parameters():,} parameters, trained on {tokens:,} tokens of the Python standard library"
    text = f"{text}: {result['bits_per_byte']:.3f} bits per byte of held-out files."
    save(model, data.tokenizer, folder, "text-generation", f"Block `{block}` (arXiv:2311.01906)", text)
    row = torch.tensor([data.validation[0]["input_ids"]])
    result["reload_difference"] = reload_difference(model, folder, row)
    # last: marks the model finished
    done.write_text(json.dumps(result, indent=2) + "\n")
    return result


def build_trainer(
    args: Arguments, data: TokenBlocks, block: str, learning_rate: float, folder: Path
) -> BitsPerByteTrainer:
    """Return the trainer of a new model, with the paper's optimizer settings."""
    training = training_arguments(
        folder,
        args.seed,
        max_steps=args.max_steps,
        learning_rate=learning_rate,
        per_device_train_batch_size=args.batch_size,
        per_device_eval_batch_size=32,
        weight_decay=0.1,
        warmup_steps=0.05,
        eval_strategy="steps",
        eval_steps=share(args.max_steps, 0.1),
        save_strategy="steps",
        save_steps=share(args.max_steps, 0.1),
        logging_steps=share(args.max_steps, 0.02),
        save_total_limit=2,
        load_best_model_at_end=True,
        data_seed=args.seed,
    )
    set_seed(args.seed)
    end = data.tokenizer.eos_token_id
    ends = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    config = config_of(args, block, vocab_size=len(data.tokenizer), **ends)
    model = hea.SimplifiedTransformerForCausalLM(config)
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


def optimizer_words(training: TrainingArguments) -> str:
    """Return how the models are trained."""
    return (
        f"AdamW, betas ({training.adam_beta1:g}, {training.adam_beta2:g}), weight decay {training.weight_decay:g} on "
        f"matrices only, gradient norm at most {training.max_grad_norm:g}, {training.lr_scheduler_type.value} schedule "
        f"with warm-up {training.warmup_steps:g}"
    )


def stack_blocks(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Return a batch; the model shifts the labels itself. Shapes: [rows, block_size]."""
    input_ids = torch.tensor([row["input_ids"] for row in rows])
    return {"input_ids": input_ids, "labels": input_ids}


def report(args: Arguments, data: TokenBlocks, folder: Path, results: list[dict[str, Any]]) -> None:
    """Write the tables and the picture, and print what a reader wants to see last."""
    scale = data.bits_per_byte_of_one_nat
    save_picture(draw_loss_curves({one["block"]: one["history"] for one in results}, scale), folder / "loss_curves.png")
    stops = [f"{one['block']} stopped early. {one['stopped']}" for one in results if one["stopped"]]
    text = "\n\n".join([results_table(COLUMNS, results), *stops])
    best = min(results, key=lambda result: result["eval_loss"])["block"]
    content = {"corpus": data.describe(), "blocks": {one["block"]: one for one in results}}
    prompt, sample = continue_text(folder / best, data)
    lines = "\n".join(f"    {line}" for line in f"{prompt}▮{sample}".rstrip().splitlines()[:14])
    print(f"\n{best} continues a held-out file, from ▮ on:\n\n{lines}")
    print(write_results(folder, "Causal language models of the standard library", content, text))
    others = [block for block in args.blocks if block != best]
    print(
        f"Each block is a folder in {folder}. See their losses in {folder / 'loss_curves.png'}, all figures in\n"
        f"{folder / 'results.json'}. Use a model as any of Transformers, after `import hf_efficient_attn`:\n\n"
        f'    pipeline("text-generation", model="{folder / best}")("def main(", max_new_tokens=50)\n\n'
        f"Look inside one, or compare how deep signals travel:\n\n"
        f"    hf-efficient-attn analyze signal --model {' '.join(str(folder / block) for block in [best, *others])}\n\n"
        "Other examples, from long documents to translation, are beside this one: examples/run_*.py."
    )


def continue_text(folder: Path, data: TokenBlocks) -> tuple[str, str]:
    """Return the start of a held-out block and what the saved model makes of it."""
    prompt = data.tokenizer.decode(data.validation[0]["input_ids"][:32], skip_special_tokens=True)
    set_seed(0)
    generate = pipeline("text-generation", model=str(folder))
    options = {"max_new_tokens": 64, "do_sample": True, "temperature": 0.7, "top_k": 50, "return_full_text": False}
    return prompt, generate(prompt, **options)[0]["generated_text"]


if __name__ == "__main__":
    run_experiment(main, Arguments, hidden_size=192, num_hidden_layers=6, num_attention_heads=6)
