"""Attention by torch's flex_attention: one fused kernel, compiled at the first call of a new kind (seconds).

The compiled function of a kind is kept, so that another length, batch or random draw finds it again. On CPU flex has no
backward pass and no lse: gradients are refused by `why_not`, lse is computed apart.

Not within a `torch.compile` of the caller's: the tables of blocks are made of Python numbers, which depend on the
lengths and on the documents of the batch. Of lengths that are symbols, and of masks, a compiler knows no numbers, so
that only calls of one fixed length without any mask could be traced, with tables that are constants of the program. A
custom operator around the compiled kernel, as `blocked` is one, would be opaque, but torch differentiates flex only
within its own compiled function: the backward pass would compute the forward pass once more.
"""

import dataclasses
import shutil
from collections.abc import Callable, Sequence
from copy import copy
from functools import lru_cache, partial
from importlib.util import find_spec
from itertools import count
from math import inf
from os import environ
from types import FunctionType
from typing import cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask, flex_attention
from torch.nn.functional import pad

from hf_efficient_attn.layout.blocks.table import CACHE_BYTES, Documents, block_table
from hf_efficient_attn.layout.cache import cached
from hf_efficient_attn.layout.call import AttentionCall
from hf_efficient_attn.layout.dense import is_idle, row_lse
from hf_efficient_attn.layout.layout import Layout
from hf_efficient_attn.layout.sinks import cap, join_sinks
from hf_efficient_attn.layout.terms import Term
from hf_efficient_attn.layout.token_tables import TokenTables, token_tables
from hf_efficient_attn.patterns.pattern import Pattern

NAME = "flex"
_numbers = count()
# (queries, keys) per block, in tokens: on CPUs short blocks waste fewer scores and are as fast
BLOCK_SIZES = {"cpu": (32, 64), "cuda": (128, 128)}
CUDA_MIN_HEAD_DIM = 16
# in scores of dense attention; not measured on a GPU
SCORES_PER_SCORE = 1.2
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# (batch, head, query, key) -> allowed, and (score, batch, head, query, key) -> score: tensors of indices
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def why_not(call: AttentionCall) -> str | None:
    """Return one sentence that says why this backend cannot compute the call; None: it can."""
    inputs, pattern = call.inputs, call.layout.pattern
    device, dim = inputs.device, min(inputs.head_dim, inputs.value_dim)
    reasons = {
        f"flex runs on cpu and cuda, not on {device}: use blocked or sdpa.": device not in ("cpu", "cuda"),
        f"flex computes in float32, bfloat16 and float16, not in {inputs.dtype}: use blocked or sdpa.": (
            inputs.dtype not in DTYPES
        ),
        f"flex cannot drop weights (dropout is {call.dropout}): use blocked or sdpa.": call.dropout > 0,
        "flex has no backward pass on cpu: use blocked or sdpa, or torch.no_grad().": (
            device == "cpu" and inputs.needs_grad
        ),
        f"flex needs head sizes of at least {CUDA_MIN_HEAD_DIM} on cuda, not {dim}: use blocked or sdpa.": (
            device == "cuda" and dim < CUDA_MIN_HEAD_DIM
        ),
        "flex compiles its own kernel, which a torch.compile around it cannot trace: use blocked or sdpa there.": (
            inputs.is_compiling
        ),
        f"flex computes one pattern a call, and {pattern.kind} is drawn anew for the length of every document: use "
        "blocked or sdpa.": not call.tokens.is_empty and pattern.depends_on_length,
        f"flex would compile {pattern.kind} for minutes, as its rows are long: use blocked or sdpa.": (
            not all(drawn.is_traceable for _, _, drawn in call.layout.head_groups())
        ),
        "flex gives no log-sum-exp on cpu, which sinks need: use blocked.": device == "cpu" and call.sinks is not None,
        _not_installed(device): not _compiler(device)[1],
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def missing(call: AttentionCall) -> str | None:
    """Return what must be installed for this backend to compute the call, if nothing else is in its way; else None."""
    name, is_there = _compiler(call.inputs.device)
    return None if is_there or why_not(call) != _not_installed(call.inputs.device) else name


def _not_installed(device: str) -> str:
    return f"flex needs {_compiler(device)[0]}, which is not installed: use blocked or sdpa."


def cost(call: AttentionCall) -> float:
    """Return the scores of all blocks that hold an allowed pair; infinity where a kernel is worth no compilation.

    A single query, a step of cached decoding, has a length of its own, for which the blocks would be listed anew.
    """
    if call.inputs.device == "cpu" or call.layout.num_queries == 1:
        return inf
    return SCORES_PER_SCORE * computed_pairs(call)


def remark(call: AttentionCall) -> str:
    """Return why it may not be taken."""
    if call.inputs.device == "cpu":
        return "flex compiles a kernel for seconds at its first call; on cpu it is taken only when asked for."
    if call.layout.num_queries == 1:
        return "flex would list the blocks of every step of cached decoding anew."
    return "flex computes whole blocks, allowed or not."


def computed_pairs(call: AttentionCall) -> int:
    """Return the scores of all blocks that hold an allowed pair, in all heads."""
    layout, block_size = call.layout, BLOCK_SIZES[call.inputs.device]
    table = block_table(layout, None, block_size, torch.device("cpu"))
    num_blocks = int(table.num_partial.sum() + table.num_full.sum())
    # one table may stand for all heads
    heads = layout.num_heads // table.num_full.shape[1]
    return min(num_blocks * heads * block_size[0] * block_size[1], layout.num_pairs)


def working_bytes(call: AttentionCall) -> int:
    """Return 0: what a kernel keeps beside its tensors is small."""
    return 0


@lru_cache
def _compiler(device: str) -> tuple[str, bool]:
    """Return what the kernels of a device are compiled with, and whether it is there."""
    if device == "cuda":
        return "triton", find_spec("triton") is not None
    compilers = [environ.get("CXX", "g++"), "clang++", "cl"]
    return "a C++ compiler", any(shutil.which(compiler.split()[0]) for compiler in compilers if compiler)


def attend(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, need_lse: bool = True) -> tuple[Tensor, Tensor | None]:
    """Return output and lse; see `Backend`. Ask `why_not` first."""
    layout, tokens, terms, scale = call.layout, call.tokens, call.terms, call.scale
    is_cpu = q.device.type == "cpu"
    if is_cpu:
        # flex refuses tensors that could have gradients even where none are recorded
        q, k, v = (
            tensor.detach() if any(_memory_order(tensor)) else tensor.detach().contiguous() for tensor in (q, k, v)
        )
    tables, documents = None, None
    if not is_idle(tokens):
        tables = _captured_tables(token_tables(tokens, layout.num_keys, q.device))
        documents = tuple(tokens.documents(q.shape[0], layout.num_keys))
    captured_terms = [dataclasses.replace(term, values=_captured(term.values, (0, 2))) for term in terms]
    place = Place(_offset(layout.query_offset, q.device), tables)
    mask_mod = _mask_mod(layout, place, q.device)
    score_mod = _score_mod(captured_terms, place, call.softcap) if terms or call.softcap is not None else None
    mask = _block_mask(layout, documents, q.device, mask_mod)
    need_lse = need_lse or call.sinks is not None
    kind = (
        (_structure_of(layout), place.kind),
        tuple((term.label, _kind_of(term.values)) for term in captured_terms),
        # torch compiles anew where one of these becomes 1
        tuple(size == 1 for size in (*mask.kv_indices.shape, q.shape[0], q.shape[2], k.shape[2])),
        (q.shape[1], k.shape[1], q.shape[3], v.shape[3], q.dtype, q.device, scale),
        (torch.is_grad_enabled(), need_lse, call.softcap),
        tuple((_memory_order(tensor), tuple(stride == 0 for stride in tensor.stride())) for tensor in (q, k, v)),
    )
    out, aux = _compiled(kind)(q, k, v, score_mod, mask, scale, AuxRequest(lse=need_lse and not is_cpu))
    if not need_lse:
        return out, None
    if call.sinks is not None:
        # why_not asks for a device whose kernels give it
        out, lse = join_sinks(out, cast(Tensor, aux.lse), call.sinks)
        masked = call.masked_queries
        return out, lse.detach() if masked is None else lse.detach().masked_fill(masked[..., 0], -torch.inf)
    return out, row_lse(q, k, call) if aux.lse is None else aux.lse.detach()


def _memory_order(tensor: Tensor) -> tuple[bool, bool]:
    """Return whether the tensor lies as [batch, heads, tokens, width], and whether as [batch, tokens, heads, width]."""
    return tensor.is_contiguous(), tensor.transpose(1, 2).is_contiguous()


def _captured(tensor: Tensor, dims: tuple[int, int]) -> Tensor:
    """Return the tensor, of a batch and a length in these dimensions, as a kernel captures it.

    torch 2.13 may write wrong code for CPUs where the size of a captured tensor varies. Few sizes occur if batch and
    length are powers of two; the entries that are added are never read.
    """
    if tensor.device.type != "cpu":
        return tensor
    added = [(1 << (size - 1).bit_length()) - size if dim in dims else 0 for dim, size in enumerate(tensor.shape)]
    return pad(tensor.detach(), [number for end in reversed(added) for number in (0, end)])


def _captured_tables(tables: TokenTables) -> TokenTables:
    documents, positions = (_captured(tensor, (0, 1)) for tensor in (tables.documents, tables.positions))
    return TokenTables(documents, positions, None if tables.is_global is None else _captured(tables.is_global, (0, 1)))


def _kind_of(captured: Tensor) -> object:
    sizes = (size if captured.device.type == "cpu" else size > 1 for size in captured.shape)
    return captured.dtype, tuple(sizes)


@lru_cache(maxsize=256)
def _compiled(kind: object) -> Callable[..., tuple[Tensor, AuxOutput]]:
    """Return the function compiled for calls of one kind, whatever their lengths.

    torch counts how often a piece of code was compiled, gives up after a few times, and takes for variable what
    differed between calls of code of the same name: every kind gets its own code and name.
    """
    own = FunctionType(_flex.__code__.replace(co_name=f"flex_{next(_numbers)}"), _flex.__globals__)
    return torch.compile(own, fullgraph=True)


def _flex(
    q: Tensor, k: Tensor, v: Tensor, score_mod: ScoreMod | None, mask: BlockMask, scale: float, aux: AuxRequest
) -> tuple[Tensor, AuxOutput]:
    return flex_attention(q, k, v, score_mod, mask, scale, enable_gqa=True, return_aux=aux)


@dataclasses.dataclass(frozen=True)
class Place:
    """Turns the indices of a kernel into positions.

    Attributes:
        offset: position of the first query, an int tensor of no dimension; None: 0.
        tables: of the tokens, where examples differ.
    """

    offset: Tensor | None
    tables: TokenTables | None

    @property
    def kind(self) -> object:
        """What a compiled program depends on."""
        if self.tables is None:
            return self.offset is None
        return self.offset is None, self.tables.is_global is None, _kind_of(self.tables.positions)

    def query(self, index: Tensor) -> Tensor:
        """Return the position of a query on the axis of the keys."""
        return index if self.offset is None else index + self.offset

    def positions(self, example: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return the positions of a query and a key within their documents."""
        if self.tables is None:
            return self.query(query), key
        return self.tables.positions[example, self.query(query)], self.tables.positions[example, key]


@cached()
def _offset(query_offset: int, device: torch.device) -> Tensor | None:
    return torch.tensor(query_offset, device=device) if query_offset else None


def _mask_mod(layout: Layout, place: Place, device: torch.device) -> MaskMod:
    groups = _groups(layout, device)

    def of_pattern(example: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        positions = place.positions(example, query, key)
        allowed = groups[0][1].allowed(*positions)
        for first, pattern in groups[1:]:
            allowed = torch.where(head >= first, pattern.allowed(*positions), allowed)
        return allowed

    tables = place.tables
    if tables is None:
        return of_pattern
    is_causal = layout.pattern.is_causal

    def of_tokens(example: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        allowed = of_pattern(example, head, query, key)
        row = place.query(query)
        if tables.is_global is not None:
            chosen = tables.is_global[example, row] | tables.is_global[example, key]
            allowed = allowed | (chosen & (key <= row) if is_causal else chosen)
        document = tables.documents[example, key]
        return allowed & (tables.documents[example, row] == document) & (document >= 0)

    return of_tokens


def _score_mod(terms: Sequence[Term], place: Place, softcap: float | None) -> ScoreMod:
    def with_terms(score: Tensor, example: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        score = cap(score, softcap)
        positions = place.positions(example, query, key)
        for term in terms:
            label = term.label.of(*positions)
            indices = (example, head, query, label.clamp(0, term.label.num_values - 1))
            # a dimension of size 1 is read at 0; flex wants tensors as indices
            sizes = zip(indices, term.values.shape, strict=True)
            value = term.values[tuple(index if size > 1 else index * 0 for index, size in sizes)]
            score = score + term.label.score(value, label)
        return score

    return with_terms


def _block_mask(layout: Layout, documents: Documents | None, device: torch.device, mask_mod: MaskMod) -> BlockMask:
    mask = copy(_blocks(layout, documents, device))
    mask.mask_mod = mask_mod
    return mask


@cached(CACHE_BYTES)
def _blocks(layout: Layout, documents: Documents | None, device: torch.device) -> BlockMask:
    block_size = BLOCK_SIZES[device.type]
    table = block_table(layout, documents, block_size, device)
    return BlockMask.from_kv_blocks(
        table.num_partial,
        table.partial,
        table.num_full,
        table.full,
        BLOCK_SIZE=block_size,
        seq_lengths=(layout.num_queries, layout.num_keys),
        # the transpose serves the backward pass, which CPUs do not have
        compute_q_blocks=device.type != "cpu",
    )


@cached()
def _groups(layout: Layout, device: torch.device) -> tuple[tuple[int, Pattern], ...]:
    """Return (first head, pattern with tensors as lookup tables) of each run of heads with equal patterns."""
    groups = layout.head_groups()
    for _, _, pattern in groups:
        # the compiler cannot trace what a pattern computes once and keeps; it finds it kept
        pattern.allowed(0, 0)
    convert = partial(torch.tensor, device=device)
    return tuple((first, pattern.with_tables(convert)) for first, _, pattern in groups)


@cached()
def _structure_of(layout: Layout) -> object:
    return layout.pattern.is_causal, tuple((first, _structure(pattern)) for first, _, pattern in layout.head_groups())


def _structure(pattern: Pattern) -> object:
    """Return all of a pattern that its compiled form depends on: everything but the entries of lookup tables.

    The lengths of tables belong to it, since torch 2.13 writes wrong code for CPUs where they vary.
    """
    if pattern.parts:
        fields = (getattr(pattern, field.name) for field in dataclasses.fields(pattern))  # type: ignore[arg-type]
        numbers = tuple(value for value in fields if isinstance(value, int | str | None))
        return pattern.kind, numbers, tuple(_structure(part) for part in pattern.parts)
    return (pattern.kind, *pattern.table_sizes) if pattern.table_sizes else pattern
