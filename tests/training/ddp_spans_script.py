"""Train models with spans by Trainer, segment by segment.

    python ddp_spans_script.py FOLDER                         one process reads text A, then texts A and B
    torchrun --nproc_per_node 2 ddp_spans_script.py FOLDER    two processes read A and B

Writes FOLDER/{kind}-{texts}-{process}.pt: the weights, and `average_span` and `world_size` beside them.
"""

import os
import sys
from pathlib import Path

import torch
from training.span_runs import SEGMENT, build_model, build_trainer, text

import hf_efficient_attn as hea

KINDS = ("adaptive", "dynamic")
STEPS, ROWS = 6, 2
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
START = {"span_init": 0.3, "dynamic_span_bias": -1.0, "span_penalty": 1e-3}
# of a text: all rows, with a segment more than there are steps
TOKENS = ROWS * (SEGMENT * (STEPS + 1) + 1)


def train(folder: Path, kind: str, texts: str) -> None:
    """Train on the texts that `texts` names: "A" or "AB"."""
    model = build_model(span=kind, **START)
    tokens = torch.cat([text(TOKENS, seed="AB".index(name)) for name in texts])
    segments = hea.TextSegments(tokens, ROWS * len(texts), SEGMENT)
    optimizer = torch.optim.Adagrad(hea.optimizer_groups(model, 0.0), lr=0.07)
    trainer = build_trainer(
        folder,
        model,
        segments,
        optimizer,
        [hea.SpanCallback()],
        per_device_train_batch_size=segments.num_rows // WORLD,
        max_steps=STEPS,
        ddp_backend="gloo" if WORLD > 1 else None,
        # a wrapper that looked for them would hide a parameter without gradient
        ddp_find_unused_parameters=False,
    )
    trainer.train()
    last = [entry["average_span"] for entry in trainer.state.log_history if "average_span" in entry]
    about = {"average_span": torch.tensor(last), "world_size": torch.tensor(trainer.args.world_size)}
    torch.save({**model.state_dict(), **about}, folder / f"{kind}-{texts}-{RANK}.pt")


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    for kind in KINDS:
        for texts in ("AB",) if WORLD > 1 else ("A", "AB"):
            train(folder, kind, texts)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
