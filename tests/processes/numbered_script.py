"""Train with numbers of contexts (ETC) and of sentences (bp_seq2seq) in two processes, and in one.

    python numbered_script.py FOLDER
    torchrun --nproc_per_node 2 numbered_script.py FOLDER

Trainer trains in both, and its weights are written to FOLDER/{case}-{processes}.pt. Two processes also train by
DistributedDataParallel with activations that are computed again, and by accelerate's FSDP2; FOLDER/report.json says, by
case and way, how far the weights are from those of one process.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from families import BY_NAME
from models_cases import switch_off_dropout
from processes.data_parallel_script import train_together
from processes.sharded_script import train_with_accelerate
from processes.steps import largest_difference, train_alone, weights_of
from torch import distributed
from word_tokenizer import word_tokenizer

import hf_efficient_attn as hea

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
STEPS, GLOBAL_BATCH = 3, 4


class Numbered:
    """A case whose inputs have numbers, in pieces of unequal lengths, beside the tokens that they number."""

    def __init__(self, name: str, numbered: dict[str, str]) -> None:
        self.case, self.numbered = BY_NAME[name], numbered

    def __getattr__(self, name: str) -> Any:
        return getattr(self.case, name)

    def inputs(self, auto_class: str) -> dict[str, torch.Tensor]:
        """Return the inputs of the case, and numbers that differ between examples."""
        found = self.case.inputs(auto_class)
        for name, tokens in self.numbered.items():
            rows, count = found[tokens].shape
            found[name] = (torch.arange(count)[None] + torch.arange(rows)[:, None]) // 3
        return found


CASES = {
    "etc": Numbered("etc-base", {"long_contexts": "input_ids"}),
    "bp": Numbered("bp-seq2seq", {"sentence_ids": "input_ids", "decoder_sentence_ids": "labels"}),
}
WAYS = ("ddp", "fsdp")


def examples(case: Numbered) -> list[dict[str, list[int]]]:
    """Return texts; of those whose sentences are aligned, sources and targets of unequal lengths."""
    generator, found = torch.Generator().manual_seed(1), []
    for index in range(STEPS * GLOBAL_BATCH):
        item = {}
        for place, tokens in enumerate(("input_ids", "labels")):
            count = 16 if "long_contexts" in case.numbered else 6 + index % 3 + 2 * place
            item[tokens] = torch.randint(3, 59, (count,), generator=generator).tolist()
        # numbers of labels differ, so that a mean of means over processes would be seen
        item["labels"][: index % 4] = [-100] * (index % 4)
        for name, tokens in case.numbered.items():
            item[name] = [(token + index) // 4 for token in range(len(item[tokens]))]
        found.append(item)
    return found


def train_with_trainer(case: Numbered, folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights that Trainer reaches."""
    model = case.model(case.main_head)
    switch_off_dropout(model)
    is_aligned = "sentence_ids" in case.numbered
    args = transformers.TrainingArguments(
        str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=GLOBAL_BATCH // WORLD,
        train_sampling_strategy="sequential",
        optim="sgd",
        learning_rate=0.1,
        lr_scheduler_type="constant",
        use_cpu=True,
        ddp_backend="gloo" if WORLD > 1 else None,
        ddp_find_unused_parameters=False if WORLD > 1 else None,
        dataloader_pin_memory=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    collator = hea.AlignedSentencesCollator(word_tokenizer(61), model=model)
    transformers.Trainer(
        model,
        args,
        train_dataset=examples(case),
        data_collator=collator if is_aligned else transformers.default_data_collator,
    ).train()
    return weights_of(model)


def train_in_ways(case: Numbered, folder: Path, alone: Any = None, without: Any = None) -> dict[str, float]:
    """Return how far weights are from those of one process, by the way of training, and these from other ones.

    Args:
        alone: what one process reaches.
        without: its weights if there are no numbers.
    """
    found = {}
    for way in WAYS:
        if way == "fsdp":
            reached = weights_of(train_with_accelerate(case, folder, False))
        else:
            reached = train_together(case, case.main_head, is_checkpointed=True)
        found[way] = 0.0 if alone is None else largest_difference(alone.weights, reached)
    if alone is None:
        return found
    return {**found, "apart": alone.apart, "without": largest_difference(alone.weights, without)}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    # before the processes know each other: models that one trains alone would count as different from the others'
    alone: dict[str, tuple[Any, ...]] = {}
    if RANK == 0 and WORLD > 1:
        for name, case in CASES.items():
            with_numbers, without = (train_alone(each, case.main_head, WORLD) for each in (case, case.case))
            alone[name] = with_numbers, without.weights
    for name, case in CASES.items():
        reached = train_with_trainer(case, folder)
        if RANK == 0:
            torch.save(reached, folder / f"{name}-{WORLD}.pt")
    if WORLD > 1:
        report = {name: train_in_ways(case, folder, *alone.get(name, ())) for name, case in CASES.items()}
        if RANK == 0:
            (folder / "report.json").write_text(json.dumps(report))
        distributed.barrier()
        distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
