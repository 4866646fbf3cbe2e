"""accelerate: models that do not fit into memory, spread over it and the disk, compute the same and generate."""

from pathlib import Path
from typing import Any

import pytest
import torch
from families import WRITERS
from models_cases import first_tensor, random_ids
from neighbours.saved_models import save_model
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

pytest.importorskip("accelerate")


def on_disk(model: Any) -> dict[str, str]:
    """Return a device map: every second block lies on the disk."""
    blocks = [name for name, module in model.named_modules() if type(module).__name__ in model._no_split_modules]
    placed = {name: "disk" if number % 2 else "cpu" for number, name in enumerate(blocks)}
    tensors = [
        name.rpartition(".")[0] for name, _ in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    ]
    placed |= {name: "cpu" for name in tensors if not any(f"{name}.".startswith(f"{block}.") for block in blocks)}
    return placed


@pytest.mark.parametrize("family", WRITERS)
@pytest.mark.parametrize("is_automatic", [False, True], ids=["half on disk", "auto"])
def test_half_of_the_blocks_on_disk(family: str, is_automatic: bool, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", WRITERS[family])
    auto: Any = AutoModelForSeq2SeqLM if model.config.is_encoder_decoder else AutoModelForCausalLM
    size = sum(tensor.numel() * tensor.itemsize for tensor in model.state_dict().values())
    spread = (
        {"device_map": "auto", "max_memory": {"cpu": int(size * 0.7)}}
        if is_automatic
        else {"device_map": on_disk(model)}
    )
    loaded = auto.from_pretrained(tmp_path / "model", offload_folder=tmp_path / "off", **spread).eval()
    assert "disk" in loaded.hf_device_map.values()
    ids = {"input_ids": random_ids(2, 12), "attention_mask": torch.ones(2, 12, dtype=torch.long)}
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    assert torch.equal(loaded.generate(**ids, **options), model.generate(**ids, **options))
    if model.config.is_encoder_decoder:
        ids["decoder_input_ids"] = random_ids(2, 5)
    with torch.no_grad():
        torch.testing.assert_close(first_tensor(loaded(**ids)), first_tensor(model(**ids)))
