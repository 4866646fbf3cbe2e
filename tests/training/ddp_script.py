"""Train each block by Trainer: in one go, by resuming halfway, and with a loss that is NaN on the last process alone.

    python ddp_script.py FOLDER              one process, batches of 4
    torchrun --nproc_per_node 2 ddp_script.py FOLDER    two processes, batches of 2 each: the same global batches

Writes FOLDER/{block}-{state}.pt for state in `start`, `whole`, `resumed` and `stopped`, and FOLDER/report.json.
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
STEPS, BAD_STEP, GLOBAL_BATCH = 6, 4, 4
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


def stop(block: str, folder: Path) -> dict[str, Any]:
    """Train with a NaN on the last process at BAD_STEP; return where each process stopped, and the checkpoints."""
    trainer = build_trainer(block, folder / f"{block}-stopped", seed=0)
    callback = hea.StopOnNonFiniteLoss()
    trainer.add_callback(callback)
    forwards = iter(range(1, 1000))

    def spoil(module: torch.nn.Module, inputs: Any, outputs: Any) -> Any:
        if next(forwards) == BAD_STEP and RANK == WORLD - 1:
            outputs["loss"] = outputs["loss"] * float("nan")
        return outputs

    trainer.model.register_forward_hook(spoil)
    trainer.train()
    save(trainer, folder / f"{block}-stopped.pt")
    own = [trainer.state.global_step, callback.reason]
    everywhere = [own] * WORLD
    if WORLD > 1:
        torch.distributed.all_gather_object(everywhere, own)
    checkpoints = sorted(path.name for path in (folder / f"{block}-stopped").glob("checkpoint-*"))
    return {"stopped": everywhere, "checkpoints": checkpoints}


def save(trainer: transformers.Trainer, path: Path) -> None:
    """Save the weights of the first process."""
    if trainer.is_world_process_zero():
        torch.save(trainer.model.state_dict(), path)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    report = {block: {**train(block, folder), **stop(block, folder)} for block in BLOCKS}
    if RANK == 0:
        (folder / "report.json").write_text(json.dumps(report))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
