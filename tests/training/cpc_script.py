"""One step of plain gradient descent on two batches, which masked sentences and unlike numbers of labels have.

torchrun --nproc_per_node 2 cpc_script.py FOLDER    a batch for each process; writes FOLDER/two.pt
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from models.etc_transformer.tiny_models import build
from word_tokenizer import word_tokenizer

import hf_efficient_attn as hea


def batches() -> list[dict[str, Any]]:
    """Return two batches of unlike length, made by the collator."""
    collate = hea.SentenceMaskingCollator(word_tokenizer(61), mlm_share=0.4, cpc_share=0.3, global_token_id=5)
    torch.manual_seed(0)
    found = []
    for sentences in (4, 7):
        rows = torch.randint(50, (2, sentences, 4)).tolist()
        items = [{"text": " ".join(" ".join(f"w{word}" for word in each) + " ." for each in row)} for row in rows]
        found.append(dict(collate(items)))
    return found


def fixed_trainer(folder: Path, world: int) -> tuple[transformers.Trainer, list[dict[str, Any]]]:
    """Return a trainer of one step over both batches, of so many processes together, and the batches."""
    fixed = batches()
    model = build("AutoModelForMaskedLM", cpc_loss_weight=0.25)
    args = transformers.TrainingArguments(
        str(folder / "trainer"),
        max_steps=1,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=len(fixed) // world,
        train_sampling_strategy="sequential",
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        remove_unused_columns=False,
        use_cpu=True,
        ddp_backend="gloo" if world > 1 else None,
        dataloader_pin_memory=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(
        model,
        args,
        train_dataset=fixed,
        # an item is a batch
        data_collator=lambda items: items[0],
        optimizers=(torch.optim.SGD(model.parameters(), lr=1.0), None),
    )
    return trainer, fixed


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    trainer, _ = fixed_trainer(folder, int(os.environ["WORLD_SIZE"]))
    trainer.train()
    if trainer.is_world_process_zero():
        torch.save(trainer.model.state_dict(), folder / "two.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
