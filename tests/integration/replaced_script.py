"""Writes what stock models of transformers are and compute, before `import hf_efficient_attn` and behind it.

python replaced_script.py FOLDER_WITHOUT FOLDER_WITH

No optional library can be imported in between.
"""

import json
import sys
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
import transformers
from transformers import trainer_callback  # noqa: F401

OPTIONAL = ("accelerate", "datasets", "evaluate", "matplotlib", "onnx", "peft", "triton")
SIZES = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def functions_of(value: Any) -> list[FunctionType]:
    """Return the functions of a method, a property or a class method, in which those that are wrapped do not count."""
    parts = (value.fget, value.fset) if isinstance(value, property) else (getattr(value, "__func__", value),)
    return [each for each in parts if isinstance(each, FunctionType)]


def classes() -> dict[str, type]:
    """Return all classes of the modules of transformers that are imported, by name."""
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "transformers"]
    found = [each for module in modules for each in vars(module).values() if isinstance(each, type)]
    return {each.__name__: each for each in found if each.__module__.partition(".")[0] == "transformers"}


def is_ours(file: Path) -> bool:
    return "hf_efficient_attn" in file.parts


def write(folder: Path) -> None:
    names = ("PreTrainedModel", "PreTrainedConfig", "LlamaForCausalLM", "BertModel", "LlamaConfig", "BertConfig")
    attributes = {name: sorted(vars(getattr(transformers, name))) for name in names}
    outputs, instances = {}, {}
    for name in ("LlamaForCausalLM", "BertModel"):
        torch.manual_seed(0)
        model_class = getattr(transformers, name)
        model = model_class(model_class.config_class(**SIZES)).eval()
        ids = torch.arange(1, 13).view(1, 12)
        mask = torch.tensor([[1] * 9 + [0] * 3])
        outputs[name] = [model(ids)[0], model(ids, attention_mask=mask)[0]]
        model.save_pretrained(folder / name)
        loaded = model_class.from_pretrained(folder / name)
        outputs[name].append(loaded(ids)[0])
        instances[name] = [sorted(vars(each)) for each in (model, model.config, loaded, loaded.config)]
        instances[name].append([len(each._forward_pre_hooks) + len(each._forward_hooks) for each in model.modules()])
    replaced = sorted(
        f"{name}.{attribute}"
        for name, each in classes().items()
        for attribute, value in vars(each).items()
        for function in functions_of(value)
        if is_ours(Path(function.__code__.co_filename))
    )
    torch.save(outputs, folder / "outputs.pt")
    report = {"attributes": attributes, "instances": instances, "replaced": sorted(set(replaced))}
    (folder / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    with torch.no_grad():
        # the first model that is made leaves attributes in classes
        for _ in range(2):
            write(Path(sys.argv[1]))
        before = {name: sys.modules[name] for name in OPTIONAL if name in sys.modules}
        sys.modules.update(dict.fromkeys(OPTIONAL))
        import hf_efficient_attn as hea

        # which is called like a function of the package, which stays the function
        import hf_efficient_attn.integration.explain

        assert callable(hea.attention)
        assert callable(hea.explain)
        for name in OPTIONAL:
            del sys.modules[name]
        sys.modules.update(before)
        write(Path(sys.argv[2]))
