"""Refuse what cannot be made, by configs alone, before any weight is loaded."""

from typing import Any

from hf_efficient_attn.convert.configs import ConversionRequest, apply_request, our_config, their_config
from hf_efficient_attn.convert.positions import check_lengths
from hf_efficient_attn.convert.registry import COUNTERPARTS
from hf_efficient_attn.errors import ConfigurationError


def check_request(config: Any, head: str, target: str, request: ConversionRequest) -> None:
    """Make the configs of the conversion, all but the weights.

    Args:
        config: of the source.
        head: of the source, a key of `AUTO_CLASSES`.
        target: model type to make.

    Raises:
        ConfigurationError: a head, length, window, pattern or other field that the source or the target cannot have.
    """
    counterpart, their = COUNTERPARTS.get(config.model_type), COUNTERPARTS.get(target)
    ours = config if counterpart is None else our_config(counterpart, config, head, request.parity)
    asked = apply_request(ours, request, counterpart is not None and counterpart.is_dense)
    check_lengths(ours, asked)
    if their is None:
        return
    if head not in their.heads:
        raise ConfigurationError(f"{target} has no {head}; it has: {', '.join(their.heads)}.")
    their_config(their, asked, head)
