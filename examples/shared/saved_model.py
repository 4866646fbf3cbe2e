"""A trained model made fit to be used: saved with its tokenizer and card, and loaded again in a fresh process."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

CARD = """---
library_name: transformers
pipeline_tag: {pipeline_tag}
tags:
- hf_efficient_attn
- {model_type}
- generated_from_trainer
---

# {title}

{text}

## Use

```python
import hf_efficient_attn  # registers the model family
{usage}
```

## Limits

{limits}
"""


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, **card: str) -> None:
    """Write weights, config, tokenizer and a model card into `folder`.

    Args:
        card: pipeline_tag, title, text, usage (Python, `{folder}` stands for the model's name) and limits.
    """
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    usage = card.pop("usage").replace("{folder}", "path/to/this/folder")
    (folder / "README.md").write_text(CARD.format(model_type=model.config.model_type, usage=usage, **card))


def check_saved_model(
    model: PreTrainedModel, folder: Path, batch: dict[str, torch.Tensor], outputs: Sequence[str], auto_class: str
) -> dict[str, Any]:
    """Load `folder` in a fresh process; return how far its outputs are from `model`'s, and the memory of a step.

    Args:
        batch: a training batch, labels included.
        outputs: names of the model's outputs to compare.
        auto_class: name of the transformers class that is to load the folder.

    Returns:
        "reload_difference" and "training_step_peak_bytes", the latter beyond the weights.
    """
    model.eval()
    with torch.no_grad():
        computed = model(**{name: tensor.to(model.device) for name, tensor in batch.items()})
    reference = {f"output.{name}": computed[name].float().cpu() for name in outputs} | batch
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / "reference.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in reference.items()}, file)
        script = Path(__file__).with_name("reload_and_measure.py")
        words = [sys.executable, str(script), str(folder), str(file), auto_class]
        child = subprocess.run(words, capture_output=True, text=True)
    if child.returncode:
        raise RuntimeError(f"{folder} does not load in a fresh process:\n{child.stderr}")
    return json.loads(child.stdout.splitlines()[-1])
