"""A user without the package loads models that bring their code along; a process of its own.

    python copy_client.py '{"FOLDER": "AutoModelForCausalLM", …}' ENCODER_DECODER

ENCODER_DECODER is a folder, of which encoders are loaded alone. The package cannot be imported while the models are
loaded and used, and then is; prints one line of JSON.
"""

import json
import sys
from functools import cache
from typing import Any

import torch
import transformers
from sharing.compared import output_digest
from sharing.stub_client import PACKAGE, NotInstalled
from transformers import PreTrainedConfig, dynamic_module_utils

ENCODERS = ("AutoModelForTextEncoding", "AutoModelForTokenClassification")


def used(model: Any) -> dict[str, Any]:
    """Return what a model computes, generates, and learns in a step."""
    ids = torch.arange(2, 34).view(2, 16)
    found = {"digest": output_digest(model)}
    if model.can_generate():
        found["text"] = model.generate(ids, max_new_tokens=6, min_new_tokens=6, do_sample=False).tolist()
    model.train()
    torch.manual_seed(0)
    model(input_ids=ids, labels=ids).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return {**found, "trained": output_digest(model.eval())}


def fresh(folder: str, head: str) -> Any:
    return getattr(transformers, head).from_pretrained(folder, trust_remote_code=True)


def encoded(folder: str, head: str) -> list[Any]:
    """Return what an encoder makes of a text, loaded alone."""
    model = fresh(folder, head).eval()
    with torch.no_grad():
        return model(torch.arange(2, 18)[None], output_hidden_states=True).hidden_states[-1].tolist()


def import_files(file: Any, find: Any = dynamic_module_utils.get_relative_import_files) -> list[str]:
    """Return what transformers finds at every loading, four times, and once for every path that leads to a file."""
    return list(dict.fromkeys(find(file)))


def main(folders: dict[str, str], encoder_decoder: str) -> dict[str, Any]:
    dynamic_module_utils.get_relative_import_files = cache(import_files)
    refusal = NotInstalled()
    sys.meta_path.insert(0, refusal)
    loaded, served = {}, {}
    for folder, head in folders.items():
        model = fresh(folder, head)
        loaded[folder] = {**used(model), "module": type(model).__module__.partition(".")[0]}
        # under the same name, so that transformers, which finds the same sources there, does not import them twice
        model.save_pretrained(f"again/{folder}")
        loaded[folder]["saved_again"] = output_digest(fresh(f"again/{folder}", head))
        [name] = PreTrainedConfig.get_config_dict(folder)[0]["architectures"]
        served[folder] = output_digest(getattr(transformers, name).from_pretrained(folder))
    encoders = {head: encoded(encoder_decoder, head) for head in ENCODERS}
    # one that has run, and one that has not, before the package comes
    kept = {folder: [fresh(folder, head) for _ in range(2)] for folder, head in folders.items()}
    for model, _ in kept.values():
        output_digest(model, of_a_copy=False)
    was_imported = PACKAGE in sys.modules
    sys.meta_path.remove(refusal)
    __import__(PACKAGE)
    ran = {folder: [output_digest(each) for each in models] for folder, models in kept.items()}
    found = {}
    for folder, head in folders.items():
        model = fresh(folder, head)
        found[folder] = {**used(model), "module": type(model).__module__.partition(".")[0]}
    return {
        "without": loaded,
        "served": served,
        "encoders": encoders,
        "ran": ran,
        "was_imported": was_imported,
        "with": found,
    }


if __name__ == "__main__":
    print("\n" + json.dumps(main(json.loads(sys.argv[1]), sys.argv[2])))
