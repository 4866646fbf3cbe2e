"""Fields of the configs of encoder-decoders; each family's config explains them."""

from dataclasses import dataclass
from typing import Any

from hf_efficient_attn.errors import ConfigurationError


@dataclass(init=False, repr=False, eq=False)
class EncoderDecoderFields:
    """Mixin: two stacks, and the loss of the target."""

    attribute_map = {"num_hidden_layers": "encoder_layers"}

    encoder_layers: int = 6
    decoder_layers: int = 6
    max_target_position_embeddings: int = 1024
    label_smoothing: float | int = 0.0
    is_encoder_decoder: bool = True

    @property
    def is_causal(self) -> bool:
        """Whether the encoder is causal: it reads both sides; the decoder is causal in any case."""
        return False

    def check_label_smoothing(self) -> None:
        """Raise ConfigurationError for a share of the loss that is none."""
        if not 0 <= self.label_smoothing < 1:
            raise ConfigurationError(f"label_smoothing={self.label_smoothing} must be at least 0 and below 1.")


def fields_of_stacks(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields; refuse a number of layers that does not say of which stack."""
    if "num_hidden_layers" in fields:
        raise ConfigurationError(
            f"num_hidden_layers={fields['num_hidden_layers']} does not say which stack it is of. Pass encoder_layers "
            "and decoder_layers."
        )
    return fields
