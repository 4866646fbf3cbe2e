"""Train a model by Trainer on texts that lie on all processes, or as a whole on a single one.

    python sharded_trainer_script.py FOLDER                            one process
    torchrun --nproc_per_node 2 sharded_trainer_script.py FOLDER      two processes that share every text

Writes FOLDER/{number of processes}.pt: the weights after a few steps and the losses of training and evaluation.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

import hf_efficient_attn as hea
from hf_efficient_attn.patterns import Band, GlobalTokens

STEPS, ROWS, TOKENS = 3, 2, 25
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class SequenceTrainer(transformers.Trainer):
    """Gives every process the same batches, as `hea.shard_sequence` shows."""

    def get_train_dataloader(self) -> Any:
        order = torch.Generator().manual_seed(self.args.data_seed or self.args.seed)
        options = {"batch_size": self._train_batch_size, "collate_fn": self.data_collator}
        return DataLoader(self.train_dataset, shuffle=True, generator=order, **options)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return DataLoader(self.train_dataset, batch_size=self.args.eval_batch_size, collate_fn=self.data_collator)


def examples() -> list[dict[str, list[int]]]:
    """Return texts whose number of labels differs, mostly on the second process."""
    ids = torch.randint(0, 64, (2 * ROWS * STEPS, TOKENS), generator=torch.Generator().manual_seed(1)).tolist()
    return [{"input_ids": row, "labels": [-100] * (2 * i) + row[2 * i :]} for i, row in enumerate(ids)]


def main(folder: Path) -> None:
    """Train, with two batches a step, and evaluate."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=6, num_key_value_heads=2)
    model = hea.sparsify(transformers.LlamaForCausalLM(config), Band(4, 0) | GlobalTokens([0]))
    args = transformers.TrainingArguments(
        str(folder / f"output-{WORLD}"),
        max_steps=STEPS,
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        learning_rate=0.5,
        optim="sgd",
        max_grad_norm=1.0,
        use_cpu=True,
        ddp_backend="gloo" if WORLD > 1 else None,
        prediction_loss_only=True,
        dataloader_pin_memory=False,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
    )
    if WORLD > 1:
        hea.shard_sequence(model, init_device_mesh("cpu", (WORLD,)))
    collator = transformers.default_data_collator
    trainer = SequenceTrainer(model=model, args=args, train_dataset=examples(), data_collator=collator)
    trainer.train()
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    losses.append(trainer.evaluate()["eval_loss"])
    if RANK == 0:
        trainer.save_model()
        saved = transformers.AutoModelForCausalLM.from_pretrained(args.output_dir)
        weights = saved.state_dict()
        torch.save({"weights": weights, "losses": losses}, folder / f"{WORLD}.pt")
    if WORLD > 1:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
