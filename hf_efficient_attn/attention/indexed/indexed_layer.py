"""What a layer with an indexer reads, and what its indexer learns from that."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_efficient_attn.attention.indexed.config_field import INDEXER
from hf_efficient_attn.attention.indexed.index_loss import Target, index_loss, index_recall
from hf_efficient_attn.attention.indexed.kept_states import keeping
from hf_efficient_attn.attention.indexed.lightning_indexer import DENSE, SPARSE, IndexStates
from hf_efficient_attn.attention.key_tokens import QueryOffset, unknown_start
from hf_efficient_attn.attention.layer_patterns import LayerPattern
from hf_efficient_attn.attention.model_heads import head_group
from hf_efficient_attn.attention.sharded.sequence_shards import shards_of
from hf_efficient_attn.errors import InputError, UnsupportedBackendError
from hf_efficient_attn.layout.listed_keys import ChosenTokens
from hf_efficient_attn.layout.selected_keys import ChosenKeys
from hf_efficient_attn.layout.token_locations import token_locations
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.layout.top_k import choose_tokens
from hf_efficient_attn.patterns.bands import Causal

# keyword arguments that travel through a model to its attention function: the states of a layer's indexer, and the
# `LayerNumbers` to which layers add their losses, and the share of the attention that their choices have
STATES, LOSSES, RECALLS = "index_states", "index_losses", "index_recalls"
# what the scores of the target do not have
OTHER_SCORES = ("s_aux", "softcap", "position_bias")


def indexed_choice(
    module: nn.Module,
    options: Mapping[str, Any],
    followed: LayerPattern,
    tokens: TokenMask,
    query_offset: QueryOffset,
    matrix: Tensor | None,
    query: Tensor,
    key: Tensor,
    scale: float,
    chosen: ChosenKeys | None,
) -> ChosenKeys | None:
    """Return the keys that a layer's indexer has chosen, None for all; without one that scores, what was chosen.

    Args:
        options: keyword arguments of the attention call.
        matrix: a mask over all pairs that the user gave.

    Raises:
        InputError: a cache whose first tokens were read without the indexer.
        UnsupportedBackendError: scores or masks that an indexer does not know.
    """
    field = getattr(module.config, INDEXER, None)
    if field is None or field["stage"] == DENSE:
        return chosen
    check_layer(module, options, followed, tokens, matrix)
    states: IndexStates = options[STATES]
    if states.keys.shape[1] != key.shape[2]:
        raise InputError(
            f"There are {key.shape[2]} keys, but the indexer knows {states.keys.shape[1]} of them: the others were "
            "cached before index_stage turned it on. Give an empty cache."
        )
    needs_tokens = states.stage == SPARSE or options.get(RECALLS) is not None
    listed = chosen_tokens(states, tokens, query_offset) if needs_tokens else None
    learn(module, states, options, tokens, query_offset, query.detach(), key.detach(), scale, listed)
    return None if listed is None or states.stage != SPARSE else ChosenTokens(listed)


def check_layer(
    module: nn.Module, options: Mapping[str, Any], followed: LayerPattern, tokens: TokenMask, matrix: Tensor | None
) -> None:
    """Raise UnsupportedBackendError if a layer's scores or masks are not what its indexer learns from."""
    if options.get(STATES) is None:
        raise UnsupportedBackendError(
            f"{type(module).__name__} has an indexer (hea.index), but its attention did not get what the indexer says."
        )
    found = [name for name in OTHER_SCORES if options.get(name) is not None]
    if matrix is not None:
        found.append("a mask over all pairs")
    if not followed.is_own and followed.pattern != Causal():
        found.append("an attention_pattern")
    if tokens.global_mask is not None:
        found.append("global tokens")
    if found:
        raise UnsupportedBackendError(
            f"{type(module).__name__} has an indexer (hea.index), which does not work with {', '.join(found)}."
        )


def chosen_tokens(states: IndexStates, tokens: TokenMask, query_offset: QueryOffset) -> Tensor | None:
    """Return the keys that an indexer chooses, int [B, 1, Nq, top_k]; None: all."""
    # lengths may be symbols to a compiler
    if not torch.compiler.is_compiling() and states.keys.shape[1] <= states.top_k:
        return None
    start = unknown_start(query_offset)
    offset = first_position(states, None if start is not None else query_offset)
    given = (states.queries.detach(), states.keys.detach(), states.weights.detach())
    listed: Tensor = choose_tokens(*given, list(tokens.tensors), states.top_k, offset, start)
    return listed


def first_position(states: IndexStates, query_offset: QueryOffset) -> int:
    """Return the position of the first query."""
    return states.keys.shape[1] - states.queries.shape[1] if query_offset is None else int(query_offset)


def learn(
    module: nn.Module,
    states: IndexStates,
    options: Mapping[str, Any],
    tokens: TokenMask,
    query_offset: QueryOffset,
    query: Tensor,
    key: Tensor,
    scale: float,
    listed: Tensor | None,
) -> None:
    """Add the loss of an indexer, and the share of the attention that its choice has, to those of the options.

    Under tensor parallelism the processes add up what their heads read, so that all learn the same. Processes that
    share texts learn from the queries of all.
    """
    losses, recalls = options.get(LOSSES), options.get(RECALLS)
    if losses is None and recalls is None:
        return
    shards = shards_of(module)
    documents = token_locations(tokens, key.shape[2], key.device).documents
    target = Target(
        query,
        key,
        scale,
        documents,
        first_position(states, query_offset),
        group=head_group(module, query.shape[1]),
        sharing=None if shards is None else shards.group,
    )
    if losses is not None:
        is_dense = listed is None or states.stage != SPARSE
        read = None if is_dense else listed[:, 0]  # type: ignore[index]
        with keeping(states.stage):
            losses.add(index_loss(states.queries, states.keys, states.weights, replace(target, tokens=read)))
    if recalls is not None:
        all_of_it = query.new_ones(query.shape[0], query.shape[2])
        recalls.add(all_of_it if listed is None else index_recall(target, listed[:, 0]))
