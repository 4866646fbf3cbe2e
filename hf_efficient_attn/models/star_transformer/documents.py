"""What a call says about its stars: padding, packed documents, and pairs of sentences."""

from typing import Any

from torch import Tensor
from transformers.utils.import_utils import is_tracing

from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.layout.transfer import on_host
from hf_efficient_attn.models.prologue import PreparedCall

from .ring import Ring, find_ring

CLOSED = (
    "This attention_mask closes pairs of real tokens, but the relay of a star passes on what every token says "
    "to all of them. Pass a padding mask [batch, tokens], and position_ids that restart for packed documents."
)


def find_stars(config: Any, call: PreparedCall, sentences: Tensor | None) -> Ring:
    """Return the rings of a call.

    sentences: the number of each token's sentence, 0 or 1, [B, T]; None: the call's own documents are the stars.
    """
    mask: TokenMask = call.masks(config)["token_mask"]
    documents, num_relays = call.documents, 1
    if sentences is not None:
        documents, num_relays = sentences.long(), 2
    elif documents is not None:
        # a tracer does not know how many there are, and gives every token a relay
        num_relays = call.tokens if is_tracing(documents) else 1 + int(on_host(documents).max())
    return find_ring(call.embedded, mask.key_mask, documents, num_relays, config.ring == "closed")
