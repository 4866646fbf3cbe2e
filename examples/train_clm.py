"""Train causal language models that differ only in their block, side by side, and compare them.

    pip install "hf-efficient-attn[train]"
    python examples/train_clm.py

needs no network and no argument. It trains `pre_ln` and `sas_p` at equal shape on the source of the Python standard
library, for about two minutes each on two cores, and shows held-out loss, bits per byte, parameters and tokens/s of
both. Expect 1.89 and 1.86 bits per byte (Python 3.11). In `outputs/train_clm` it leaves, for each block, a folder that
`AutoModelForCausalLM.from_pretrained` and `pipeline` load, and results.json, results.md, loss_curves.png.

Ctrl-C saves and stops; the command it prints goes on from there and ends with the same weights. More:

    python examples/train_clm.py --blocks pre_ln,parallel,v_skipinit,sas,sas_p,sas_p_no_norm --output_dir outputs/all
    python examples/train_clm.py --train_file my.txt --config_overrides "hidden_size=256,num_hidden_layers=8"
    python examples/train_clm.py --learning_rate_grid 5e-4,1e-3,2e-3     # the best rate of each block
    torchrun --nproc_per_node 8 examples/train_clm.py --dataset_name wikitext --dataset_config_name wikitext-103-raw-v1
"""

import copy
import json
import math
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from causal_lm.clm_arguments import parse_clm_arguments
from causal_lm.clm_report import closing_summary, model_card, results_table, write_results
from causal_lm.clm_run import Run, prepare_run
from causal_lm.finished_model import check_reload, describe_setup, hub_name, push
from causal_lm.loss_curves import draw_loss_curves
from causal_lm.run_folder import checkpoint_to_resume, command_line, is_finished, public_words, resume_words
from safetensors.torch import load_model
from shared.arguments import UsageError
from shared.training_callbacks import BitsPerByteTrainer, StopOnInterrupt
from transformers import PreTrainedModel, Trainer, TrainerState, set_seed
from transformers.utils import logging

import hf_efficient_attn as hea


class Interrupted(Exception):
    """Ctrl-C during training; the checkpoint is saved."""


def main() -> int:
    """Run the job; return the exit code."""
    logging.disable_progress_bar()  # of saving and loading; training keeps its own
    # the head is tied to the embedding, which a checkpoint holds; Trainer reports it missing at every load
    logging.get_logger("transformers.trainer").addFilter(lambda record: "lm_head.weight" not in record.getMessage())
    try:
        run = prepare_run(*parse_clm_arguments(sys.argv[1:]))
        results = [train_best_rate(run, block) for block in run.model.block_list()]
        if run.training.process_index == 0:
            report(run, results)
    except (UsageError, hea.EfficientAttentionError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except (Interrupted, KeyboardInterrupt):
        command = command_line(resume_words(), int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"\nInterrupted. To go on from the last checkpoint:\n\n    {command}\n", flush=True)
        return 130
    finally:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    return 0


def train_best_rate(run: Run, block: str) -> dict[str, Any]:
    """Train `block` at each of its learning rates; leave the best model in the block's folder and return its result."""
    folder = run.folder / block
    rates = run.model.rates_of(block, run.training.learning_rate)
    if len(rates) == 1:
        best = train_block(run, block, rates[0], folder)
    else:
        tried = [train_block(run, block, rate, folder / f"lr_{rate:g}") for rate in rates]
        best = min(tried, key=lambda result: (result["stopped"] is not None, result["eval_loss"]))
        run.say(f"{block}: best learning rate {best['learning_rate']:g}\n{results_table(tried)}")
        best = {**best, "tried": tried}
        if run.training.process_index == 0:
            _copy_files(folder / f"lr_{best['learning_rate']:g}", folder)
    if run.training.process_index == 0:
        (folder / "README.md").write_text(model_card(best, run.corpus))
        push(run, block)
    return best


def _copy_files(source: Path, target: Path) -> None:
    for file in source.iterdir():
        if file.is_file():
            shutil.copy2(file, target / file.name)


def train_block(run: Run, block: str, learning_rate: float, folder: Path) -> dict[str, Any]:
    """Train one model, keep its best checkpoint in `folder`, check that it reloads, and return the result."""
    result_file = folder / "result.json"
    if is_finished(run.training.resume_from_checkpoint, folder):
        run.say(f"\n{block} at learning rate {learning_rate:g}: already finished.")
        return json.loads(result_file.read_text())
    trainer, checkpoint = build_trainer(run, block, learning_rate, folder)
    parameters = trainer.model.num_parameters()
    start = f"continued from {checkpoint.name}" if checkpoint else "from the start"
    run.say(f"\n{block}: {parameters:,} parameters, learning rate {learning_rate:g}, {start}")
    stopped = train(trainer, checkpoint)
    trainer.save_model(str(folder))
    history = trainer.history()
    metrics = trainer.evaluate()
    state, seconds = trainer.state, trainer.clock.seconds
    tokens = round(state.epoch * len(run.blocks.train)) * run.blocks.block_size
    result = {
        "block": block,
        "parameters": parameters,
        "learning_rate": learning_rate,
        "eval_loss": metrics["eval_loss"],
        "perplexity": math.exp(min(metrics["eval_loss"], 700.0)),
        "bits_per_byte": metrics["eval_bits_per_byte"],
        "best_step": state.best_global_step,
        "num_steps": state.global_step,
        "train_tokens": tokens,
        "train_seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "stopped": stopped,
        "history": history,
        **describe_setup(run, trainer),
    }
    if run.training.process_index == 0:
        (folder / "history.json").write_text(json.dumps(history, indent=1) + "\n")
        result |= check_reload(run, trainer.model, folder)
        result_file.write_text(json.dumps(result, indent=2) + "\n")  # last: marks the block finished
    return result


def build_trainer(run: Run, block: str, learning_rate: float, folder: Path) -> tuple[BitsPerByteTrainer, Path | None]:
    """Return the trainer of one model and the checkpoint it is to continue from, if any."""
    arguments = copy.copy(run.training)
    arguments.output_dir, arguments.learning_rate = str(folder), learning_rate
    arguments.run_name = f"{block}, {learning_rate:g}"
    arguments.data_seed = arguments.seed if arguments.data_seed is None else arguments.data_seed
    arguments.hub_model_id = hub_name(run, block)
    arguments.push_to_hub = arguments.push_to_hub and folder.name == block  # single rates of a grid stay here

    checkpoint = checkpoint_to_resume(run.training.resume_from_checkpoint, folder)
    set_seed(arguments.seed)
    model = build_model(run, block)
    optimizer_class, options = Trainer.get_optimizer_cls_and_kwargs(arguments, model)
    optimizer = optimizer_class(hea.optimizer_groups(model, arguments.weight_decay), **options)
    trainer = BitsPerByteTrainer(
        model=model,
        args=arguments,
        train_dataset=run.blocks.train,
        eval_dataset=run.blocks.validation,
        processing_class=run.blocks.tokenizer,
        data_collator=stack_blocks,
        optimizers=(optimizer, None),
        bits_per_byte_of_one_nat=run.blocks.bits_per_byte_of_one_nat,
    )
    return trainer, checkpoint


def stack_blocks(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Return a batch; the model shifts the labels itself. Shapes: [rows, block_size]."""
    input_ids = torch.tensor([row["input_ids"] for row in rows])
    return {"input_ids": input_ids, "labels": input_ids}


def build_model(run: Run, block: str) -> PreTrainedModel:
    """Return a freshly initialised model of `block` in the run's shape."""
    tokenizer = run.blocks.tokenizer
    fields = {
        "max_position_embeddings": run.blocks.block_size,
        **run.model.config_fields(),
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    return hea.SimplifiedTransformerForCausalLM(hea.SimplifiedTransformerConfig(block=block, **fields))


def train(trainer: BitsPerByteTrainer, checkpoint: Path | None) -> str | None:
    """Train to the end, with the best weights loaded, and return why training stopped early, if it did.

    Raises:
        Interrupted: Ctrl-C came; the checkpoint of the last step is saved.
    """
    state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json")) if checkpoint else None
    if state is not None and state.global_step >= state.max_steps:
        # only what follows training is missing: Trainer would take one step more
        trainer.state = state
        trainer.clock.continue_from(state)
        load_model(trainer.model, Path(state.best_model_checkpoint or checkpoint) / "model.safetensors")
        return None
    interrupt, finite = StopOnInterrupt(), hea.StopOnNonFiniteLoss()
    trainer.add_callback(finite)
    trainer.add_callback(interrupt)
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    if interrupt.interrupted:
        raise Interrupted
    return finite.reason


def report(run: Run, results: list[dict[str, Any]]) -> None:
    """Write the tables and the picture, and print the closing summary."""
    histories = {
        result["block"]: json.loads((run.folder / result["block"] / "history.json").read_text()) for result in results
    }
    draw_loss_curves(histories, run.blocks.bits_per_byte_of_one_nat, run.folder / "loss_curves.png")
    write_results(run.folder, run.corpus, command_line(public_words(), run.training.world_size), results)
    print("\n" + closing_summary(run.folder, results))


if __name__ == "__main__":
    sys.exit(main())
