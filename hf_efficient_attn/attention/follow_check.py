"""A check after the first forward pass of a sparsified model: every layer that should follow the pattern asked for it.

What other libraries replace before that pass is found out by it; what they replace later is not looked at.
"""

from dataclasses import dataclass
from typing import Any

from torch import nn

from hf_efficient_attn.attention.layer_patterns import FIELD, KNOWN, config_patterns
from hf_efficient_attn.attention.model_parts import part_of, parts_of
from hf_efficient_attn.errors import UnsupportedBackendError
from hf_efficient_attn.layout.tracing import run_untraced

# the attribute in which a part keeps the spec that its layers were seen to follow
FOLLOWED = "_followed_attention_pattern"
# the fields of configs by which layers are left out at random in training
LAYER_DROPS = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")


def watch(model: Any) -> None:
    """Check every part of a model that should follow a pattern after its first forward pass."""
    parts: list[tuple[str, Any]] = [*parts_of(model).items()]
    # the model below a head is called without it, too
    parts += [(name, below) for name, part in parts if (below := getattr(part, "base_model", part)) is not part]
    for name, part in parts:
        if FollowCheck(name) not in part._forward_hooks.values():
            part.register_forward_hook(FollowCheck(name))


@dataclass(frozen=True)
class FollowCheck:
    """A forward hook of a part, the encoder or the decoder, as in the spec of the patterns."""

    part: str

    def __call__(self, module: Any, inputs: Any, output: Any) -> None:
        """Raise UnsupportedBackendError if a layer of the part has not asked for its pattern."""
        run_untraced(check_followed, module, self.part)


def check_followed(module: Any, part: str) -> None:
    """Raise UnsupportedBackendError if a layer of a part has not asked for its pattern; not again once all have."""
    config = module.config.get_text_config()
    spec = getattr(config, FIELD, None)
    if spec is None or module.__dict__.get(FOLLOWED) is spec:
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
    module.__dict__[FOLLOWED] = spec


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
