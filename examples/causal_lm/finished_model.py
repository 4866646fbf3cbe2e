"""A trained model made fit to be used: described, loaded again in a fresh process, pushed."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from safetensors.torch import save_file
from shared.training_callbacks import BitsPerByteTrainer
from transformers import PreTrainedModel

from causal_lm.clm_report import LOCAL_MODEL
from causal_lm.clm_run import Run
from causal_lm.run_folder import command_line, public_words

DISTRIBUTED_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def describe_setup(run: Run, trainer: BitsPerByteTrainer) -> dict[str, Any]:
    """Return what the model card says about how the model was trained."""
    training, accelerator = trainer.args, trainer.args.device.type
    batch = training.train_batch_size * training.gradient_accumulation_steps * training.world_size
    device = f"the CPU, {torch.get_num_threads()} thread(s)" if accelerator == "cpu" else torch.cuda.get_device_name()
    return {
        "command": command_line(public_words(), training.world_size),
        "tokens_per_step": batch * run.blocks.block_size,
        "optimizer": (
            f"{training.optim.value}, betas ({training.adam_beta1:g}, {training.adam_beta2:g}), weight decay "
            f"{training.weight_decay:g} on matrices only, gradient norm at most {training.max_grad_norm:g}, "
            f"{training.lr_scheduler_type.value} schedule with warm-up {training.warmup_steps:g}"
        ),
        "shape": ", ".join(f"{name}={value}" for name, value in run.model.config_fields().items()),
        "device": device if training.world_size == 1 else f"{training.world_size} × {device}",
    }


def check_reload(run: Run, model: PreTrainedModel, folder: Path) -> dict[str, Any]:
    """Load `folder` in a fresh process; return how far its logits are from `model`'s, and a sample."""
    row = torch.tensor([run.blocks.validation[0]["input_ids"]])
    model.eval()
    with torch.no_grad():
        logits = model(row.to(model.device)).logits.float().cpu()
    prompt = run.data.prompt or run.blocks.tokenizer.decode(row[0, :32], skip_special_tokens=True)
    with tempfile.TemporaryDirectory() as temporary:
        reference = Path(temporary) / "reference.safetensors"
        save_file({"input_ids": row, "logits": logits}, reference)
        script = Path(__file__).with_name("reload_and_sample.py")
        environment = {name: value for name, value in os.environ.items() if name not in DISTRIBUTED_VARIABLES}
        words = [sys.executable, str(script), str(folder), str(reference), prompt]
        child = subprocess.run(words, capture_output=True, text=True, env=environment)
    if child.returncode:
        raise RuntimeError(f"{folder} does not load in a fresh process:\n{child.stderr}")
    return {"prompt": prompt, **json.loads(child.stdout.splitlines()[-1])}


def hub_name(run: Run, block: str) -> str:
    """Return the Hub repository of one block."""
    return f"{run.training.hub_model_id or run.folder.resolve().name}-{block}"


def push(run: Run, block: str) -> None:
    """Upload the finished folder of `block`, card and all, if `--push_to_hub` asks for it."""
    training = run.training
    if not training.push_to_hub:
        return
    api = HfApi(token=training.hub_token)
    repository = api.create_repo(hub_name(run, block), private=training.hub_private_repo, exist_ok=True)
    card = run.folder / block / "README.md"
    card.write_text(card.read_text().replace(LOCAL_MODEL, repository.repo_id))
    url = api.upload_folder(
        repo_id=repository.repo_id,
        folder_path=run.folder / block,
        ignore_patterns=["checkpoint-*", "lr_*", "_*"],
        revision=training.hub_revision,
        commit_message=f"{block}: end of training",
    )
    run.say(f"{block}: pushed to {url}")
