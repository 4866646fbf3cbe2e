"""Which chosen keys flex computes, and how many scores, and how much memory, that takes."""

from dataclasses import replace
from typing import cast

import torch

from hf_efficient_attn.backends.flex.blocks import BLOCK_SIZES
from hf_efficient_attn.backends.flex.chosen_blocks import blocks_with_pairs
from hf_efficient_attn.backends.flex.chosen_order import blocks_of_places
from hf_efficient_attn.layout.blocks.table import MAX_TABLE_BYTES
from hf_efficient_attn.layout.call import AttentionCall
from hf_efficient_attn.layout.chosen.grouped_keys import ChunkedOrder
from hf_efficient_attn.layout.chosen.listed_keys import ChosenBlocks
from hf_efficient_attn.layout.chosen.listed_tiles import MOST_LISTED
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.layout.token_mask import NO_MASK

# blocks of keys that a query may have chosen: a kernel compares every pair with each of them
MOST_CHOSEN = 64
# of the lists of partial and of full blocks
BYTES_PER_BLOCK = 8
# of a query and a block that it has chosen, while the tables are made
BYTES_PER_ENTRY = 80


def refused_choice(call: AttentionCall) -> str | None:
    """Return one sentence why flex cannot compute the chosen keys of a call; None: it can, or there are none."""
    chosen = call.chosen
    if chosen is None:
        return None
    if not (chosen.are_blocks or chosen.are_chunks):
        return "flex leaves out whole blocks of neighbouring keys, not chosen ones that lie anywhere: use gathered."
    refused = _refused_order(call) if chosen.are_chunks else None
    if refused is not None:
        return refused
    num_read = _num_read(call)
    if num_read > MOST_CHOSEN:
        return f"flex compares a pair with up to {MOST_CHOSEN} chosen blocks, not with {num_read}: use gathered."
    if call.counts_from_other_documents:
        return (
            "flex cannot count blocks from the start of several documents of another sequence: use sdpa or "
            "reference, or counted_from='axis'."
        )
    # lengths may be symbols to a compiler
    is_known = not call.inputs.is_compiling and call.inputs.device in BLOCK_SIZES
    num_bytes = call.inputs.batch_size * table_bytes(call) if is_known else 0
    if num_bytes > MAX_TABLE_BYTES:
        return f"flex would make tables of chosen blocks of {num_bytes / 2**30:,.0f} GiB: use gathered."
    return None


def _refused_order(call: AttentionCall) -> str | None:
    if not cast(ChunkedOrder, call.chosen).counts_duplicates:
        return "flex counts a key as often as it meets its query in all rounds, and here it counts once: use gathered."
    if call.inputs.device == "cpu":
        return "flex gives no log-sum-exp on cpu, by which the rounds of an order are joined: use gathered."
    if call.inputs.is_compiling:
        return "flex sorts tokens into an order outside of compiled programs alone: use gathered there."
    return None


def most_pairs(call: AttentionCall, most: int) -> int:
    """Return how many scores of one example may be computed, in all heads, whatever was chosen.

    most: the scores of all blocks in which the pattern allows a pair.
    """
    if call.chosen is None:
        return most
    chosen, layout = _blocks(call)
    query_tokens, key_tokens = BLOCK_SIZES[call.inputs.device]
    choices = _num_met(query_tokens, chosen.queries_per_choice)
    read = key_tokens * choices * chosen.blocks.shape[3] * _num_met(chosen.block_tokens, key_tokens)
    listed = layout.num_heads * -(-layout.num_queries // query_tokens) * query_tokens * read
    return _num_passes(call) * min(layout.num_pairs if call.chosen.are_chunks else most, listed)


def _num_met(length: int, other: int) -> int:
    """Return how many parts of one length are met by parts of another, if both are counted from the same token.

    >>> [_num_met(128, other) for other in (512, 64, 1, 100)]
    [1, 2, 128, 3]
    """
    if length % other == 0 or other % length == 0:
        return max(1, length // other)
    return (length - 2) // other + 2


def pairs_of_choice(call: AttentionCall, most: int) -> int:
    """Return how many scores of the first example are computed, in all heads, by what was chosen.

    most: as for `most_pairs`, which is returned of a choice without contents.
    """
    chosen, layout = _blocks(call)
    device, block_size = chosen.blocks.device, BLOCK_SIZES[call.inputs.device]
    if device.type == "meta":
        return most_pairs(call, most)
    first = replace(chosen, blocks=chosen.blocks[:1])
    partial, full = blocks_with_pairs(first, layout, NO_MASK, None, block_size, device)
    found = partial | full
    num_blocks = int(found.sum()) * layout.num_heads // found.shape[1]
    return _num_passes(call) * min(num_blocks * block_size[0] * block_size[1], layout.num_pairs)


def choice_bytes(call: AttentionCall) -> int:
    """Return the memory of the tables of one example, and of making them; 0 without chosen keys.

    In an order also that of the states at all places, and of sums that are wider than the output.
    """
    if call.chosen is None:
        return 0
    (chosen, layout), inputs = _blocks(call), call.inputs
    num_entries = chosen.blocks.shape[1] * layout.num_queries * chosen.blocks.shape[3]
    states = (2 * inputs.head_dim + inputs.value_dim) * inputs.dtype.itemsize + 8 * inputs.value_dim
    in_order = layout.num_rows * states if call.chosen.are_chunks else 0
    return table_bytes(call) + BYTES_PER_ENTRY * min(MOST_LISTED, num_entries) + in_order


def table_bytes(call: AttentionCall) -> int:
    """Return the memory of the tables of one example, in which every head has its own blocks."""
    (_, layout), sizes = _blocks(call), BLOCK_SIZES[call.inputs.device]
    num_blocks = layout.num_heads * -(-layout.num_queries // sizes[0]) * -(-layout.num_keys // sizes[1])
    return BYTES_PER_BLOCK * num_blocks * (2 if call.inputs.needs_grad or call.chosen.are_chunks else 1)  # type: ignore[union-attr]


def _blocks(call: AttentionCall) -> tuple[ChosenBlocks, Layout]:
    """Return the blocks that are chosen, of keys or of the places of an order, and where they lie."""
    if cast(ChosenBlocks | ChunkedOrder, call.chosen).are_chunks:
        return blocks_of_places(cast(ChunkedOrder, call.chosen), call.layout, torch.device("cpu"))
    return cast(ChosenBlocks, call.chosen), call.layout


def _num_read(call: AttentionCall) -> int:
    """Return how many blocks, or chunks, a query reads."""
    return _blocks(call)[0].blocks.shape[3]


def _num_passes(call: AttentionCall) -> int:
    """Return how often a kernel computes the scores: a second time for tokens that may read themselves alone."""
    return 2 if cast(ChosenBlocks | ChunkedOrder, call.chosen).reads_self_last else 1
