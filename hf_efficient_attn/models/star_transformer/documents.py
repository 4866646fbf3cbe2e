"""What a call says about its stars: padding, packed documents, and pairs of sentences."""

from typing import Any

from torch import Tensor
from transformers.utils.import_utils import is_tracing

from hf_efficient_attn.attention.sharded.sequence_shards import SequenceShards
from hf_efficient_attn.layout.host_copies import on_host
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.models.prologue import PreparedCall

from .ring import Ring, find_ring
from .shared_ring import own_ring

CLOSED = (
    "This attention_mask closes pairs of real tokens, but the relay of a star passes on what every token says "
    "to all of them. Pass a padding mask [batch, tokens], and position_ids that restart for packed documents."
)


def find_stars(config: Any, call: PreparedCall, sentences: Tensor | None, shards: SequenceShards | None = None) -> Ring:
    """Return the rings of a call.

    Args:
        sentences: the number of each token's sentence, 0 or 1, [B, T]; None: the call's own documents are the stars.
        shards: the processes that share each text, of whose tokens the rings then are.
    """
    mask: TokenMask = call.masks(config)["token_mask"]
    real, documents, num_relays, states = mask.key_mask, call.documents, 1, call.embedded
    if shards is not None:
        documents = mask.segment_ids
        states = states.new_empty(call.batch_size, real.shape[1], 0)
    if sentences is not None:
        documents, num_relays = sentences.long(), 2
    elif documents is not None:
        # a tracer does not know how many there are, and gives every token a relay
        num_relays = call.tokens if is_tracing(documents) else 1 + int(on_host(documents).max())
    ring = find_ring(states, real, documents, num_relays, config.ring == "closed")
    return ring if shards is None else own_ring(ring, shards, states.shape[1], call.batch_size)
