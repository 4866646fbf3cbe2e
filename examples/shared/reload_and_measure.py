"""Load a saved model as its users will, in a process of its own, and print how it compares, as JSON.

    python examples/shared/reload_and_measure.py FOLDER REFERENCE.safetensors AUTO_CLASS

REFERENCE holds a training batch and, as `output.NAME`, the outputs the training process computed for it. Printed are
their largest difference, and the peak memory of a training step on that batch in bytes, beyond the weights.
"""

import json
import sys
from collections.abc import Callable

import torch
import transformers
from safetensors.torch import load_file

import hf_efficient_attn as hea
from hf_efficient_attn.bench.harness.memory import cuda_peak, resident_peak

PREFIX = "output."


def main(folder: str, reference_file: str, auto_class: str) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    reference = {name: tensor.to(device) for name, tensor in load_file(reference_file).items()}
    batch = {name: tensor for name, tensor in reference.items() if not name.startswith(PREFIX)}
    expected = {name.removeprefix(PREFIX): tensor for name, tensor in reference.items() if name.startswith(PREFIX)}
    load = getattr(transformers, auto_class).from_pretrained
    # memory first: a process keeps its highest mark, and training changes the weights of this copy
    step = training_step(load(folder).to(device), batch)
    peak = cuda_peak(step, device) if device.type == "cuda" else resident_peak(step)
    with torch.no_grad():
        outputs = load(folder).to(device).eval()(**batch)
    difference = max((outputs[name] - tensor).abs().max().item() for name, tensor in expected.items())
    print(json.dumps({"reload_difference": difference, "training_step_peak_bytes": peak}))


def training_step(model: transformers.PreTrainedModel, batch: dict[str, torch.Tensor]) -> Callable[[], None]:
    """Return a function that does one step of AdamW on the batch."""
    model.train()
    optimizer = torch.optim.AdamW(hea.optimizer_groups(model, weight_decay=0.01))

    def step() -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    main(*sys.argv[1:])
