"""Saved configs of sparsified models name an architecture that serving engines do not know.

vLLM, SGLang and others choose code of their own by `architectures`, which knows no patterns: of a LlamaForCausalLM they
would compute full attention without a word. What is written is HfEfficientAttnLlamaForCausalLM, which they refuse, and
which a loaded config keeps, since engines load configs with the code of the repository, too. Where this package is
imported, `getattr(transformers, name)`, by which `transformers serve` and others find classes, finds a class that loads
what the rest of the name says, and the classes of families.
"""

from functools import cache, wraps
from typing import Any, NoReturn

import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from hf_efficient_attn.attention.indexed.config_field import has_indexer
from hf_efficient_attn.attention.layer_patterns import FIELD
from hf_efficient_attn.errors import UnsupportedBackendError

ARCHITECTURES = "architectures"
# before the name of a class of transformers, in saved configs
PREFIX = "HfEfficientAttn"
MARK = "_finds_more"

# classes of families by their names
_families: dict[str, type] = {}


def is_in_tree(config: PreTrainedConfig) -> bool:
    """Return whether a config is of transformers itself."""
    return type(config).__module__.partition(".")[0] == transformers.__name__


def has_pattern_inside(config: PreTrainedConfig) -> bool:
    """Return whether a config, or that of one of its parts, has an `attention_pattern`, or an indexer that chooses."""
    parts = (getattr(config, name, None) for name in config.sub_configs)
    return has_own_pattern(config) or any(
        isinstance(part, PreTrainedConfig) and has_pattern_inside(part) for part in parts
    )


def has_own_pattern(config: PreTrainedConfig) -> bool:
    """Return whether a config itself has an `attention_pattern`, or an indexer that chooses."""
    return getattr(config, FIELD, None) is not None or has_indexer(config)


def stock_name(architecture: str) -> str:
    """Return the name of the class of transformers that a saved name stands for.

    >>> stock_name("HfEfficientAttnLlamaForCausalLM"), stock_name("BertModel")
    ('LlamaForCausalLM', 'BertModel')
    """
    return architecture.removeprefix(PREFIX)


def write_architectures(config: PreTrainedConfig, found: dict[str, Any]) -> None:
    """Write into a config's dict the names that sparsified models are saved under, or again the names of others."""
    names = found.get(ARCHITECTURES)
    if isinstance(names, list) and is_in_tree(config):
        prefix = PREFIX if has_pattern_inside(config) else ""
        found[ARCHITECTURES] = [f"{prefix}{stock_name(name)}" if isinstance(name, str) else name for name in names]


class Sparsified:
    """Mixin: what engines are told that find a class by the name or the code of a saved model with a pattern."""

    @classmethod
    def is_backend_compatible(cls) -> NoReturn:
        """Raise UnsupportedBackendError: an engine asks this that would replace the attention, and drop the pattern."""
        raise UnsupportedBackendError(
            "This model follows an attention_pattern. An engine with attention of its own (vLLM, SGLang) would compute "
            "full attention instead. Serve it by `transformers serve --trust-remote-code`, or take the pattern away "
            "with sparsify(model, None)."
        )

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return False


class SparsifiedArchitecture(Sparsified, PreTrainedModel):
    """A saved name, which loads the model of transformers that follows its pattern."""

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """As the class of transformers that the name stands for."""
        return getattr(transformers, stock_name(cls.__name__)).from_pretrained(*args, **with_saved_attention(kwargs))


def with_saved_attention(options: dict[str, Any]) -> dict[str, Any]:
    """Return options of `from_pretrained` that keep the saved attention where None is asked for, the default.

    Command lines pass on what they were not given; transformers would take its own default for the saved one.
    """
    return {name: value for name, value in options.items() if name != "attn_implementation" or value is not None}


@cache
def sparsified_architecture(name: str) -> type[SparsifiedArchitecture]:
    """Return the class of a saved name."""
    return type(name, (SparsifiedArchitecture,), {"__module__": __name__})


def name_architectures() -> None:
    """Let `getattr(transformers, name)` find saved names, and families; may be called again."""
    # a class, since programs may hold several modules called transformers, of which only one is in sys.modules
    module_class: Any = type(transformers)
    if getattr(module_class.__getattr__, MARK, None) is not _families:
        module_class.__getattr__ = finding_more(module_class.__getattr__)


def finding_more(find: Any) -> Any:
    """Return a module's `__getattr__` that also finds families, and saved names of the classes that it has."""

    @wraps(find)
    def found(module: Any, name: str) -> Any:
        if module.__name__ == transformers.__name__:
            if name in _families:
                return _families[name]
            if name.startswith(PREFIX) and hasattr(module, stock_name(name)):
                return sparsified_architecture(name)
        return find(module, name)

    setattr(found, MARK, _families)
    return found


def name_classes(**classes: Any) -> None:
    """Tell transformers the names of a family's classes, by which it and other libraries decide what a model is.

    `getattr(transformers, name)`, by which `transformers serve` finds `architectures`, finds them; those of a copy of
    these sources (`hub`) give way to those of the package. And the lists of names of the Auto classes have them, by
    which Trainer shifts labels that it smooths, lm-eval tells decoders from encoder-decoders, and cards get tasks.

    Args:
        classes: the classes of a family by the names of the Auto classes that load them.
    """
    name_architectures()
    for auto, each in classes.items():
        if is_of_package(each) or not is_of_package(getattr(transformers, each.__name__, None)):
            _families[each.__name__] = each
        # by model types, of which transformers imports those that it has configs of
        names = getattr(transformers, auto)._model_mapping._model_mapping
        names.setdefault(each.config_class.model_type, each.__name__)


def is_of_package(found: Any) -> bool:
    """Return whether a class is of this package, not of a copy or of others."""
    return getattr(found, "__module__", "").startswith("hf_efficient_attn.")
