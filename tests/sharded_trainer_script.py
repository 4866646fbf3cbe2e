"""Train a model by Trainer on texts that lie on all processes, or as a whole on a single one.

    python sharded_trainer_script.py FOLDER                            one process
    torchrun --nproc_per_node 2 sharded_trainer_script.py FOLDER      two processes that share every text
    torchrun --nproc_per_node 4 sharded_trainer_script.py FOLDER      two pairs of processes with batches of their own

Writes FOLDER/{number of processes}.pt: the weights after two epochs and the losses of training and evaluation, both
also of a training that resumes in the second epoch, where there are several processes; and what is refused.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import IterableDataset

import hf_efficient_attn as hea
from hf_efficient_attn.patterns import Band, GlobalTokens

# three steps an epoch, the last one of a single batch; the checkpoint is in the second epoch
STEPS, CHECKPOINT, ROWS, TRAINED, EVALUATED, TOKENS = 6, 4, 2, 10, 4, 25
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
GROUPS = 2 if WORLD == 4 else 1


class SequenceTrainer(hea.SharedTextsMixin, transformers.Trainer):
    pass


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(examples(ROWS))


def examples(count: int) -> list[dict[str, Any]]:
    """Return texts whose number of labels differs, mostly on the second process, with a column for no model."""
    ids = torch.randint(0, 64, (count, TOKENS), generator=torch.Generator().manual_seed(1)).tolist()
    return [{"input_ids": row, "labels": [-100] * (2 * i) + row[2 * i :], "row": i} for i, row in enumerate(ids)]


def build_model(seed: int) -> Any:
    """Return a model whose texts are shared by the processes, if there are several."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": 64, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=6, num_key_value_heads=2)
    model = hea.sparsify(transformers.LlamaForCausalLM(config), Band(4, 0) | GlobalTokens([0]))
    if WORLD > 1:
        mesh = init_device_mesh("cpu", (GROUPS, WORLD // GROUPS), mesh_dim_names=("dp", "sp"))
        hea.shard_sequence(model, mesh["sp"])
    return model


def build_trainer(folder: Path, seed: int = 0, train_dataset: Any = None, **changes: Any) -> SequenceTrainer:
    """Return a Trainer of two batches a step, which evaluates as it trains."""
    args = transformers.TrainingArguments(
        str(folder / f"output-{WORLD}-{seed}"),
        **{
            "max_steps": STEPS,
            "per_device_train_batch_size": ROWS // GROUPS,
            "per_device_eval_batch_size": ROWS // GROUPS,
            "gradient_accumulation_steps": 2,
            "gradient_checkpointing": True,
            "learning_rate": 0.5,
            "optim": "sgd",
            "max_grad_norm": 1.0,
            "use_cpu": True,
            "ddp_backend": "gloo" if WORLD > 1 else None,
            "dataloader_pin_memory": False,
            "logging_steps": 1,
            "eval_strategy": "steps",
            "eval_steps": 1,
            "save_steps": CHECKPOINT,
            "report_to": "none",
            "disable_tqdm": True,
            **changes,
        },
    )
    return SequenceTrainer(
        model=build_model(seed),
        args=args,
        train_dataset=train_dataset or examples(TRAINED),
        # the last batch of one of them has fewer texts
        eval_dataset={"even": examples(EVALUATED), "uneven": examples(EVALUATED - 1)},
        data_collator=transformers.default_data_collator,
    )


def found(trainer: SequenceTrainer) -> dict[str, Any]:
    """Return what a training ends with: losses, the weights that it saved, and how many texts a step had."""
    names = ("loss", "eval_even_loss", "eval_uneven_loss")
    losses = {name: [each[name] for each in trainer.state.log_history if name in each] for name in names}
    saved = transformers.AutoModelForCausalLM.from_pretrained(f"{trainer.args.output_dir}/checkpoint-{STEPS}")
    texts = trainer.get_total_train_batch_size(trainer.args)
    return {"weights": saved.state_dict(), "losses": losses, "texts": texts}


def raised_by(function: Callable[[], Any]) -> str:
    try:
        function()
    except hea.EfficientAttentionError as error:
        return str(error)
    return "nothing"


def refused(folder: Path) -> dict[str, str]:
    """Return what is said of what processes that share texts cannot do."""
    ordered = build_trainer(folder, train_sampling_strategy="group_by_length")
    streamed = build_trainer(folder, train_dataset=Stream())
    across = init_device_mesh("cpu", (2, WORLD // 2), mesh_dim_names=("sp", "dp"))
    others = build_trainer(folder)
    hea.shard_sequence(others.model, across["sp"])
    smoothed = build_trainer(folder, label_smoothing_factor=0.25)
    measured = build_trainer(folder)
    measured.compute_loss_func = lambda outputs, labels, **options: outputs.logits.sum()
    return {
        "smoothing": raised_by(smoothed.train),
        "smoothed evaluation": raised_by(smoothed.evaluate),
        "loss": raised_by(measured.train),
        "logits": raised_by(lambda: build_trainer(folder).predict(examples(ROWS))),
        "order": raised_by(ordered.get_train_dataloader),
        "stream": raised_by(streamed.get_train_dataloader),
        "mesh": raised_by(others.get_train_dataloader),
    }


def main(folder: Path) -> None:
    """Train in one go, and by resuming with other weights."""
    torch.set_num_threads(1)
    if WORLD > 1:
        distributed.init_process_group("gloo")
    whole = build_trainer(folder)
    whole.train()
    report = {"whole": found(whole), "said": refused(folder) if WORLD > 2 else {}}
    if WORLD > 1:
        resumed = build_trainer(folder, seed=1)
        resumed.train(resume_from_checkpoint=f"{whole.args.output_dir}/checkpoint-{CHECKPOINT}")
        report["resumed"] = found(resumed)
    if RANK == 0:
        torch.save(report, folder / f"{WORLD}.pt")
    if WORLD > 1:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
