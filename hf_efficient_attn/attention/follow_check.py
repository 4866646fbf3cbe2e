"""Checks around forward passes of a sparsified model: its layers follow the pattern, also after others change them.

After the first pass, every layer that should follow the pattern must have asked for it. Later passes compare how these
layers are reached with how they were then, and check again where a library has changed that: methods that are replaced
after `sparsify`, other modules or configs, another function under the name of ours.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_efficient_attn.attention.layer_patterns import FIELD, KNOWN, NAME, config_patterns
from hf_efficient_attn.attention.model_parts import part_of, parts_of
from hf_efficient_attn.attention.untraced import run_untraced
from hf_efficient_attn.errors import UnsupportedBackendError

# the attribute in which a part keeps how its layers were seen to follow their patterns
SEEN = "_seen_layers"
# the fields of configs by which layers are left out at random in training
LAYER_DROPS = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")


@dataclass(frozen=True)
class Way:
    """How a module is reached that is the attention of a layer or holds one; code of others may change it.

    Attributes:
        parent, name: where the module is; None for the part itself.
        method, own_method: its `forward`, of its class and of itself.
    """

    parent: nn.Module | None
    name: str
    module: Any
    method: Any
    own_method: Any
    config: Any

    def is_same(self) -> bool:
        """Return whether it still is reached so."""
        module = self.module
        return (
            (self.parent is None or self.parent._modules.get(self.name) is module)
            and type(module).forward is self.method
            and module.__dict__.get("forward") is self.own_method
            and module.__dict__.get("config") is self.config
        )


class Seen:
    """What the layers of a part were seen to follow: the spec of a config, by which attention function, in which ways.

    In a copy of the part, or when it comes out of a file, this is empty: its layers are looked at anew.
    """

    def __init__(self, config: Any = None, function: Any = None, ways: tuple[Way, ...] = ()) -> None:
        self.config, self.spec = config, getattr(config, FIELD, None)
        self.function, self.ways = function, ways

    def __reduce__(self) -> tuple[Any, ...]:
        return Seen, ()

    def is_same(self) -> bool:
        """Return whether all this still is so."""
        is_followed = self.spec is not None and getattr(self.config, FIELD, None) is self.spec
        is_reached = ALL_ATTENTION_FUNCTIONS.get(NAME) is self.function
        return is_followed and is_reached and all(way.is_same() for way in self.ways)


def watch(model: Any) -> None:
    """Check every part of a model that should follow a pattern around each forward pass."""
    parts: list[tuple[str, Any]] = [*parts_of(model).items()]
    # the model below a head is called without it, too
    parts += [(name, below) for name, part in parts if (below := getattr(part, "base_model", part)) is not part]
    for name, part in parts:
        if FollowCheck(name) not in part._forward_hooks.values():
            part.register_forward_pre_hook(look_again)
            part.register_forward_hook(FollowCheck(name))


def look_again(module: nn.Module, inputs: Any) -> None:
    """Have the layers of a part checked after this forward pass, if others have changed something; a hook before it."""
    run_untraced(forget_changed, module)


@dataclass(frozen=True)
class FollowCheck:
    """A forward hook of a part, the encoder or the decoder, as in the spec of the patterns."""

    part: str

    def __call__(self, module: Any, inputs: Any, output: Any) -> None:
        """Raise UnsupportedBackendError if a layer of the part has not asked for its pattern."""
        run_untraced(check_followed, module, self.part)


def forget_changed(module: Any) -> None:
    """Forget what the layers of a part have asked for, if that need not be so any more."""
    seen = module.__dict__.get(SEEN)
    if seen is not None and not seen.is_same():
        for each in module.modules():
            each.__dict__.pop(KNOWN, None)
        del module.__dict__[SEEN]


def check_followed(module: Any, part: str) -> None:
    """Raise UnsupportedBackendError if a layer of a part has not asked for its pattern; not again once all have."""
    if SEEN in module.__dict__:
        return
    config = module.config.get_text_config()
    spec = getattr(config, FIELD, None)
    if spec is None:
        return
    patterns = config_patterns(spec, config, part) or ()
    layers = layers_of(module)
    asked = {getattr(each, "layer_idx", None) for each in layers.values() if asked_pattern(each) is not None}
    # beside the attention of a layer, its cross-attention may be of the same class
    expected = {number for each in layers.values() if (number := patterned_layer(each, part, patterns)) is not None}
    missing = set() if None in asked else expected - asked
    if module.training and any(getattr(config, name, None) for name in LAYER_DROPS):
        return
    if missing or (not asked and any(each is not None for each in patterns)):
        which = f"layer {min(missing)} does not call" if asked else "none of its layers calls"
        raise UnsupportedBackendError(
            f"{type(module).__name__} has computed without its attention_pattern: {which} the attention interface of "
            "transformers with it. Leave out the library that has replaced its attention, or take the pattern away "
            "with sparsify(model, None)."
        )
    # the model below a head is checked by itself
    names = layers if getattr(module, "base_model", module) is module else [module.base_model_prefix]
    module.__dict__[SEEN] = Seen(config, ALL_ATTENTION_FUNCTIONS.get(NAME), tuple(ways_to(module, names)))


def layers_of(module: nn.Module) -> dict[str, Any]:
    """Return the modules that have asked for a pattern, and others of their classes, by their names."""
    kinds = {type(each) for each in module.modules() if KNOWN in each.__dict__}
    return {name: each for name, each in module.named_modules() if type(each) in kinds}


def asked_pattern(module: nn.Module) -> Any:
    """Return the pattern that a module has asked for; None: it has not, or computes its own attention."""
    return module.__dict__.get(KNOWN, (None, None, None))[2]


def patterned_layer(module: Any, part: str, patterns: Any) -> int | None:
    """Return the number of the layer to which a module of attention belongs, if that layer has a pattern."""
    layer = getattr(module, "layer_idx", None)
    is_layer = layer is not None and layer < len(patterns) and part_of(module) == part
    return layer if is_layer and patterns[layer] is not None else None


def ways_to(module: nn.Module, names: Iterable[str]) -> Iterator[Way]:
    """Yield the ways to modules within a part, and to all that lie between."""
    steps = [name.split(".") if name else [] for name in names]
    for path in dict.fromkeys(tuple(step[:length]) for step in steps for length in range(len(step) + 1)):
        parent = module.get_submodule(".".join(path[:-1])) if path else None
        each: Any = module if parent is None else parent._modules[path[-1]]
        found = each.__dict__.get
        yield Way(parent, path[-1] if path else "", each, type(each).forward, found("forward"), found("config"))
