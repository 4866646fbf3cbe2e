"""A check after the first forward pass of a sparsified model: did its layers follow the pattern?"""

from dataclasses import dataclass
from typing import Any

import torch

from hf_efficient_attn.attention.layer_patterns import FIELD, KNOWN, config_patterns
from hf_efficient_attn.attention.model_parts import parts_of
from hf_efficient_attn.errors import UnsupportedBackendError

# the attribute in which a part keeps the spec that its layers were seen to follow
SEEN = "_followed_attention_pattern"


def watch(model: Any) -> None:
    """Check every part of a model that should follow a pattern after each forward pass, until it has."""
    for name, part in parts_of(model).items():
        if FollowCheck(name) not in part._forward_hooks.values():
            part.register_forward_hook(FollowCheck(name))


@dataclass(frozen=True)
class FollowCheck:
    """A forward hook of a part, the encoder or the decoder, as in the spec of the patterns."""

    part: str

    def __call__(self, module: Any, inputs: Any, output: Any) -> None:
        """Raise UnsupportedBackendError if no layer of the part has asked for its pattern."""
        if torch.compiler.is_compiling():
            return
        config = module.config.get_text_config()
        spec = getattr(config, FIELD, None)
        if spec is None or module.__dict__.get(SEEN) is spec:
            return
        has_pattern = any(pattern is not None for pattern in config_patterns(spec, config, self.part) or ())
        known = (each.__dict__.get(KNOWN) for each in module.modules())
        if has_pattern and not any(each is not None and each[2] is not None for each in known):
            raise UnsupportedBackendError(
                f"{type(module).__name__} has computed without its attention_pattern: none of its layers calls the "
                "attention interface of transformers with it. Take the pattern away with sparsify(model, None)."
            )
        module.__dict__[SEEN] = spec
