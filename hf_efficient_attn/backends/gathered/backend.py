"""The gathered backend: keys chosen by what tokens say, gathered tile by tile; forward and backward, on any device."""

import torch
from torch import Tensor

from hf_efficient_attn.backends.gathered.operator import gathered_attention
from hf_efficient_attn.layout.call import AttentionCall
from hf_efficient_attn.layout.call_text import write_call_text
from hf_efficient_attn.layout.chosen.chosen_keys import DOCUMENT
from hf_efficient_attn.layout.chosen.chosen_text import write_chosen_text

NAME = "gathered"
# before sdpa, which takes memory for all pairs
RANK = 5


def why_not(call: AttentionCall) -> str | None:
    """Return one sentence why this backend cannot compute a call; None: it can."""
    if call.chosen is None:
        return "gathered computes keys that are chosen by what tokens say (chosen=...), and there are none."
    if not call.tokens.is_empty and call.layout.pattern.depends_on_length:
        return (
            f"gathered lays one pattern over all documents, and {call.layout.pattern.kind} is drawn anew for the "
            "length of each: use sdpa or reference."
        )
    if call.layout.is_cross and call.tokens.segment_ids is not None and call.chosen.counted_from == DOCUMENT:
        return (
            "gathered cannot count blocks from the start of several documents of another sequence: use sdpa or "
            "reference, or counted_from='axis'."
        )
    return None


def missing(call: AttentionCall) -> str | None:
    """Return None: nothing needs to be installed."""
    return None


def is_fastest(call: AttentionCall) -> bool:
    """Return False: all pairs of a short input may take less time."""
    return False


def cost(call: AttentionCall) -> float:
    """Return the estimated time for one example, in scores of dense attention."""
    return 0.0


def rank_while_compiling(call: AttentionCall) -> int | None:
    """Return its rank for every call, since its operator is opaque to compilers."""
    return RANK


def remark(call: AttentionCall) -> str:
    """Return what it computes."""
    return "gathered computes tiles of the chosen pairs."


def computed_pairs(call: AttentionCall) -> int:
    """Return how many scores its tiles hold, in all heads."""
    return 0


def working_bytes(call: AttentionCall) -> int:
    """Return the memory of the tiles that are computed together."""
    return 0


def attend(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, need_lse: bool = True) -> tuple[Tensor, Tensor | None]:
    """Return output and lse, which is never None; see `Backend`.

    Dropout is drawn from torch's global generator, once per call.
    """
    layout, chosen = call.layout, call.chosen
    assert chosen is not None
    labels = tuple(term.label for term in call.terms)
    out, lse, _ = gathered_attention(
        q,
        k,
        v,
        list(call.tokens.tensors),
        chosen.tensors,
        [term.values for term in call.terms],
        call.sinks,
        torch.randint(2**62, (), dtype=torch.int64) if call.dropout > 0.0 else None,
        call.query_start,
        write_call_text(
            layout.pattern, layout.layer, labels, layout.first_head, layout.num_model_heads, layout.is_cross
        ),
        write_chosen_text(chosen),
        layout.query_offset,
        call.softcap,
        call.scale,
        call.dropout,
    )
    return out, lse
