"""The encoder or the decoder alone of a saved encoder-decoder: it follows the patterns of that part."""

from typing import Any

from transformers import PreTrainedModel

from hf_efficient_attn.attention.layer_patterns import FIELD, LAYER_COUNTS, is_by_part
from hf_efficient_attn.attention.model_parts import DECODER, ENCODER, parts_of


def keep_own_part(model: PreTrainedModel) -> None:
    """Leave in the config of a model the patterns of the part that it is, such as a T5EncoderModel."""
    config: Any = model.config
    if is_joined(config) and not config.is_encoder_decoder:
        write_part(config, DECODER if getattr(config, "is_decoder", False) else ENCODER)


def keep_encoder(model: PreTrainedModel) -> None:
    """The same for an encoder alone whose config says nothing of it, such as a UMT5EncoderModel, once it is built."""
    if is_joined(model.config) and model.config.is_encoder_decoder:
        parts = parts_of(model)
        if DECODER not in parts and model not in parts.values():
            write_part(model.config, ENCODER)


def is_joined(config: Any) -> bool:
    """Return whether a config has patterns by part, and says how many layers a decoder has beside an encoder."""
    *names, _ = LAYER_COUNTS[DECODER]
    return is_by_part(getattr(config, FIELD, None)) and any(hasattr(config, name) for name in names)


def write_part(config: Any, part: str) -> None:
    """Replace patterns by part by those of one part; none if it keeps its own attention."""
    own = getattr(config, FIELD).get(part)
    if own is None:
        delattr(config, FIELD)
    else:
        setattr(config, FIELD, own)
