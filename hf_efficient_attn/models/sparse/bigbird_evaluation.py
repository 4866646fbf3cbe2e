"""BigBird as transformers evaluates it: in eval mode each random block is replaced by a copy of block 0.

The paper and the authors' code read the same random blocks in training and evaluation. This variant is for checkpoints
that must give the same logits as in transformers: `random_blocks_in_eval="transformers"`.
"""

import math
from functools import reduce
from operator import or_

import torch
from torch import Tensor
from transformers.utils.import_utils import is_tracing

from hf_efficient_attn.errors import ConfigurationError, InputError
from hf_efficient_attn.layout.token_locations import last_positions, token_locations
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.messages import shown
from hf_efficient_attn.patterns.pattern import Pattern


def repeat_first_block(
    block_tokens: int, num_random: int, query: Tensor, key: Tensor, scale: float, tokens: TokenMask
) -> tuple[Tensor, Tensor]:
    """Return queries and keys that count block 0 once more for each random block of a row, instead of these.

    A key that occurs r more times in a softmax has log(1 + r) added to its score. Here one more dimension does that: it
    is 1 in the queries outside of the first and the last block, and the bonus in the keys of block 0.
    Shapes: query [B, H, T, D], key [B, H, K, D] → the same with D + 1.

    tokens: blocks are counted from the first real token of a document to its last, as in the pattern; transformers
        counts padding as well.
    """
    locations = token_locations(tokens, key.shape[2], key.device)
    block, last = locations.positions // block_tokens, last_positions(locations) // block_tokens
    is_sparse = (block > 0) & (block < last)
    bonus = (block == 0) * (math.log(1 + num_random) / scale)
    wide_query, wide_key = (
        torch.cat((states, column.to(states.dtype)[:, None, :, None].expand(*states.shape[:3], 1)), -1)
        for states, column in ((query, is_sparse[:, -query.shape[2] :]), (key, bonus))
    )
    return wide_query, wide_key


def check_packing(full_attention_up_to: int | None, documents: Tensor | None, tokens: int) -> None:
    """Refuse packed documents that would be read by full attention alone, but not in a longer row.

    documents: [B, T], as `find_documents` returns them.

    Raises:
        InputError: names the field, and says how to go on.
    """
    if full_attention_up_to is None or documents is None or tokens <= full_attention_up_to:
        return
    message = (
        f"full_attention_up_to={full_attention_up_to} looks at whole rows, and position_ids pack several documents "
        "into a longer row: short ones would not be read as they are alone. Pass one document a row, or set "
        "config.full_attention_up_to to None."
    )
    if not is_tracing(documents):
        raise InputError(message)
    # while tracing there are always documents, perhaps one per row
    torch._assert_async((documents == 0).all(), message)


def split_random(pattern: Pattern) -> tuple[Pattern, int, int]:
    """Return the part of a union that is not random, the block length in tokens, and the random blocks per row.

    >>> from hf_efficient_attn.patterns.big_bird import bigbird
    >>> split_random(bigbird(block_tokens=16, num_random_blocks=2))[1:]
    (16, 2)

    Raises:
        ConfigurationError: the random parts are not blocks of one length joined to the rest by `|`.
    """
    members = pattern.members()
    rest = [member for member in members if not member.is_random]
    drawn = [member for member in members if member.is_random]
    if not rest or not drawn:
        return pattern, 1, 0
    blocks = [member.drawn_blocks() for member in drawn]
    known = [found for found in blocks if found is not None]
    lengths = {found.block_tokens for found in known}
    if len(known) < len(blocks) or len(lengths) > 1:
        raise ConfigurationError(
            "random_blocks_in_eval='transformers' replaces random blocks of one length that are joined to the rest of "
            f"a pattern by `|`, but attention_pattern is {shown(pattern.to_dict())}. Set it to 'fixed'."
        )
    return reduce(or_, rest), lengths.pop(), sum(found.num_blocks for found in known)
