"""The gathered backend: keys selected by content, gathered tile by tile; forward and backward, on any device."""

from functools import partial

from hf_efficient_attn.backends import operator
from hf_efficient_attn.backends.gathered.execute import ANY_PAIRS, MOST_PAIRS, MOST_PAIRS_OFF_CPU, key_cost
from hf_efficient_attn.backends.kernels import is_fused
from hf_efficient_attn.backends.machine_costs import costs_of
from hf_efficient_attn.layout.call import AttentionCall
from hf_efficient_attn.layout.listed_keys import MOST_ENTRIES, MOST_KEY_ROWS
from hf_efficient_attn.layout.selected_keys import Sizes, TileWork

NAME = "gathered"
attend = partial(operator.attend, name=NAME)
# before sdpa, which takes memory for all pairs
RANK = 5
# times on a CPU, in scores of dense attention without a mask: of a score with its mask, fused and in `Explicit`
SCORES_PER_SCORE, SCORES_PER_UNFUSED_SCORE = 2.0, 5.0
# the same if a list of pairs gives the mask, which several heads share
SCORES_PER_LISTED_SCORE, UNFUSED_PER_LISTED_SCORE = 1.4, 4.0
# of a row of queries that is gathered and joined, of a row of keys and values, and of a call
SCORES_PER_QUERY_ROW, SCORES_PER_KEY_ROW = 60, 40
SCORES_PER_CALL, SCORES_PER_CALL_WITH_GRADIENTS = 5e5, 1.5e6
# time of a score on other devices; estimated, not measured
SCORES_PER_SCORE_ELSEWHERE = 12.0
# per pair: mask, and scores and weights of `Explicit`; per row: log-sum-exp, and the largest and total so far
BYTES_PER_PAIR, NUMBERS_PER_ROW = 20, 3


def why_not(call: AttentionCall) -> str | None:
    """Return one sentence on why this backend cannot compute a call; None: it can."""
    if call.chosen is None:
        return "gathered computes only keys that are selected by content (chosen=...), but this call has none."
    if call.lse_needs_grad:
        return "gathered gives no gradient of the log-sum-exp: use reference, or torch.no_grad()."
    if not call.tokens.is_empty and call.layout.is_drawn_by_document:
        return (
            f"gathered uses one pattern for all documents, but {call.layout.pattern.kind} depends on the length of "
            "each document: use sdpa or reference."
        )
    if call.counts_from_other_documents:
        return (
            "gathered cannot count blocks from the start of several documents of another sequence: use sdpa or "
            "reference, or counted_from='axis'."
        )
    return None


def missing(call: AttentionCall) -> str | None:
    """Return None: nothing needs to be installed."""
    return None


def is_fastest(call: AttentionCall) -> bool:
    """Return False: computing all pairs of a short input may take less time."""
    return False


def cost(call: AttentionCall) -> float:
    """Return the estimated time for one example, in scores of dense attention."""
    work, costs, is_here = _work(call), costs_of(call), call.inputs.device == "cpu"
    per_call = SCORES_PER_CALL_WITH_GRADIENTS if call.inputs.needs_grad else SCORES_PER_CALL
    if not is_here:
        per_score = SCORES_PER_SCORE_ELSEWHERE
    elif work.num_listed:
        per_score = SCORES_PER_LISTED_SCORE if is_fused(call) else UNFUSED_PER_LISTED_SCORE
    else:
        per_score = SCORES_PER_SCORE if is_fused(call) else SCORES_PER_UNFUSED_SCORE
    per_key = costs.tile_key if is_here and work.num_listed else SCORES_PER_KEY_ROW
    rows = SCORES_PER_QUERY_ROW * work.num_query_rows + per_key * work.num_key_rows
    return per_score * work.num_pairs + rows + costs.listed * work.num_listed + per_call


def _work(call: AttentionCall) -> TileWork:
    assert call.chosen is not None
    layout, inputs = call.layout, call.inputs
    most = ANY_PAIRS if is_fused(call) else MOST_PAIRS
    return call.chosen.work(layout, Sizes(1, layout.num_heads, inputs.num_key_heads, most, key_cost(call)))


def rank(call: AttentionCall) -> int | None:
    """Return its rank for every call, because compilers do not trace its operator."""
    return RANK


def remark(call: AttentionCall) -> str:
    """Return what it computes."""
    return f"gathered computes {computed_pairs(call):,} pairs in tiles of gathered queries and keys."


def computed_pairs(call: AttentionCall) -> int:
    """Return how many scores its tiles hold, in all heads."""
    return _work(call).num_pairs


def working_bytes(call: AttentionCall) -> int:
    """Return the memory of the tiles that are computed together, and of sums that are wider than the output."""
    layout, inputs = call.layout, call.inputs
    most, keys = MOST_PAIRS if inputs.device == "cpu" else MOST_PAIRS_OFF_CPU, 0
    if call.chosen is not None and call.chosen.shares_masks and inputs.device == "cpu":
        # a large mask, and copies of keys and values with their gradients
        most, copies = max(most, MOST_ENTRIES), 2 if inputs.needs_grad else 1
        keys = copies * MOST_KEY_ROWS * (inputs.head_dim + inputs.value_dim) * inputs.dtype.itemsize
    sums = 4 * layout.num_rows * (inputs.value_dim + NUMBERS_PER_ROW)
    return sums + keys + BYTES_PER_PAIR * min(most, computed_pairs(call))
