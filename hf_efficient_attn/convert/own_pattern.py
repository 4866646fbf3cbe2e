"""What becomes of the `attention_pattern` that `sparsify` has given a model of transformers."""

from typing import Any

from hf_efficient_attn.attention.layer_patterns import FIELD, config_patterns
from hf_efficient_attn.attention.model_parts import ENCODER
from hf_efficient_attn.convert.configs import ConversionRequest, with_fields
from hf_efficient_attn.convert.counterpart import Counterpart
from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.messages import shown


def keeps_pattern(counterpart: Counterpart, theirs: Any, request: ConversionRequest) -> bool:
    """Return whether their config has a pattern that ours keeps: a request names no other.

    Raises:
        ConfigurationError: it would be lost, since what is made reads otherwise, and the request does not say what.
    """
    pattern = getattr(theirs, FIELD, None)
    if pattern is None or asks_for_another(request):
        return False
    if counterpart.asked is not None or not counterpart.is_dense:
        raise ConfigurationError(
            f"This {type(theirs).__name__} has attention_pattern={shown(pattern)}, which is not kept where a "
            f"{counterpart.model_type} becomes a model of {counterpart.family}, whose layers read otherwise. Say what "
            "they shall read by pattern (--pattern) or attention_window (--attention-window), or convert what "
            "sparsify(model, None) returns."
        )
    return True


def with_own_pattern(ours: Any, theirs: Any) -> Any:
    """Return our config with the pattern of theirs; layers that are sparse by themselves stay as they are."""
    spec, own = getattr(theirs, FIELD), getattr(ours, FIELD)
    if isinstance(own, list):
        followed = config_patterns(spec, theirs, ENCODER) or ()
        spec = [sparse or mine for sparse, mine in zip(followed, own, strict=True)]
    return with_fields(ours, **{FIELD: spec})


def note_replaced(theirs: Any, request: ConversionRequest) -> list[str]:
    """Return a note on a pattern in the place of which another one was asked for."""
    pattern = getattr(theirs, FIELD, None)
    if pattern is None or not asks_for_another(request):
        return []
    return [f"attention_pattern={shown(pattern)} of the source is not kept, as another one was asked for."]


def asks_for_another(request: ConversionRequest) -> bool:
    """Return whether a request says what layers read."""
    return request.pattern is not None or request.attention_window is not None
