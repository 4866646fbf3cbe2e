"""The stub: a module next to a saved config that imports this package, for programs that do not import it themselves.

With `trust_remote_code=True`, transformers runs it if the package is installed but not imported, as in the command
lines of lm-eval, TRL and transformers itself. If the package is not installed, transformers says "pip install
hf_efficient_attn". If it is imported, transformers knows its classes and runs no code of a repository.
"""

import re
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto

from hf_efficient_attn.hub.kept_code import SPARSIFIED
from hf_efficient_attn.integration.saving import has_pattern_inside, is_in_tree
from hf_efficient_attn.models.register import FAMILIES, auto_classes

MODULE = "modeling_hf_efficient_attn"
FILE = f"{MODULE}.py"
HEAD = '"""Import the package hf_efficient_attn, which computes this model."""\n'
# the module that the stub of a model of transformers imports its classes from
AUTO_CLASSES = "hf_efficient_attn.hub.auto_classes"
# an entry of auto_map that names a class of the stub, or of the copy of a sparsified model; the repository of the code
# may precede it, followed by "--"
ENTRY = re.compile(rf"([^-]+(-[^-]+)*--)?({MODULE}|{SPARSIFIED})\.\w+")


def stub_classes(config: PreTrainedConfig) -> dict[str, str]:
    """Return the class in the stub for each Auto class that loads a model with this config; empty if it needs no stub.

    >>> from hf_efficient_attn.models.adaptive_span import AdaptiveSpanConfig
    >>> list(stub_classes(AdaptiveSpanConfig()).items())[:2]
    [('AutoConfig', 'AdaptiveSpanConfig'), ('AutoModel', 'AdaptiveSpanModel')]
    >>> from transformers import LlamaConfig
    >>> stub_classes(LlamaConfig())
    {}
    """
    family = family_classes().get(type(config))
    if family is not None:
        return {"AutoConfig": type(config).__name__, **{name: cls.__name__ for name, cls in family.items()}}
    if is_in_tree(config) and has_pattern_inside(config):
        return {name: name for name in ("AutoConfig", *_auto_names(config))}
    return {}


def stub_text(config: PreTrainedConfig) -> str:
    """Return the source of the stub for a config that needs one."""
    module = AUTO_CLASSES if is_in_tree(config) else "hf_efficient_attn"
    names = "".join(f"    {name},\n" for name in sorted(set(stub_classes(config).values())))
    return f"{HEAD}\nfrom {module} import (\n{names})\n"


def family_classes() -> dict[type, dict[str, Any]]:
    """Return a dict from the config class of each family to its classes by the names of their Auto classes."""
    families = [auto_classes(family) for family in FAMILIES]
    return {classes["AutoModel"].config_class: classes for classes in families}


def _auto_names(config: PreTrainedConfig) -> list[str]:
    """Return the names of the Auto classes of transformers that have a class for a config, AutoModel first."""
    mappings: dict[str, Any] = {name: getattr(cls, "_model_mapping", None) for name, cls in vars(modeling_auto).items()}
    return sorted(name for name, known in mappings.items() if name.startswith("AutoModel") and type(config) in known)
