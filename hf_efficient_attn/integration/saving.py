"""Saved configs of sparsified models: the architecture and the attention implementation that they name.

vLLM, SGLang and others choose code of their own by `architectures`, which knows no patterns: of a LlamaForCausalLM they
would compute full attention without a word. What is written is HfEfficientAttnLlamaForCausalLM, which they refuse, and
which a loaded config keeps, since engines load configs with the code of the repository, too. Where this package is
imported, `getattr(transformers, name)`, by which `transformers serve` and others find classes, finds a class that loads
what the rest of the name says, and the classes of families.
"""

import functools
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, NoReturn

import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from hf_efficient_attn.errors import UnsupportedBackendError
from hf_efficient_attn.integration.layer_patterns import FIELD, NAME
from hf_efficient_attn.integration.names import has_indexer

ARCHITECTURES = "architectures"
# before the name of a class of transformers, in saved configs
PREFIX = "HfEfficientAttn"
ARCHITECTURES_MARK = "_finds_more"

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
            "full attention instead. Serve it with `transformers serve --trust-remote-code`, or remove the pattern "
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
    if getattr(module_class.__getattr__, ARCHITECTURES_MARK, None) is not _families:
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

    setattr(found, ARCHITECTURES_MARK, _families)
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


# Saved configs say that a model with a pattern or an indexer runs on "efficient".
#
# transformers reads `attn_implementation` from config.json, removes it from the config and never writes it again.
# Without it, a model that is saved again (in another dtype, with merged adapters, with more embeddings, ...) would be
# loaded with its pattern ignored. What is written is the name of this package, which transformers shows where it is
# not imported: `Specified attn_implementation="hf_efficient_attn" is not supported`. Configs read it as "efficient".
# Where parts of a model have patterns, its config has the name for these.
#
# Whoever passes `attn_implementation`, be it None as the command lines of TRL do, overrides what is saved. So the name
# is written as `experts_implementation`, too, which transformers checks of every model, with experts or without, and
# which nobody passes but with experts: where this package is not imported, the model is refused by the same words.
# Configs read it as nothing said. Serving engines with code of their own, which ignore both, are told by the name of
# the architecture.
#
# Three methods of transformers are replaced, since no other code sees every config that is saved or read.


# in saved configs
SAVED_IMPLEMENTATION = "attn_implementation"
SAVED_EXPERTS = "experts_implementation"
SAVED_NAME = "hf_efficient_attn"
# beside the name, what else a config says of experts, where transformers looks for names of parts
OWN = "own"
# the properties of configs that read them
PROPERTY = "_attn_implementation"
EXPERTS = "_experts_implementation"
IMPLEMENTATION_MARK = "_writes_names"


def write_implementations() -> None:
    """Make `to_dict` of all configs write the names with an `attention_pattern`; may be called again."""
    if not getattr(PreTrainedConfig.to_dict, IMPLEMENTATION_MARK, False):
        PreTrainedConfig.to_dict = with_names(PreTrainedConfig.to_dict)  # type: ignore[method-assign]
        setattr(PreTrainedConfig, PROPERTY, reading_saved_name(getattr(PreTrainedConfig, PROPERTY)))
        setattr(PreTrainedConfig, EXPERTS, reading_experts(getattr(PreTrainedConfig, EXPERTS)))


def with_names(to_dict: Any) -> Any:
    """Return a config's `to_dict` that also writes the implementation, unless another one was asked for, and names."""

    @functools.wraps(to_dict)
    def written(config: PreTrainedConfig) -> dict[str, Any]:
        found: dict[str, Any] = to_dict(config)
        for field in (SAVED_IMPLEMENTATION, SAVED_EXPERTS):
            # of another config, by which this one was updated
            if found.get(field) == SAVED_NAME:
                del found[field]
        implementation = named(config, follows_pattern)
        if implementation:
            found[SAVED_IMPLEMENTATION] = implementation
        experts = named(config, has_own_pattern)
        if experts:
            found[SAVED_EXPERTS] = with_own(experts, own_experts(found.get(SAVED_EXPERTS)))
        write_architectures(config, found)
        return found

    setattr(written, IMPLEMENTATION_MARK, True)
    return written


def named(config: PreTrainedConfig, is_named: Callable[[PreTrainedConfig], bool]) -> str | dict[str, Any] | None:
    """Return the saved name for a config, or by their names those of its parts, where `is_named`; None: nothing.

    A config gives its parts what it has itself, whatever stands in theirs, unless it has names for them.
    """
    if is_named(config):
        return SAVED_NAME
    parts = {name: getattr(config, name, None) for name in config.sub_configs}
    found = {name: named(part, is_named) for name, part in parts.items() if isinstance(part, PreTrainedConfig)}
    return {name: implementation for name, implementation in found.items() if implementation} or None


def follows_pattern(config: PreTrainedConfig) -> bool:
    """Return whether a config has a pattern, or an indexer, and no attention that follows none."""
    return has_own_pattern(config) and config._attn_implementation in (None, NAME)


def reading_saved_name(implementation: Any) -> property:
    """Return a config's property of its implementation that takes the saved name for "efficient"."""

    def assign(config: PreTrainedConfig, value: Any) -> None:
        implementation.fset(config, value)
        if implementation.fget(config) == SAVED_NAME:
            implementation.fset(config, NAME)

    return property(implementation.fget, assign, doc=implementation.__doc__)


def reading_experts(implementation: Any) -> property:
    """Return a config's property of its experts that takes the saved name for nothing said."""

    def read(config: PreTrainedConfig) -> Any:
        found = implementation.fget(config)
        # of a config that was loaded before this package
        return None if found == SAVED_NAME else found

    def assign(config: PreTrainedConfig, value: Any) -> None:
        implementation.fset(config, own_experts(value))

    return property(read, assign, doc=implementation.__doc__)


def with_own(experts: str | dict[str, Any], own: Any) -> str | dict[str, Any]:
    """Return the names that are saved, and beside them what else the config says.

    >>> with_own("hf_efficient_attn", {}), with_own("hf_efficient_attn", "eager")
    ('hf_efficient_attn', {'': 'hf_efficient_attn', 'own': 'eager'})
    """
    if not own:
        return experts
    return {**(experts if isinstance(experts, dict) else {"": experts}), OWN: own}


def own_experts(value: Any) -> Any:
    """Return what a config says of experts beside the saved name; {} says nothing, and leaves parts as they are.

    >>> own_experts({"": "hf_efficient_attn", "own": "eager"}), own_experts("hf_efficient_attn"), own_experts(None)
    ('eager', {}, None)
    """
    if isinstance(value, dict):
        return value.get(OWN, {name: each for name, each in value.items() if each != SAVED_NAME})
    return {} if value == SAVED_NAME else value
