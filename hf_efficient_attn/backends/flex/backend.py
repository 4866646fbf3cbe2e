"""Attention by torch's flex_attention: one fused kernel, compiled for seconds at the first call of each kind.

The compiled function of a kind is kept and reused for other lengths, batches and random draws. On CPUs flex has no
backward pass and returns no lse: `why_not` refuses gradients, and lse is computed separately.

If the caller uses `torch.compile`, the call of flex_attention becomes part of the compiled program: an operator lists
the blocks at run time, for any lengths and masks, and torch differentiates and fuses the rest. Drawn patterns are
constants of the program, so that their length must be fixed.
"""

import shutil
from dataclasses import replace
from functools import lru_cache
from importlib.util import find_spec
from math import inf
from os import environ
from typing import cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from hf_efficient_attn.backends.flex.block_mask import BLOCK_SIZES, block_mask, order_of
from hf_efficient_attn.backends.flex.captured import by_pair, in_memory
from hf_efficient_attn.backends.flex.kernel import memory_order, run
from hf_efficient_attn.backends.flex.mods import (
    Dropout,
    Mods,
    draw_seed,
    is_drawn,
    is_length_known,
    is_traceable,
    mods_of,
)
from hf_efficient_attn.backends.machine_costs import costs_of, is_there
from hf_efficient_attn.layout.block_table import MAX_TABLE_BYTES, block_table, blocks_with_pairs, globals_first
from hf_efficient_attn.layout.call import AttentionCall, join_sinks
from hf_efficient_attn.layout.dense_mask import row_lse
from hf_efficient_attn.layout.listed_keys import ChosenBlocks
from hf_efficient_attn.layout.token_mask import NO_MASK
from hf_efficient_attn.layout.tracing import is_exporting

NAME = "flex"
RANK_WORTH_COMPILING = 20
# cost of a call with dropout, divided by that without: it also needs the log-sum-exp of the rows without dropout
DROPOUT_COST = 1.7
CUDA_MIN_HEAD_DIM = 16
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# most blocks of keys that a query may select: a kernel compares every pair with each of them
MOST_SELECTED = 64
# in the lists of partial and of full blocks
BYTES_PER_BLOCK = 8


def why_not(call: AttentionCall) -> str | None:
    """Return one sentence on why this backend cannot compute a call; None: it can."""
    device = call.inputs.device
    if call.query_start is not None:
        return "flex cannot compile a query_offset that is a tensor: use blocked."
    refused = _refused_selection(call) or _refused_inputs(call) or _refused_pattern(call)
    return refused or (None if _compiler(device)[1] else _not_installed(device))


def _refused_selection(call: AttentionCall) -> str | None:
    chosen = call.chosen
    if chosen is None:
        return None
    if not chosen.are_blocks:
        return "flex skips whole blocks of keys, so it computes selected keys only as ChosenBlocks: use gathered."
    num_read = cast(ChosenBlocks, chosen).blocks.shape[3]
    if num_read > MOST_SELECTED:
        return f"flex computes at most {MOST_SELECTED} selected blocks per query, not {num_read}: use gathered."
    if call.counts_from_other_documents:
        return (
            "flex cannot count blocks from the start of several documents of another sequence: use sdpa or "
            "reference, or counted_from='axis'."
        )
    # while compiling, lengths may be symbols
    is_known = not call.inputs.is_compiling and call.inputs.device in BLOCK_SIZES
    num_bytes = call.inputs.batch_size * working_bytes(call) if is_known else 0
    if num_bytes > MAX_TABLE_BYTES:
        return f"flex would need {num_bytes / 2**30:,.0f} GiB for tables of selected blocks: use gathered."
    return None


def _refused_inputs(call: AttentionCall) -> str | None:
    other = "blocked" if call.chosen is None else "gathered"
    inputs, dim = call.inputs, min(call.inputs.head_dim, call.inputs.value_dim)
    if inputs.device not in BLOCK_SIZES:
        return f"flex runs on cpu and cuda, not on {inputs.device}: use {other} or sdpa."
    if inputs.dtype not in DTYPES:
        return f"flex computes in float32, bfloat16 and float16, not in {inputs.dtype}: use {other} or sdpa."
    if call.dropout > 0 and inputs.device == "cpu":
        return f"flex returns no log-sum-exp on cpu, which dropout ({call.dropout}) needs: use {other} or sdpa."
    if inputs.device == "cpu" and inputs.needs_grad:
        return f"flex has no backward pass on cpu: use {other} or sdpa, or torch.no_grad()."
    if inputs.device == "cpu" and call.sinks is not None:
        return f"flex returns no log-sum-exp on cpu, which sinks need: use {other}."
    if inputs.device == "cuda" and dim < CUDA_MIN_HEAD_DIM:
        return f"flex needs head sizes of at least {CUDA_MIN_HEAD_DIM} on cuda, not {dim}: use {other} or sdpa."
    return _refused_program(call) if inputs.is_compiling else None


def _refused_program(call: AttentionCall) -> str | None:
    if is_exporting():
        return "flex is compiled for the current device and cannot be exported: use blocked or sdpa."
    if is_drawn(call.layout.pattern) and not is_length_known(call.layout):
        return (
            f"flex compiles {call.layout.pattern.kind} only for a fixed length, because it depends on the length: "
            "use torch.compile(..., dynamic=False), or blocked or sdpa."
        )
    if any(term.values.requires_grad and not is_parameter(term.values) for term in call.terms):
        # torch's trace of the backward pass loses the gradients of values that the program computes itself
        return "flex gives no gradients for terms that are computed in a compiled program: use blocked there."
    if call.inputs.device == "cpu" and (call.terms or call.chosen is not None or not call.tokens.is_empty):
        # with torch's compiler for CPUs, kernels cannot capture tensors that the program computes itself
        other = "blocked" if call.chosen is None else "gathered"
        return f"flex cannot be compiled on cpu with masks, terms or selected keys: use {other} or sdpa there."
    return None


def is_parameter(values: Tensor) -> bool:
    """Return whether the values of a term enter a compiled program, and then its kernel, unchanged."""
    return values.is_leaf and by_pair(values) is values


def _refused_pattern(call: AttentionCall) -> str | None:
    pattern = call.layout.pattern
    if not call.tokens.is_empty and call.layout.is_drawn_by_document:
        return (
            f"flex computes one pattern per call, but {pattern.kind} depends on the length of each document: use "
            "blocked or sdpa."
        )
    if not is_traceable(call.layout):
        return f"flex would compile {pattern.kind} for minutes, because its rows are long: use blocked or sdpa."
    return None


def missing(call: AttentionCall) -> str | None:
    """Return what must be installed if that alone keeps this backend from computing the call; otherwise None."""
    name, is_there = _compiler(call.inputs.device)
    return None if is_there or why_not(call) != _not_installed(call.inputs.device) else name


def _not_installed(device: str) -> str:
    return f"flex needs {_compiler(device)[0]}, which is not installed: use blocked or sdpa."


def is_fastest(call: AttentionCall) -> bool:
    """Return False: others may be faster."""
    return False


def cost(call: AttentionCall) -> float:
    """Return the estimated time for one example in scores of dense attention; infinite if used only by name."""
    if is_only_by_name(call):
        return inf
    costs = costs_of(call)
    one = costs.flex_call / call.inputs.batch_size + costs.flex * computed_pairs(call)
    return one * (DROPOUT_COST if call.dropout > 0 else 1.0)


def rank(call: AttentionCall) -> int | None:
    """Return its rank if compiling is worth it, otherwise None."""
    return None if is_only_by_name(call) else RANK_WORTH_COMPILING


def is_only_by_name(call: AttentionCall) -> bool:
    """Return whether "auto" leaves a call to others: on CPUs, for a step of cached decoding, and for selected keys.

    Each decoding step has another length, for which the blocks would have to be listed again. Selected keys have not
    been measured on a GPU, and their cost depends on contents of tensors, which would have to be read from the device.
    """
    return call.chosen is not None or call.inputs.device == "cpu" or call.layout.num_queries == 1


def remark(call: AttentionCall) -> str:
    """Return why it may not be chosen."""
    if call.inputs.device == "cpu":
        return "flex compiles a kernel for seconds at its first call; on cpu, auto never takes it."
    if call.layout.num_queries == 1:
        return "flex would list the blocks again at every step of cached decoding."
    if call.chosen is not None:
        queries, keys = BLOCK_SIZES[call.inputs.device]
        return (
            f"flex computes each block of {keys} keys with a key that any of {queries} neighbouring queries selects, "
            "perhaps all that the pattern allows; auto never takes it."
        )
    return "flex computes whole blocks, including pairs that are not allowed."


def computed_pairs(call: AttentionCall) -> int:
    """Return the number of scores in all blocks that hold an allowed pair, in all heads.

    With selected blocks, those of the first example are counted; without their contents, all that the pattern allows.
    """
    layout, block_size, chosen = call.layout, BLOCK_SIZES[call.inputs.device], cast(ChosenBlocks | None, call.chosen)
    if chosen is not None and chosen.blocks.device.type != "meta":
        first = replace(chosen, blocks=chosen.blocks[:1])
        partial, full = blocks_with_pairs(first, layout, NO_MASK, None, block_size, chosen.blocks.device)
        num_blocks, num_tables = int((partial | full).sum()), partial.shape[1]
    else:
        order = globals_first(layout, None) if chosen is None else None
        table = block_table(layout, None, block_size, torch.device("cpu"), order)
        num_blocks, num_tables = int(table.num_partial.sum() + table.num_full.sum()), table.num_full.shape[1]
    # all heads may share one table
    num_pairs = num_blocks * layout.num_heads // num_tables * block_size[0] * block_size[1]
    return min(num_pairs, layout.num_pairs)


def working_bytes(call: AttentionCall) -> int:
    """Return the memory of the tables of selected blocks, one per head; a kernel needs little else but its tensors."""
    if call.chosen is None:
        return 0
    layout, sizes = call.layout, BLOCK_SIZES[call.inputs.device]
    num_blocks = layout.num_heads * -(-layout.num_queries // sizes[0]) * -(-layout.num_keys // sizes[1])
    return BYTES_PER_BLOCK * num_blocks * (2 if call.inputs.needs_grad else 1)


# compiled programs take the result as a constant
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _compiler(device: str) -> tuple[str, bool]:
    return _found_compiler(device)


@lru_cache
def _found_compiler(device: str) -> tuple[str, bool]:
    """Return the name of the compiler for a device's kernels, and whether it is installed."""
    if device == "cuda":
        # a GPU that is only explained is assumed to have it
        return "triton", find_spec("triton") is not None or not is_there(device)
    compilers = [environ.get("CXX", "g++"), "clang++", "cl"]
    return "a C++ compiler", any(shutil.which(compiler.split()[0]) for compiler in compilers if compiler)


def attend(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, need_lse: bool = True) -> tuple[Tensor, Tensor | None]:
    """Return output and lse; see `Backend`. Ask `why_not` first."""
    is_cpu = call.inputs.device == "cpu"
    if is_cpu:
        # flex refuses tensors that require gradients even if none are recorded
        q, k, v = (
            tensor.detach() if any(memory_order(tensor)) else tensor.detach().contiguous() for tensor in (q, k, v)
        )
    need_lse = need_lse or call.sinks is not None
    out, lse = _in_best_order(q, k, v, call, need_lse and not is_cpu)
    if not need_lse:
        return out, None
    if call.sinks is not None:
        # `why_not` has refused devices whose kernels return no lse
        out, lse = join_sinks(out, cast(Tensor, lse), call.sinks)
        masked = call.masked_queries
        lse = lse if masked is None else lse.masked_fill(masked[..., 0], -torch.inf)
    lse = row_lse(q, k, call) if lse is None else lse
    return out, lse if call.lse_needs_grad else lse.detach()


def _in_best_order(
    q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, need_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Return output and, if needed, lse, computed in an order of tokens in which few blocks hold allowed pairs."""
    order = order_of(call, q.device)
    if order is None:
        mods = mods_of(call, q.device)
        return _kernel(q, k, v, call, mods, block_mask(call, q.device, mods.mask_mod), need_lse)
    mods = mods_of(call, q.device, order=order.positions)
    mask = block_mask(call, q.device, mods.mask_mod, order.kind)
    q, k, v = (order.sort(each) for each in (q, k, v))
    out, lse = _kernel(q, k, v, call, mods, mask, need_lse)
    return order.sort_back(out), None if lse is None else order.sort_back(lse)


def _kernel(
    q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, mods: Mods, mask: BlockMask, need_lse: bool
) -> tuple[Tensor, Tensor | None]:
    if call.dropout > 0:
        return _dropped(q, k, v, call, mods, mask)
    out, aux = run(q, k, v, mods, mask, call.scale, need_lse)
    return out, aux.lse


def _dropped(
    q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, mods: Mods, mask: BlockMask
) -> tuple[Tensor, Tensor]:
    """Return the output with dropout, and the lse of the rows without it.

    A weight exp(s) / Z is kept, divided by 1 - p, or dropped. A kernel whose dropped scores are -inf divides by the sum
    of the others, Z', instead; so its output is multiplied by Z' / Z / (1 - p).
    """
    seed = draw_seed(q.device)
    dropout = Dropout(call.dropout, in_memory(seed) if torch.compiler.is_compiling() else seed)
    # only its lse is used
    _, whole = run(q, k, v.detach()[..., :CUDA_MIN_HEAD_DIM], mods, mask, call.scale, need_lse=True)
    out, kept = run(q, k, v, mods.with_dropout(dropout), mask, call.scale, need_lse=True)
    total = cast(Tensor, whole.lse)
    # 0 for rows without keys
    share = (cast(Tensor, kept.lse) - total.masked_fill(total == -torch.inf, 0.0)).exp() / (1.0 - call.dropout)
    return (out * share[..., None]).to(q.dtype), total
