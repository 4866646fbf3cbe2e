"""The attention of one layer whose text lies on several processes: each computes the rows of its own tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_efficient_attn.attention.call import checked_states
from hf_efficient_attn.attention.layer_patterns import LayerPattern
from hf_efficient_attn.attention.sharded.exchange import Exchange, Tie, route_of
from hf_efficient_attn.attention.sharded.halo import HeldKeys, Scores, attend_text
from hf_efficient_attn.attention.sharded.head_exchange import attend_heads
from hf_efficient_attn.attention.sharded.key_plan import KeyPlan, Text, plan_keys, texts_of
from hf_efficient_attn.attention.sharded.sequence_shards import AUTO, HALO, HEADS, Bounds, SequenceShards, shard_bounds
from hf_efficient_attn.attention.sharded.traffic import HeadSizes, Traffic, halo_traffic, heads_traffic
from hf_efficient_attn.attention.sharded.wide_queries import WideAttention, numbers_in, wide_part
from hf_efficient_attn.errors import ConfigurationError, InputError, UnsupportedBackendError
from hf_efficient_attn.layout.layout import Layout, drawn_layer
from hf_efficient_attn.layout.terms import Term
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.patterns.intervals import Intervals, intersect, size, union


def attend_shard(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    followed: LayerPattern,
    shards: SequenceShards,
    tokens: TokenMask,
    scale: float,
    dropout: float = 0.0,
    terms: Sequence[Term] = (),
    sinks: Tensor | None = None,
    softcap: float | None = None,
    backend: str = AUTO,
) -> Tensor:
    """Return the output [B, H, n, Dv] of this process's tokens, as one process with the whole text would.

    Args:
        query, key, value: [B, H or Hkv, n, D or Dv], of the tokens of this process.
        tokens: the mask of the whole text, the same in every process; it says how long the text is, and `shard_bounds`
            which of its tokens belong to which process.
        terms: with values for the queries of this process.
        scale, dropout, sinks, softcap, backend: as for `attention`.

    Raises:
        InputError: states of another number of tokens, or no mask.
        ConfigurationError: heads that the processes cannot divide, in mode "heads".
        UnsupportedBackendError: terms whose labels cannot be known, or code that is being compiled.
    """
    if torch.compiler.is_compiling():
        raise UnsupportedBackendError("A text over several processes cannot be compiled. Call the model without it.")
    if tokens.shape is None:
        raise InputError("The length of the text over all processes is unknown. Give its mask (key_mask).")
    num_tokens = tokens.shape[1]
    bounds = shard_bounds(num_tokens, shards.size)
    first, stop = bounds[shards.rank]
    if not query.shape[2] == key.shape[2] == stop - first:
        raise InputError(
            f"Process {shards.rank} holds tokens {first} to {stop - 1} of {num_tokens}, but got {query.shape[2]} "
            f"queries and {key.shape[2]} keys. Keys of earlier calls (a cache) cannot be read."
        )
    query, key, value = checked_states(query, key, value)
    layout = Layout(
        followed.pattern,
        query.shape[1],
        num_tokens,
        num_tokens,
        layer=drawn_layer(followed.pattern, followed.layer),
        first_head=followed.first_head,
        num_model_heads=followed.num_model_heads,
    )
    tokens.check(query.shape[0], num_tokens, query.device)
    examples = texts_of(tokens, query.shape[0], num_tokens)
    texts = tuple(dict.fromkeys(examples))
    scores = Scores(scale, tuple(terms), sinks, softcap, dropout, backend)
    sizes = HeadSizes(query.shape[1], key.shape[1], query.shape[3], value.shape[3])
    plan, traffic = plan_layer(layout, texts, bounds, sizes, shards.mode, bool(terms))
    if traffic.mode == HEADS:
        return attend_heads(query, key, value, layout, bounds, shards.rank, shards.group, tokens, scores)
    return _attend_halo(query, key, value, layout, shards, bounds, examples, texts, plan, scores)


def refuse_on_shards(matrix: Tensor | None, bias: Tensor | None, need_weights: bool) -> None:
    """Raise UnsupportedBackendError for what a process cannot compute of a text of which it holds a part."""
    asked = {
        "a mask that is a matrix": matrix is not None,
        "scores with a matrix added (ALiBi, a position bias)": bias is not None,
        "attention weights (output_attentions)": need_weights,
    }
    for what, is_asked in asked.items():
        if is_asked:
            raise UnsupportedBackendError(
                f"A text over several processes (shard_sequence) cannot be computed with {what}. Leave that out, or "
                "call shard_sequence(model, None)."
            )


def plan_layer(
    layout: Layout, texts: tuple[Text, ...], bounds: Bounds, sizes: HeadSizes, mode: str = AUTO, has_terms: bool = False
) -> tuple[KeyPlan, Traffic]:
    """Return what a layer exchanges, by the mode that was asked for, or that by which the busiest process gets least.

    Args:
        layout: of whole texts.
        texts: the different ones of the batch.
        has_terms: whether scores have learned parts, whose labels only the halo keeps.

    Raises:
        ConfigurationError: heads that the processes cannot divide, in mode "heads".
    """
    plan = plan_keys(layout, texts, bounds, not has_terms, sizes.num_heads // sizes.num_key_heads)
    halo = halo_traffic(plan, bounds, sizes)
    can_divide = sizes.num_heads % len(bounds) == 0 and not has_terms
    if mode == HEADS and not can_divide:
        what = "a layer with learned parts of scores" if has_terms else f"{sizes.num_heads} heads"
        raise ConfigurationError(f"mode='heads' cannot divide {what} among {len(bounds)} processes. Use mode='auto'.")
    if mode == HALO or not can_divide:
        return plan, halo
    heads = heads_traffic(bounds, sizes)
    return plan, heads if mode == HEADS or heads.most < halo.most else halo


def _attend_halo(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    shards: SequenceShards,
    bounds: Bounds,
    examples: Sequence[Text],
    texts: Sequence[Text],
    plan: KeyPlan,
    scores: Scores,
) -> Tensor:
    own = bounds[shards.rank]
    held = fetch(torch.cat((key, value), -1), shards, bounds, plan.wanted, key.shape[3])
    places = [[place for place, each in enumerate(examples) if each == text] for text in texts]
    outputs = []
    for text, members in zip(texts, places, strict=True):
        chosen = slice(None) if len(texts) == 1 else torch.tensor(members, device=query.device)
        some = HeldKeys(held.key[chosen], held.value[chosen], held.positions)
        terms = tuple(of_examples(term, chosen) for term in scores.terms)
        own_scores = Scores(scores.scale, terms, scores.sinks, scores.softcap, scores.dropout, scores.backend)
        outputs.append(attend_text(query[chosen], some, own[0], layout, text, own_scores))
    out = outputs[0]
    if len(texts) > 1:
        order = torch.tensor([place for members in places for place in members], device=query.device)
        out = torch.cat(outputs)[order.argsort()]
    out = Tie.apply(out, held.key, held.value)
    if not plan.wide:
        return out
    return _with_wide_queries(out, query, key, value, layout, shards, bounds, texts, places, plan, scores)


def of_examples(term: Term, chosen: slice | Tensor) -> Term:
    """Return a term of some examples."""
    return term if term.values.shape[0] == 1 else Term(term.values[chosen], term.label)


def fetch(
    states: Tensor, shards: SequenceShards, bounds: Bounds, wanted: Sequence[Intervals], head_dim: int
) -> HeldKeys:
    """Return the keys and values of this process and those that it wants, in the order of their positions.

    states: keys and values side by side, [B, Hkv, n, D + Dv].
    """
    rank = shards.rank
    rows = all_rows(states, shards, bounds, wanted)
    return HeldKeys(rows[..., :head_dim], rows[..., head_dim:], union(wanted[rank], (bounds[rank],)))


def all_rows(states: Tensor, shards: SequenceShards, bounds: Bounds, wanted: Sequence[Intervals]) -> Tensor:
    """Return the tokens of this process, [B, H, n, ·], among those that it gets from others, by their positions."""
    route = route_of(shards.rank, bounds, wanted)
    # every process takes part, even if it needs nothing
    received = Exchange.apply(states.permute(2, 0, 1, 3), route, shards.group).permute(1, 2, 0, 3)
    num_before = sum(route.num_received[: shards.rank])
    return torch.cat((received[:, :, :num_before], states, received[:, :, num_before:]), 2)


def _with_wide_queries(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    shards: SequenceShards,
    bounds: Bounds,
    texts: Sequence[Text],
    places: Sequence[Sequence[int]],
    plan: KeyPlan,
    scores: Scores,
) -> Tensor:
    """Return the output with the rows of wide queries replaced by what all processes compute of them."""
    device, (first, stop) = query.device, bounds[shards.rank]
    positions = plan.wide_positions
    own = intersect(positions, ((first, stop),))
    rows = numbers_in(own, device) - first
    # the other processes' queries come before and after those of this one
    wanted = [positions] * len(bounds)
    sent = query.index_select(2, rows)
    places_of_rows = place_bounds(positions, bounds)
    compact = ((0, size(positions)),)
    queries = all_rows(sent, shards, places_of_rows, [compact] * len(wanted))
    numbers = numbers_in(positions, device)
    parts = tuple(
        wide_part(
            wide, layout, texts[wide.text], torch.tensor(places[wide.text], device=device), numbers, (first, stop)
        )
        for wide in plan.wide
    )
    found = WideAttention.apply(queries, key, value, scores.sinks, parts, scores, shards.group)
    start, end = places_of_rows[shards.rank]
    is_wide = torch.zeros(*out.shape[::2], dtype=torch.bool, device=device)
    for part in parts:
        inside = part.rows[(part.rows >= start) & (part.rows < end)]
        is_wide[part.examples[:, None], (numbers[inside] - first)[None]] = True
    joined = torch.zeros_like(out).index_copy(2, rows, found[:, :, start:end])
    return torch.where(is_wide[:, None, :, None], joined, out)


def place_bounds(positions: Intervals, bounds: Bounds) -> Bounds:
    """Return the places, among some positions, of those that each process holds.

    >>> place_bounds(((0, 2), (5, 6)), ((0, 3), (3, 6)))
    ((0, 2), (2, 3))
    """
    edges = [0]
    for own in bounds:
        edges.append(edges[-1] + size(intersect(positions, (own,))))
    return tuple(zip(edges, edges[1:], strict=False))
