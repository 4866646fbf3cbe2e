"""The architecture and the attention implementation that are saved in the configs of sparsified models.

vLLM, SGLang and others select their own code by `architectures`, and their code ignores patterns: for a
LlamaForCausalLM they would silently compute full attention. Sparsified models are therefore saved as
HfEfficientAttnLlamaForCausalLM, which these engines refuse. Loaded configs keep this name, because engines may load
configs with the code of the repository. If this package is imported, `getattr(transformers, name)`, by which
`transformers serve` and others find classes, returns a class for such a name, which loads the model named after the
prefix. It also returns the classes of this package's families.
"""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, NoReturn

import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from hf_efficient_attn.errors import UnsupportedBackendError
from hf_efficient_attn.integration.layer_patterns import FIELD, NAME
from hf_efficient_attn.integration.names import has_indexer

ARCHITECTURES = "architectures"
# precedes the name of a class of transformers in saved configs
PREFIX = "HfEfficientAttn"
ARCHITECTURES_MARK = "_finds_more"

# the classes of this package's families by name
_families: dict[str, type] = {}


def is_in_tree(config: PreTrainedConfig) -> bool:
    """Return whether the class of a config belongs to transformers."""
    return type(config).__module__.partition(".")[0] == transformers.__name__


def has_pattern_inside(config: PreTrainedConfig) -> bool:
    """Return whether a config, or the config of one of its parts, has an `attention_pattern` or an indexer."""
    parts = (getattr(config, name, None) for name in config.sub_configs)
    return has_own_pattern(config) or any(
        isinstance(part, PreTrainedConfig) and has_pattern_inside(part) for part in parts
    )


def has_own_pattern(config: PreTrainedConfig) -> bool:
    """Return whether a config itself has an `attention_pattern` or an indexer."""
    return getattr(config, FIELD, None) is not None or has_indexer(config)


def stock_name(architecture: str) -> str:
    """Return the name of the class of transformers that a saved name stands for.

    >>> stock_name("HfEfficientAttnLlamaForCausalLM"), stock_name("BertModel")
    ('LlamaForCausalLM', 'BertModel')
    """
    return architecture.removeprefix(PREFIX)


def write_architectures(config: PreTrainedConfig, found: dict[str, Any]) -> None:
    """Add the prefix to the architectures in a config's dict if it has a pattern, or else remove the prefix."""
    names = found.get(ARCHITECTURES)
    if isinstance(names, list) and is_in_tree(config):
        prefix = PREFIX if has_pattern_inside(config) else ""
        found[ARCHITECTURES] = [f"{prefix}{stock_name(name)}" if isinstance(name, str) else name for name in names]


class Sparsified:
    """Mixin of classes for saved models with patterns, which makes inference engines refuse them."""

    @classmethod
    def is_backend_compatible(cls) -> NoReturn:
        """Raise UnsupportedBackendError: engines that call this would replace the attention and drop the pattern."""
        raise UnsupportedBackendError(
            "This model follows an attention_pattern. An engine with its own attention (vLLM, SGLang) would compute "
            "full attention instead. Serve it with `transformers serve --trust-remote-code`, or remove the pattern "
            "with sparsify(model, None)."
        )

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return False


class SparsifiedArchitecture(Sparsified, PreTrainedModel):
    """A class for a saved architecture name; `from_pretrained` loads the model of transformers with its pattern."""

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Load the model with the class of transformers that the name stands for."""
        return getattr(transformers, stock_name(cls.__name__)).from_pretrained(*args, **with_saved_attention(kwargs))


def with_saved_attention(options: dict[str, Any]) -> dict[str, Any]:
    """Return options of `from_pretrained` without `attn_implementation` if it is None, so that the saved one counts.

    Command lines pass on None if the user gave nothing, and transformers would then use its default implementation.
    """
    return {name: value for name, value in options.items() if name != "attn_implementation" or value is not None}


@cache
def sparsified_architecture(name: str) -> type[SparsifiedArchitecture]:
    """Return the class for a saved architecture name."""
    return type(name, (SparsifiedArchitecture,), {"__module__": __name__})


def name_architectures() -> None:
    """Let `getattr(transformers, name)` find saved names and families; may be called repeatedly."""
    # extends the class of the module, because a program may hold several modules called transformers
    module_class: Any = type(transformers)
    if getattr(module_class.__getattr__, ARCHITECTURES_MARK, None) is not _families:
        module_class.__getattr__ = finding_more(module_class.__getattr__)


def finding_more(find: Any) -> Any:
    """Return a module's `__getattr__` that also finds families, and saved names of classes in the module."""

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
    """Register the names of a family's classes in transformers, by which libraries recognise the kind of a model.

    Afterwards `getattr(transformers, name)`, by which `transformers serve` finds `architectures`, returns the classes;
    classes of the package replace those of a copy of these sources (`hub`). The names are also added to the lists of
    the Auto classes, by which Trainer shifts labels for label smoothing, lm-eval distinguishes decoders from
    encoder-decoders, and model cards get tasks.

    Args:
        classes: the classes of a family by the names of the Auto classes that load them.
    """
    name_architectures()
    for auto, each in classes.items():
        if is_of_package(each) or not is_of_package(getattr(transformers, each.__name__, None)):
            _families[each.__name__] = each
        # stored by model type: transformers imports only the classes of types for which it has configs
        names = getattr(transformers, auto)._model_mapping._model_mapping
        names.setdefault(each.config_class.model_type, each.__name__)


def is_of_package(found: Any) -> bool:
    """Return whether a class belongs to this package itself, not to a copy or another library."""
    return getattr(found, "__module__", "").startswith("hf_efficient_attn.")


# Saved configs say that a model with a pattern or an indexer runs on "efficient".
#
# transformers reads `attn_implementation` from config.json, removes it from the config and never writes it again.
# Without it, a model that is saved again (in another dtype, with merged adapters, with more embeddings, ...) would be
# loaded with its pattern ignored. The value that is written is the name of this package, which transformers shows in
# its error if the package is not imported: `Specified attn_implementation="hf_efficient_attn" is not supported`. If
# the package is imported, configs change the value to "efficient". If only parts of a model have patterns, its config
# has the name for these parts.
#
# An argument `attn_implementation`, even None as passed by the command lines of TRL, overrides the saved value.
# Therefore the name is also written as `experts_implementation`, which transformers checks for every model, with or
# without experts, and which users pass only for models with experts. If this package is not imported, the model is
# refused with the same error; if it is imported, configs ignore the value. Inference engines with their own code ignore
# both fields, but refuse the name of the architecture.
#
# Three methods of transformers are replaced, because no other code sees every config that is saved or read.


# the fields of saved configs, and the value
SAVED_IMPLEMENTATION = "attn_implementation"
SAVED_EXPERTS = "experts_implementation"
SAVED_NAME = "hf_efficient_attn"
# the key of the config's own experts implementation, in a dict in which transformers looks for names of parts
OWN = "own"
# the properties of configs that hold these fields
PROPERTY = "_attn_implementation"
EXPERTS = "_experts_implementation"
IMPLEMENTATION_MARK = "_writes_names"


def write_implementations() -> None:
    """Make `to_dict` of all configs save these names with a pattern or an indexer; may be called repeatedly."""
    if not getattr(PreTrainedConfig.to_dict, IMPLEMENTATION_MARK, False):
        PreTrainedConfig.to_dict = with_names(PreTrainedConfig.to_dict)  # type: ignore[method-assign]
        setattr(PreTrainedConfig, PROPERTY, reading_saved_name(getattr(PreTrainedConfig, PROPERTY)))
        setattr(PreTrainedConfig, EXPERTS, reading_experts(getattr(PreTrainedConfig, EXPERTS)))


def with_names(to_dict: Any) -> Any:
    """Return a config's `to_dict` that also writes the implementation, unless another one is set, and the names."""

    @wraps(to_dict)
    def written(config: PreTrainedConfig) -> dict[str, Any]:
        found: dict[str, Any] = to_dict(config)
        for field in (SAVED_IMPLEMENTATION, SAVED_EXPERTS):
            # copied from another config that was used to update this one
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
    """Return the saved name if `is_named(config)`, or else a dict with the names for its parts; None if all are empty.

    transformers applies the value of a config to all its parts, and a dict to the parts that it names.
    """
    if is_named(config):
        return SAVED_NAME
    parts = {name: getattr(config, name, None) for name in config.sub_configs}
    found = {name: named(part, is_named) for name, part in parts.items() if isinstance(part, PreTrainedConfig)}
    return {name: implementation for name, implementation in found.items() if implementation} or None


def follows_pattern(config: PreTrainedConfig) -> bool:
    """Return whether a config has a pattern or an indexer, and no attention implementation other than "efficient"."""
    return has_own_pattern(config) and config._attn_implementation in (None, NAME)


def reading_saved_name(implementation: Any) -> property:
    """Return a property for a config's attention implementation that converts the saved name to "efficient"."""

    def assign(config: PreTrainedConfig, value: Any) -> None:
        implementation.fset(config, value)
        if implementation.fget(config) == SAVED_NAME:
            implementation.fset(config, NAME)

    return property(implementation.fget, assign, doc=implementation.__doc__)


def reading_experts(implementation: Any) -> property:
    """Return a property for a config's experts implementation that ignores the saved name."""

    def read(config: PreTrainedConfig) -> Any:
        found = implementation.fget(config)
        # this config was loaded before the package was imported
        return None if found == SAVED_NAME else found

    def assign(config: PreTrainedConfig, value: Any) -> None:
        implementation.fset(config, own_experts(value))

    return property(read, assign, doc=implementation.__doc__)


def with_own(experts: str | dict[str, Any], own: Any) -> str | dict[str, Any]:
    """Return the value to save: the names, combined with the config's own experts implementation.

    >>> with_own("hf_efficient_attn", {}), with_own("hf_efficient_attn", "eager")
    ('hf_efficient_attn', {'': 'hf_efficient_attn', 'own': 'eager'})
    """
    if not own:
        return experts
    return {**(experts if isinstance(experts, dict) else {"": experts}), OWN: own}


def own_experts(value: Any) -> Any:
    """Return the config's own experts implementation, without the saved name; {} leaves the parts unchanged.

    >>> own_experts({"": "hf_efficient_attn", "own": "eager"}), own_experts("hf_efficient_attn"), own_experts(None)
    ('eager', {}, None)
    """
    if isinstance(value, dict):
        return value.get(OWN, {name: each for name, each in value.items() if each != SAVED_NAME})
    return {} if value == SAVED_NAME else value
