"""The flash backend: FlashAttention-4's kernels, for windows, for windows with global tokens, and for masks.

For NVIDIA GPUs; optional (`pip install --pre "hf_efficient_attn[flash]"`), pure Python, compiled in seconds at the
first call of each kind. On Hopper and Blackwell it computes forward and backward passes, on Ampere only forward passes.
"""

from functools import partial
from math import inf
from typing import cast

import torch

from hf_efficient_attn.backends import operator
from hf_efficient_attn.backends.flash.library import (
    AMPERE,
    BLACKWELL,
    HOPPER,
    INSTALL,
    PACKAGE,
    THOR,
    has_kernel,
    why_not_installed,
)
from hf_efficient_attn.backends.flash.parts import (
    MOST_BLOCKS,
    is_expression,
    listed_parts,
    may_need_mask,
    shares_keys,
    why_no_parts,
    work_of,
)
from hf_efficient_attn.backends.machine_costs import costs_of, gpu_generation, is_there
from hf_efficient_attn.layout.call import AttentionCall
from hf_efficient_attn.layout.listed_keys import ChosenBlocks
from hf_efficient_attn.layout.operator_args import read_call_text, write_call_text

NAME = "flash"
attend = partial(operator.attend, name=NAME)
RANK = 15
DTYPES = (torch.bfloat16, torch.float16)
GENERATIONS = (AMPERE, HOPPER, BLACKWELL, THOR)
# time to join a row of one more output and to add its gradient, in scores of dense attention; estimated from the bytes
# that are moved, not measured
SCORES_PER_JOINED_ROW = 100
# in the tables of blocks: partial and full, by rows and by columns
BYTES_PER_TILE = 16
TILE_PAIRS = 128 * 128


def why_not(call: AttentionCall) -> str | None:
    """Return one sentence on why this backend cannot compute a call; None: it can."""
    if call.inputs.device != "cuda":
        return f"flash runs on NVIDIA GPUs, not on {call.inputs.device}: use blocked or sdpa."
    reason = _refused(call)
    if reason is not None:
        return f"flash {reason}."
    lacking = _lacking(call.inputs.is_compiling or is_there(call.inputs.device))
    return None if lacking is None else f"flash needs {PACKAGE}, which {lacking}: {INSTALL}, or use flex."


def missing(call: AttentionCall) -> str | None:
    """Return what must be installed if that alone keeps this backend from computing the call; otherwise None."""
    is_complete = _lacking(call.inputs.is_compiling or is_there(call.inputs.device)) is None
    is_able = call.inputs.device == "cuda" and not is_complete and _refused(call) is None
    return PACKAGE if is_able else None


# compiled programs take the result as a constant
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _lacking(is_here: bool) -> str | None:
    # a GPU that is only explained is assumed to have it
    return why_not_installed() if is_here else None


def _refused(call: AttentionCall) -> str | None:
    """Return why kernels do not compute a call; None: they do. The quickest checks come first."""
    return _refused_numbers(call) or _refused_layout(call) or _refused_sizes(call)


def _refused_numbers(call: AttentionCall) -> str | None:
    """Return what kernels cannot compute in a call, its layout aside; None: nothing."""
    inputs, generation = call.inputs, gpu_generation(call.inputs.device)
    if inputs.dtype not in DTYPES:
        return f"computes in bfloat16 and float16, not in {inputs.dtype}: use one of these, or flex"
    if call.terms:
        return "has no kernel for learned terms of the scores: use flex"
    if call.dropout > 0:
        return f"has no dropout (here {call.dropout}): use flex"
    refused = None if call.chosen is None else _refused_selection(call)
    if refused is not None:
        return refused
    if call.query_start is not None:
        return "cannot compute a query_offset that is a tensor: use blocked"
    if call.layout.num_queries == 1:
        return "is no faster for a single query: use sdpa, or blocked with a soft cap"
    if generation not in GENERATIONS:
        return f"supports Ampere, Hopper and Blackwell, not compute capability {generation}: use flex"
    if call.scale <= 0:
        return f"needs a positive scale of the scores, not {call.scale}: use flex"
    return None


def _refused_selection(call: AttentionCall) -> str | None:
    """Return why selected keys are not computed; None: they are blocks of keys of one whole sequence."""
    chosen, layout = call.chosen, call.layout
    if chosen is None or not chosen.are_blocks:
        return "computes selected keys only as ChosenBlocks: use gathered"
    if cast(ChosenBlocks, chosen).blocks.shape[3] > MOST_BLOCKS:
        return f"computes at most {MOST_BLOCKS} selected blocks per query: use flex or gathered"
    if not call.tokens.is_empty or layout.is_cross or not is_expression(layout.pattern):
        return "computes selected blocks only in one whole sequence, with a pattern of positions: use flex or gathered"
    return None


def _refused_layout(call: AttentionCall) -> str | None:
    """Return why the layout cannot be computed by these kernels; None: it can."""
    layout, inputs = call.layout, call.inputs
    if inputs.is_compiling:
        # lengths may be symbols
        heads = (layout.first_head, layout.num_model_heads, layout.is_cross)
        is_known = _is_known_at_any_length(write_call_text(layout.pattern, layout.layer, (), *heads))
        return (
            None
            if is_known
            else f"can be compiled only for patterns of positions, not for {layout.pattern.kind}: use flex"
        )
    if call.tokens.global_mask is not None and layout.pattern.num_head_patterns > 1:
        return "computes chosen global tokens only if all heads have the same pattern: use flex"
    reason = why_no_parts(layout, not call.tokens.is_empty)
    if reason is not None:
        return f"cannot compute this pattern: {reason}; use flex or blocked"
    if shares_keys(layout, not call.tokens.is_empty, layout.num_heads // inputs.num_key_heads):
        return "computes heads that share keys together, but these have different patterns: use flex"
    return None


def _refused_sizes(call: AttentionCall) -> str | None:
    """Return why a GPU has no kernel for the head sizes, or none for gradients or masks; None: it has one."""
    inputs, generation = call.inputs, gpu_generation(call.inputs.device)
    # while compiling, lengths may be symbols
    needs_mask = inputs.is_compiling or call.chosen is not None or may_need_mask(call.layout, call.tokens)
    dims, is_grouped = (inputs.head_dim, inputs.value_dim), call.layout.num_heads > inputs.num_key_heads
    if not has_kernel(generation, *dims, needs_mask, inputs.needs_grad, is_grouped):
        what = f"{' with masks' * needs_mask}{' with gradients' * inputs.needs_grad}{' that share keys' * is_grouped}"
        return (
            f"has no kernel for head sizes {dims[0]} and {dims[1]}{what} here: it takes equal multiples of 8 up to "
            "128, on Hopper up to 256 without masks, and 192 and 128 in some cases; use flex or sdpa"
        )
    if generation == AMPERE and (inputs.needs_grad or needs_mask or call.sinks is not None):
        return "computes only windows on Ampere, without sinks and gradients: use flex"
    if torch.are_deterministic_algorithms_enabled() and needs_mask and inputs.needs_grad and not _is_warned():
        # a mask over few gathered tokens has no tables of blocks
        is_whole = not inputs.is_compiling and call.chosen is None and call.tokens.is_empty
        if is_whole and not any(part.has_tables for part in listed_parts(call.layout.fitted)):
            return None
        return "adds gradients of blocks in any order, but torch must be deterministic: use flex or blocked"
    return None


# compiled programs take the result as a constant
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_warned() -> bool:
    """Return whether torch only warns of algorithms that are not deterministic."""
    return torch.is_deterministic_algorithms_warn_only_enabled()


# compiled programs take the result as a constant
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_known_at_any_length(text: str) -> bool:
    pattern = read_call_text(text)[0]
    return is_expression(pattern) and not pattern.depends_on_length


def is_fastest(call: AttentionCall) -> bool:
    """Return False: others may be faster."""
    return False


def cost(call: AttentionCall) -> float:
    """Return the estimated time for one example in scores of dense attention."""
    if call.chosen is not None:
        # used only by name: it has not been measured on a GPU
        return inf
    costs, work = costs_of(call), work_of(call.layout.fitted)
    fixed = costs.flash_call * work.num_kernels / call.inputs.batch_size
    return fixed + costs.flash * work.num_pairs + SCORES_PER_JOINED_ROW * call.layout.num_rows * work.num_joined


def rank(call: AttentionCall) -> int | None:
    """Return its rank, before flex."""
    return None if call.layout.num_queries == 1 or call.chosen is not None else RANK


def remark(call: AttentionCall) -> str:
    """Return what it computes."""
    if call.chosen is not None:
        return "flash computes all tiles that hold a selected pair, perhaps all of the pattern; auto never takes it."
    num_kernels = work_of(call.layout.fitted).num_kernels
    return f"flash computes the call with {num_kernels} kernel{'s' * (num_kernels > 1)} of FlashAttention-4."


def computed_pairs(call: AttentionCall) -> int:
    """Return how many scores its kernels compute, in all heads."""
    return min(work_of(call.layout.fitted).num_pairs, call.layout.num_pairs)


def working_bytes(call: AttentionCall) -> int:
    """Return the memory of the outputs that are joined, and of tables of blocks."""
    layout, inputs = call.layout, call.inputs
    num_joined = work_of(layout.fitted).num_joined
    outputs = (num_joined + (num_joined > 0)) * layout.num_rows * inputs.value_dim * inputs.dtype.itemsize
    return outputs + BYTES_PER_TILE * layout.num_pairs // layout.num_heads // TILE_PAIRS
