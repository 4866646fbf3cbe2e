"""The attention of one layer whose sequence is divided among processes, each of which computes its own tokens' rows."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import get_eval_frame_callback

from hf_efficient_attn.attention.build_call import LayerPattern, checked_states
from hf_efficient_attn.attention.sharded.halo import attend_halo
from hf_efficient_attn.attention.sharded.plan import HeadSizes, Traffic, gather_traffic, halo_traffic, heads_traffic
from hf_efficient_attn.attention.sharded.shards import (
    AUTO,
    HALO,
    HEADS,
    Bounds,
    KeyExchange,
    Scores,
    SequenceShards,
    ShardedCall,
    TokenSequence,
    key_exchange,
    sequences_of,
    shard_bounds,
)
from hf_efficient_attn.attention.sharded.ulysses import attend_heads, is_by_query, refuse_few_heads, refuse_halo
from hf_efficient_attn.attention.sharded.wide_queries import with_wide_queries
from hf_efficient_attn.errors import InputError, UnsupportedBackendError
from hf_efficient_attn.layout.call import AttentionCall
from hf_efficient_attn.layout.layout import Layout, drawn_layer
from hf_efficient_attn.layout.score_terms import Term
from hf_efficient_attn.layout.token_mask import Document, TokenMask
from hf_efficient_attn.messages import shown, shown_bytes
from hf_efficient_attn.patterns.bands import Causal
from hf_efficient_attn.patterns.intervals import union
from hf_efficient_attn.patterns.pattern import Pattern


def attend_shard(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layer_spec: LayerPattern,
    shards: SequenceShards,
    tokens: TokenMask,
    scale: float,
    dropout: float = 0.0,
    terms: Sequence[Term] = (),
    sinks: Tensor | None = None,
    softcap: float | None = None,
    backend: str = AUTO,
) -> Tensor:
    """Return the output [B, H, n, Dv] of this process's tokens, as one process with the whole sequence would.

    Args:
        query, key, value: the states of this process's tokens, [B, H or Hkv, n, D or Dv].
        tokens: the mask of the whole sequence, the same in every process. It gives the length of the sequence, from
            which `shard_bounds` computes which tokens belong to which process.
        terms: terms with values for the queries of this process.
        scale, dropout, sinks, softcap, backend: as for `attention`.

    Raises:
        InputError: the states have another number of tokens, or there is no mask.
        ConfigurationError: there are fewer heads than processes, but heads must be divided.
        UnsupportedBackendError: in mode "halo", the labels of terms cannot be known; or the code is being compiled.
    """
    refuse_compiled()
    if tokens.shape is None:
        raise InputError("The length of the sequence over all processes is unknown. Give its mask (key_mask).")
    num_tokens = tokens.shape[1]
    bounds = shard_bounds(num_tokens, shards.size)
    first, stop = bounds[shards.rank]
    if not query.shape[2] == key.shape[2] == stop - first:
        raise InputError(
            f"Process {shards.rank} holds tokens {first} to {stop - 1} of {num_tokens}, but got {query.shape[2]} "
            f"queries and {key.shape[2]} keys. Attention to keys of earlier calls (a cache) is not supported. Call "
            "without a cache."
        )
    query, key, value = checked_states(query, key, value)
    layout = Layout(
        layer_spec.pattern,
        query.shape[1],
        num_tokens,
        num_tokens,
        layer=drawn_layer(layer_spec.pattern, layer_spec.layer),
        first_head=layer_spec.first_head,
        num_model_heads=layer_spec.num_model_heads,
    )
    tokens.check(query.shape[0], num_tokens, query.device)
    examples = sequences_of(tokens, query.shape[0], num_tokens)
    scores = Scores(scale, tuple(terms), sinks, softcap, dropout, backend)
    term_values = sum(each.values.shape[3] for each in terms if is_by_query(each, bounds))
    sizes = HeadSizes(query.shape[1], key.shape[1], query.shape[3], value.shape[3], term_values)
    exchange, traffic = exchange_of(layout, tuple(dict.fromkeys(examples)), bounds, sizes, shards.mode, bool(terms))
    call = ShardedCall(layout, tokens, shards, bounds, examples, exchange, scores)
    if traffic.mode == HEADS:
        return attend_heads(query, key, value, call)
    out = attend_halo(query, key, value, call)
    return with_wide_queries(out, query, key, value, call) if exchange.wide else out


def refuse_compiled() -> None:
    """Raise UnsupportedBackendError in code that is being compiled.

    torch.compile runs a function that raises without compiling it, but would then compile the functions that it calls;
    that is refused as well.
    """
    if torch.compiler.is_compiling() or get_eval_frame_callback() is not None:
        raise UnsupportedBackendError(
            "A model whose sequences are shared by processes (shard_sequence) cannot be compiled. Call it without "
            "torch.compile."
        )


def refuse_on_shards(has_matrix: bool, has_bias: bool, need_weights: bool, has_selected_keys: bool = False) -> None:
    """Raise UnsupportedBackendError for what a process that holds a part of a sequence cannot compute."""
    requested = {
        "a mask that is a matrix": has_matrix,
        "scores with a matrix added (a position bias)": has_bias,
        "attention weights (output_attentions)": need_weights,
        "keys that are selected by content": has_selected_keys,
    }
    for what, is_requested in requested.items():
        if is_requested:
            raise UnsupportedBackendError(
                f"A sequence that processes share (shard_sequence) cannot be computed with {what}. Leave that out, or "
                "call shard_sequence(model, None)."
            )


def exchange_of(
    layout: Layout,
    sequences: tuple[TokenSequence, ...],
    bounds: Bounds,
    sizes: HeadSizes,
    mode: str = AUTO,
    has_terms: bool = False,
) -> tuple[KeyExchange, Traffic]:
    """Return what a layer exchanges in the requested mode; for "auto", the one whose busiest process receives least.

    "auto" divides heads only if all processes get the same number of them, or if keys cannot be exchanged.

    Args:
        layout: the layout of whole sequences.
        sequences: the distinct sequences of the batch.
        has_terms: whether scores have learned parts, whose labels the halo preserves only between neighbours.

    Raises:
        ConfigurationError: there are fewer heads than processes, but heads must be divided.
    """
    if layout.pattern.chooses_by_content:
        # a choice needs all keys of a head
        refuse_halo(mode, f"{shown(layout.pattern)} selects among all keys of a head")
        mode, layout = HEADS, replace(layout, pattern=Causal())
    exchange = key_exchange(layout, sequences, bounds, not has_terms, sizes.num_heads // sizes.num_key_heads)
    halo = halo_traffic(exchange, bounds, sizes)
    if mode == HEADS:
        refuse_few_heads(sizes.num_heads, len(bounds))
    if mode == HALO or sizes.num_heads < len(bounds):
        return exchange, halo
    heads = heads_traffic(bounds, sizes)
    if mode == HEADS or (has_terms and not keeps_distances(layout.pattern, exchange, bounds)):
        return exchange, heads
    is_even = sizes.num_heads % len(bounds) == 0
    return exchange, heads if is_even and heads.most < halo.most else halo


def keeps_distances(pattern: Pattern, exchange: KeyExchange, bounds: Bounds) -> bool:
    """Return whether the distances of every process's queries and keys are those in the sequence."""
    held = [union((*wanted, own)) for wanted, own in zip(exchange.wanted, bounds, strict=True)]
    return pattern.period == 1 and all(len(intervals) == 1 for intervals in held)


# The bytes that the processes that share a sequence would send in one layer.


# the bytes of at most this many processes are listed one by one
NAMED_RANKS = 8
# log-sum-exp and the outputs that it joins are at least in single precision
REDUCED_BYTES = 4


def shown_ranks(sent: tuple[int, ...]) -> str:
    """Return the bytes that processes send as text, in the order of ranks if they differ and are few.

    >>> shown_ranks((2048, 2048)), shown_ranks((0, 100)), shown_ranks((0, *[2**21] * 8))
    ('2.00 KiB each', '0 bytes, 100 bytes', '0 bytes to 2.00 MiB each')
    """
    least, most = min(sent), max(sent)
    if least == most:
        return f"{shown_bytes(most)} each"
    if len(sent) > NAMED_RANKS:
        return f"{shown_bytes(least)} to {shown_bytes(most)} each"
    return ", ".join(map(shown_bytes, sent))


@dataclass(frozen=True)
class LayerExchange:
    """What processes send each other in one layer for one example, a sequence without padding; it prints as a line.

    Attributes:
        mode: "halo" (the keys around each shard) or "heads".
        forward_bytes, backward_bytes: the bytes that each process sends to others, in the order of ranks.
        reduced_bytes: the bytes that all processes add up (all-reduce) forward and backward, for the outputs of global
            tokens.
        gathered_bytes: the bytes that a process would send forward, and again backward, if every process had all keys
            and values.
    """

    mode: str
    forward_bytes: tuple[int, ...]
    backward_bytes: tuple[int, ...]
    reduced_bytes: tuple[int, int]
    gathered_bytes: int

    def __str__(self) -> str:
        added = sum(self.reduced_bytes)
        with_all = f"; each adds up {shown_bytes(added)} with all" if added else ""
        return (
            f"{self.mode} among {len(self.forward_bytes)} processes, which send forward "
            f"{shown_ranks(self.forward_bytes)}; backward {shown_ranks(self.backward_bytes)}{with_all} "
            f"(with all keys at all processes: {shown_bytes(self.gathered_bytes)} each way)"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return everything in JSON types."""
        return {name: list(each) if isinstance(each, tuple) else each for name, each in asdict(self).items()}


def layer_exchange(call: AttentionCall, has_bias: bool, num_processes: int, mode: str) -> LayerExchange:
    """Return what processes that share a sequence send for a call; `call` is that of one process with all of it.

    Raises:
        InputError: queries and keys are not one sequence, or there are fewer tokens than processes.
        ConfigurationError: there are fewer heads than processes, but heads must be divided.
        UnsupportedBackendError: a matrix is added to the scores.
    """
    layout, inputs = call.layout, call.inputs
    refuse_on_shards(False, has_bias, False)
    if layout.is_cross or layout.num_queries != layout.num_keys:
        raise InputError(
            f"Processes can share a sequence only in self-attention, but there are {layout.num_queries} queries and "
            f"{layout.num_keys} keys{' of another sequence' if layout.is_cross else ''}. Leave out sequence_ranks."
        )
    # a single value, such as a span, is the same for all queries
    by_query = [each for each in call.terms if each.label.num_values > 1 and each.values.shape[2] > 1]
    term_values = sum(each.label.num_values for each in by_query)
    sizes = HeadSizes(layout.num_heads, inputs.num_key_heads, inputs.head_dim, inputs.value_dim, term_values)
    bounds = shard_bounds(layout.num_keys, num_processes)
    width = inputs.dtype.itemsize
    gathered = max(gather_traffic(bounds, sizes).sent) * width
    sequence = TokenSequence((Document(0, layout.num_keys),), ((0, layout.num_keys),))
    _, traffic = exchange_of(layout, (sequence,), bounds, sizes, mode, bool(call.terms))
    reduced = (traffic.reduced * max(width, REDUCED_BYTES), traffic.reduced_backward * max(width, REDUCED_BYTES))
    return LayerExchange(
        traffic.mode,
        tuple(count * width for count in traffic.sent),
        tuple(count * width for count in traffic.received),
        reduced,
        gathered,
    )
