"""Train each block by Trainer: in one go, and by resuming halfway.

    python ddp_script.py FOLDER              one process, batches of 4
    torchrun --nproc_per_node 2 ddp_script.py FOLDER    two processes, batches of 2 each: the same global batches

Writes FOLDER/{block}-{state}.pt for state in `start`, `whole` and `resumed`, and FOLDER/report.json.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from training.tiny_models import two_blocks

import hf_efficient_attn as hea

BLOCKS = ("sas", "pre_ln")
STEPS, GLOBAL_BATCH = 6, 4
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def examples() -> list[dict[str, list[int]]]:
    """Return 24 texts whose number of labels differs, so that a mean of means over processes would be seen."""
    ids = torch.randint(0, 64, (GLOBAL_BATCH * STEPS, 16), generator=torch.Generator().manual_seed(1)).tolist()
    return [{"input_ids": row, "labels": [-100] * (i % 11) + row[i % 11 :]} for i, row in enumerate(ids)]


def build_trainer(block: str, folder: Path, seed: int) -> transformers.Trainer:
    torch.manual_seed(seed)
    model = two_blocks(block)
    # SGD, because Adam divides by the gradient's own size and so lets rounding decide where a gradient is near zero
    optimizer = torch.optim.SGD(hea.optimizer_groups(model, weight_decay=0.1), lr=0.3, momentum=0.9)
    args = transformers.TrainingArguments(
        str(folder),
        max_steps=STEPS,
        save_steps=STEPS // 2,
        per_device_train_batch_size=GLOBAL_BATCH // WORLD,
        gradient_checkpointing=True,
        max_grad_norm=1.0,
        use_cpu=True,
        ddp_backend="gloo" if WORLD > 1 else None,
        dataloader_pin_memory=False,
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    collator = transformers.default_data_collator
    return transformers.Trainer(
        model=model, args=args, train_dataset=examples(), data_collator=collator, optimizers=(optimizer, None)
    )


def train(block: str, folder: Path) -> dict[str, Any]:
    """Train without a break, then again from other weights and the checkpoint of the middle; return what was run."""
    whole = build_trainer(block, folder / block, seed=0)
    save(whole, folder / f"{block}-start.pt")
    whole.train()
    save(whole, folder / f"{block}-whole.pt")
    resumed = build_trainer(block, folder / block, seed=1)
    resumed.train(resume_from_checkpoint=str(folder / block / f"checkpoint-{STEPS // 2}"))
    save(resumed, folder / f"{block}-resumed.pt")
    return {
        "steps": [whole.state.global_step, resumed.state.global_step],
        "world_size": whole.args.world_size,
        "is_checkpointing": whole.model.is_gradient_checkpointing,
        "find_unused_parameters": getattr(whole.model_wrapped, "find_unused_parameters", None),
    }


def save(trainer: transformers.Trainer, path: Path) -> None:
    """Save the weights of the first process."""
    if trainer.is_world_process_zero():
        torch.save(trainer.model.state_dict(), path)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    report = {block: train(block, folder) for block in BLOCKS}
    if RANK == 0:
        (folder / "report.json").write_text(json.dumps(report))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
