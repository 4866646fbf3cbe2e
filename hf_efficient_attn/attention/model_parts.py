"""To which part of an encoder-decoder a module belongs."""

from typing import Any

from torch import nn

ENCODER, DECODER = "encoder", "decoder"
PARTS = {ENCODER, DECODER}
# the attribute in which a module keeps its part
PART = "_model_part"


def part_of(module: nn.Module) -> str:
    """Return ENCODER or DECODER; models that are only one of them count as encoders.

    Some modules have no `is_decoder`, so that only their place in the model tells their part (`mark_parts`).
    """
    part: str | None = getattr(module, PART, None)
    if part is not None:
        return part
    return DECODER if getattr(module, "is_decoder", False) else ENCODER


def parts_of(model: Any) -> dict[str, Any]:
    """Return the encoder and the decoder of a model, or the model as its only part."""
    if not model.config.get_text_config().is_encoder_decoder:
        return {ENCODER: model}
    parts = {ENCODER: model.get_encoder(), DECODER: model.get_decoder()}
    if parts[ENCODER] is not parts[DECODER]:
        # of an encoder alone, transformers takes the model itself for a decoder
        is_alone = parts[ENCODER] in parts[DECODER].modules()
        return {ENCODER: parts[ENCODER]} if is_alone else parts
    # a part that is called without the model that it belongs to
    says_so = any(getattr(module, "is_decoder", False) for module in model.modules())
    return {DECODER if says_so or "Decoder" in type(model).__name__ else ENCODER: model}


def mark_parts(model: Any) -> None:
    """Store in the modules of an encoder-decoder which part they belong to."""
    if model.config.get_text_config().is_encoder_decoder:
        for part, module in parts_of(model).items():
            for each in module.modules():
                each.__dict__[PART] = part
