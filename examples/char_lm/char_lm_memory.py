"""Peak memory of a training step while the memory of past segments is full, in a process of its own.

    PYTHONPATH=examples python -m char_lm.char_lm_memory FOLDER SEGMENTS.safetensors OPTIMIZER

FOLDER is a saved model, SEGMENTS holds `input_ids` [number of segments, rows, M] that follow each other. Printed are
the bytes beyond the weights and what is remembered.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

import hf_efficient_attn as hea
from char_lm.char_lm_arguments import OPTIMIZERS
from hf_efficient_attn.bench.harness.memory import CALLS, ENVIRONMENT, cuda_peak, resident_peak


def peak_of_a_step(folder: Path, train: hea.TextSegments, optimizer: str, span_limit: int) -> int:
    """Return the bytes, measured in a fresh process on the first segments of the training text.

    Raises:
        RuntimeError: it failed; the message ends with its error.
    """
    wanted = -(-span_limit // train.segment_tokens) + CALLS
    segments = [
        torch.stack([train[number * train.num_rows + row]["input_ids"] for row in range(train.num_rows)])
        for number in range(min(wanted, train.num_segments))
    ]
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / "segments.safetensors"
        save_file({"input_ids": torch.stack(segments)}, file)
        words = [sys.executable, "-m", "char_lm.char_lm_memory", str(folder), str(file), optimizer]
        environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(sys.path)}
        child = subprocess.run(words, capture_output=True, text=True, env=environment)
    if child.returncode:
        raise RuntimeError(f"Measuring the memory of {folder} failed:\n{child.stderr}")
    return int(child.stdout.splitlines()[-1])


def training_step(model: PreTrainedModel, segments: torch.Tensor, optimizer_name: str) -> Callable[[], None]:
    """Return a function that does a step on the next segment; all segments but the last few are read before."""
    optimizer = OPTIMIZERS[optimizer_name](hea.optimizer_groups(model, weight_decay=0.0))
    numbered = enumerate(segments)

    def read() -> torch.Tensor:
        number, input_ids = next(numbered)
        segment_index = torch.full((len(input_ids),), number, device=input_ids.device)
        return model(input_ids=input_ids, labels=input_ids, segment_index=segment_index).loss

    def step() -> None:
        read().backward()
        optimizer.step()
        optimizer.zero_grad()

    model.train()
    with torch.no_grad():
        for _ in range(len(segments) - CALLS):
            read()
    return step


def main(folder: str, segments_file: str, optimizer: str) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = AutoModelForCausalLM.from_pretrained(folder).to(device)
    step = training_step(model, load_file(segments_file)["input_ids"].to(device), optimizer)
    print(cuda_peak(step, device) if device.type == "cuda" else resident_peak(step))


if __name__ == "__main__":
    main(*sys.argv[1:])
