"""A user without the package, who trusts nobody, loads models in every way, and then copies; a process of its own.

    python stock_client.py '{"FOLDER": ["AutoModelForCausalLM", …], …}' '{"FOLDER": "AutoModelForCausalLM", …}'

The first also by a pipeline. What copies compute of FOLDER/inputs.pt is left in FOLDER/logits.pt. Prints one line of
JSON: what was said, by folder and way; where a model was loaded, it begins with "loaded".
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import transformers
from sharing.stub_client import PACKAGE, NotInstalled
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# of a kernel or a serving engine
OTHER = "of_others"
OPTIONS: dict[str, dict[str, Any]] = {"nothing": {}} | {
    str(name): {"attn_implementation": name} for name in (None, "sdpa", "eager", OTHER)
}


def outcomes(load: Callable[..., Any], *args: Any, **options: Any) -> str:
    """Return the error of a way to load a model."""
    try:
        return f"loaded {type(load(*args, **options)).__name__}"
    except ValueError as error:
        return str(error)


def ways(folder: str, name: str) -> dict[str, str]:
    """Return what is said to the loading of a folder by a class, and to the building of its config."""
    loading = getattr(transformers, name)
    found = {f"{name}, {given}": outcomes(loading.from_pretrained, folder, **each) for given, each in OPTIONS.items()}
    if name.startswith("Auto"):
        config = transformers.AutoConfig.from_pretrained(folder)
        found[f"{name} of the config"] = outcomes(loading.from_config, config, attn_implementation=None)
        # as the backends of vLLM and SGLang for models of transformers, where a user has named these
        config.get_text_config()._attn_implementation = OTHER
        found[f"{name} of an engine"] = outcomes(loading.from_config, config)
    return found


def main(folders: dict[str, list[str]], copies: dict[str, str]) -> dict[str, dict[str, str]]:
    ALL_ATTENTION_FUNCTIONS[OTHER] = ALL_ATTENTION_FUNCTIONS["sdpa"]
    found = {}
    for folder, names in folders.items():
        found[folder] = {way: sentence for name in names for way, sentence in ways(folder, name).items()}
    asked = {"attn_implementation": None}
    first = next(iter(folders))
    found[first]["pipeline"] = outcomes(transformers.pipeline, "text-generation", first, model_kwargs=asked)
    assert PACKAGE not in sys.modules
    sys.meta_path.insert(0, NotInstalled())
    for folder, name in copies.items():
        model = getattr(transformers, name).from_pretrained(folder, trust_remote_code=True)
        with torch.no_grad():
            torch.save(model(**torch.load(f"{folder}/inputs.pt")).logits, f"{folder}/logits.pt")
    return found


if __name__ == "__main__":
    # behind a question of transformers, which nobody has answered
    print("\n" + json.dumps(main(*map(json.loads, sys.argv[1:]))))
