"""Classes for the stubs of sparsified models of transformers, by the names of transformers' Auto classes.

Each loads what the Auto class would load without the stub: the classes of transformers themselves.

>>> from transformers import LlamaConfig
>>> from hf_efficient_attn.hub.auto_classes import AutoModelForCausalLM
>>> type(AutoModelForCausalLM._from_config(LlamaConfig(hidden_size=8, num_attention_heads=1, intermediate_size=8)))
<class 'transformers.models.llama.modeling_llama.LlamaForCausalLM'>
"""

from typing import Any

import transformers

from hf_efficient_attn.hub.kept_code import keep_code
from hf_efficient_attn.integration.interface import register_attention
from hf_efficient_attn.integration.saving import Sparsified, with_saved_attention
from hf_efficient_attn.models.indexed.index_model import build_indexers

# "efficient" becomes an attention implementation, also where this is a copy of the module
register_attention()
build_indexers()
if not __name__.startswith("hf_efficient_attn."):
    keep_code()


class LocalAuto:
    """What transformers asks of a class that it found in a repository, answered by the Auto class of its name."""

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """Do nothing: a class of transformers needs no code of a repository to be loaded again.

        transformers 5.16 has just made it what `auto_class` loads for every such config, which is undone.
        """
        mapping = getattr(auto_class, "_model_mapping", None)
        registered = getattr(mapping, "_extra_content", {})
        for config in [config for config, model in registered.items() if model is cls]:
            del registered[config]

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """As the Auto class, with the code of transformers."""
        options = {**with_saved_attention(kwargs), "trust_remote_code": False}
        adapter = dict(options.get("adapter_kwargs") or {})
        # the name that a user has given, where that is an adapter of this model
        path = adapter.pop("_adapter_model_path", None)
        if path is None:
            return cls._auto_class().from_pretrained(*args, **options)
        # the Auto class would look for an adapter once more, and does not take what it has found
        names = {name: options.pop(name) for name in ("adapter_name",) if name in options}
        del options["adapter_kwargs"]
        found = cls._auto_class().from_pretrained(*args, **options)
        (found[0] if isinstance(found, tuple) else found).load_adapter(path, adapter_kwargs=adapter, **names)
        return found

    @classmethod
    def _from_config(cls, config: Any, **kwargs: Any) -> Any:
        return cls._auto_class().from_config(config, **{**kwargs, "trust_remote_code": False})

    @classmethod
    def _auto_class(cls) -> Any:
        return getattr(transformers, cls.__name__)


def __getattr__(name: str) -> type[LocalAuto]:
    # also for heads that only other versions of transformers know, which nobody will ask for here
    if not name.startswith("Auto"):
        raise AttributeError(f"module {__name__} has no attribute {name}")
    bases = (LocalAuto, Sparsified) if name.startswith("AutoModel") else (LocalAuto,)
    found = globals()[name] = type(name, bases, {"__module__": __name__})
    return found
