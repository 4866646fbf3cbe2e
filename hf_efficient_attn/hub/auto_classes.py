"""Classes that the stubs of sparsified models import, with the names of transformers' Auto classes.

Each loads what the Auto class would load without the stub: a class of transformers itself.

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

# register the attention implementation "efficient", also if this module is a copy in a saved model
register_attention()
build_indexers()
if not __name__.startswith("hf_efficient_attn."):
    keep_code()


class LocalAuto:
    """A class that transformers finds in a repository, and that delegates to the Auto class of the same name."""

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """Undo the registration of this class with `auto_class`, which transformers 5.16 has just made.

        Otherwise all configs of the same class would load it. A class of transformers needs no code of a repository.
        """
        mapping = getattr(auto_class, "_model_mapping", None)
        registered = getattr(mapping, "_extra_content", {})
        for config in [config for config, model in registered.items() if model is cls]:
            del registered[config]

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Load what the Auto class loads, with the code of transformers."""
        options = {**with_saved_attention(kwargs), "trust_remote_code": False}
        adapter = dict(options.get("adapter_kwargs") or {})
        # the path that the user gave, if it holds an adapter: transformers replaces it by that of the base model
        path = adapter.pop("_adapter_model_path", None)
        if path is None:
            return cls._auto_class().from_pretrained(*args, **options)
        # the Auto class would search for an adapter again, and does not accept the arguments of one already found
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
    # names that only other versions of transformers have also get a class, which is never asked for here
    if not name.startswith("Auto"):
        raise AttributeError(f"module {__name__} has no attribute {name}")
    bases = (LocalAuto, Sparsified) if name.startswith("AutoModel") else (LocalAuto,)
    found = globals()[name] = type(name, bases, {"__module__": __name__})
    return found
