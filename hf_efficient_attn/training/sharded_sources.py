"""A batch for an encoder-decoder, cut into what one of the processes that share its sources computes."""

from typing import Any

import torch

from hf_efficient_attn.attention.sharded.sequence_shards import SequenceShards
from hf_efficient_attn.attention.token_table import write_table
from hf_efficient_attn.errors import InputError
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.models.parts.positions import positions_among_real
from hf_efficient_attn.training.sharded_inputs import (
    HARMLESS,
    OF_TARGET,
    ShardedBatch,
    checked_tokens,
    marked_tokens,
    own_inputs,
)
from hf_efficient_attn.training.sharded_positions import check_positions

# what makes a target
TARGETS = ("labels", "decoder_input_ids", "decoder_inputs_embeds")
# what is said about sources
OF_SOURCE = ("input_ids", "inputs_embeds", "attention_mask", "global_attention_mask")


def cut_source(model: Any, given: dict[str, Any], shards: SequenceShards) -> ShardedBatch:
    """Return this process's tokens of the sources of a batch, and the whole targets, which all processes compute.

    Args:
        given: the arguments of the model by name, the same in every process.

    Raises:
        InputError: batches that differ between the processes, sources of fewer tokens than processes, no target.
        UnsupportedBackendError: an argument that cannot be cut.
    """
    tokens = checked_tokens(given, shards, (*OF_SOURCE, *OF_TARGET))
    if all(given.get(name) is None for name in TARGETS):
        raise InputError(
            "There is no target: by default it is the shifted source, of which no process has all tokens. Pass labels, "
            "decoder_input_ids or decoder_inputs_embeds."
        )
    batch_size, num_tokens = tokens.shape[:2]
    mask = given.get("attention_mask")
    whole = torch.ones(batch_size, num_tokens, dtype=torch.int64, device=tokens.device) if mask is None else mask
    inputs = own_inputs(given, shards.own(num_tokens))
    inputs |= {name: given[name] for name in (*HARMLESS, *OF_TARGET) if given.get(name) is not None}
    marked = marked_tokens(model, given, mask)
    inputs |= {} if marked is None else {"global_attention_mask": marked}
    check_positions(model.base_model.encoder, positions_among_real(whole))
    table: Any = write_table(TokenMask(whole != 0), None, num_tokens)
    return ShardedBatch({**inputs, "attention_mask": whole, "use_cache": False}, table, None, None, None)
