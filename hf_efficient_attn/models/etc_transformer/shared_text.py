"""ETC where processes share the long input: each has all global tokens, some long tokens, and some heads of attention.

Global tokens are few, and every process computes their states; a layer gives it the whole long input for its heads.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hf_efficient_attn.attention.sharded.dealt_heads import DealtHeads
from hf_efficient_attn.attention.sharded.sequence_shards import SequenceShards
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.models.prologue import PreparedCall


def whole_call(call: PreparedCall, mask: TokenMask, shards: SequenceShards | None) -> tuple[PreparedCall, PreparedCall]:
    """Return a call that knows the documents of the long input, and the same as if it had all of its tokens.

    Args:
        mask: of the long input; where processes share it, of all of its tokens.
    """
    if shards is None or mask.shape is None:
        return call, call
    call = replace(call, documents=mask.segment_ids)
    # of which only the shape is asked
    return call, replace(call, embedded=call.embedded.new_empty(call.batch_size, mask.shape[1], 0))


def deal_out(
    dealt: DealtHeads, long: Sequence[Tensor], of_globals: Sequence[Tensor]
) -> tuple[Sequence[Tensor], list[Tensor]]:
    """Return the states of this process's heads: of all long tokens, given those of its own, and of global tokens.

    Shapes: [B, H, N, D] → [B, h, N, D].
    """
    whole = dealt.whole_texts(torch.cat(list(long), -1))
    return whole.split([each.shape[-1] for each in long], -1), [each[:, dealt.own] for each in of_globals]


def take_back(dealt: DealtHeads, long: Tensor, of_globals: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs of all heads, [B, H, n, D] of this process's long tokens and [B, H, G, D] of global ones.

    long, of_globals: the outputs of this process's heads, of all tokens.
    """
    width = of_globals.shape[-1]
    joined = dealt.all_heads(of_globals.transpose(1, 2).flatten(2), width)
    return dealt.own_tokens(long), joined.unflatten(-1, (-1, width)).transpose(1, 2)
