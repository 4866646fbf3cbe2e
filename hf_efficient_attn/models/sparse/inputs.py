"""The global tokens of a sparse model, found once for all layers."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.attention.sharded.shards import SequenceShards
from hf_efficient_attn.errors import InputError
from hf_efficient_attn.layout.transfer import derived
from hf_efficient_attn.messages import shown
from hf_efficient_attn.models.global_tokens.global_attention import (
    GlobalRows,
    check_positions,
    find_global_rows,
    global_keys,
    whole_lengths,
)
from hf_efficient_attn.models.global_tokens.rules import (
    AUTO_RULES,
    NOT_RELATIVE,
    GlobalTokenSelection,
    Rule,
    choose_by_mask,
    choose_by_rule,
    needs_input_ids,
)
from hf_efficient_attn.models.inputs import LayerInputs
from hf_efficient_attn.models.prologue import PreparedCall


@dataclass(frozen=True)
class SparseInputs(LayerInputs):
    """The inputs of layers with global tokens; `token_mask` marks those that differ between examples.

    Attributes:
        global_positions: the global tokens that all examples share.
        global_rows: the rows of global tokens among the queries; only with global projections.
    """

    global_positions: tuple[int, ...] = ()
    global_rows: GlobalRows | None = None


NO_GLOBALS = SparseInputs()


def without_globals(masks: LayerInputs) -> SparseInputs:
    """Return the layer inputs of a call without global tokens."""
    return SparseInputs(masks.token_mask, masks.query_offset, masks.matrix)


def resolved_rule(config: Any, task: str | None) -> Rule:
    """Return the rule for global tokens that applies to a task."""
    return AUTO_RULES.get(task or "") if config.global_tokens == "auto" else config.global_tokens


def known_globals(config: Any, task: str | None, num_keys: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the global tokens of a text of `num_keys` tokens, and a note if they depend on its content."""
    rule = resolved_rule(config, task)
    if needs_input_ids(rule):
        return (), (f"The global tokens of global_tokens={shown(rule)} depend on the text, and are not counted.",)
    return choose_by_rule(rule, num_keys, None, None, None).positions, ()


def looked_at(config: Any, task: str | None, input_ids: Tensor | None) -> Tensor | None:
    """Return `input_ids` if the rule for global tokens needs them, otherwise None."""
    rule = resolved_rule(config, task)
    is_by_place = rule is None or rule == "first" or (isinstance(rule, Mapping) and "token_ids" not in rule)
    return None if is_by_place else input_ids


def global_inputs(
    config: Any,
    task: str | None,
    call: PreparedCall,
    masks: LayerInputs,
    input_ids: Tensor | None,
    global_attention_mask: Tensor | None,
    shards: SequenceShards | None = None,
) -> SparseInputs:
    """Return the masks of a call with its global tokens.

    Args:
        masks: the masks of the call (`PreparedCall.masks`).
        input_ids: [B, T]; None if embeddings were given.
        global_attention_mask: [B, cached + T], or None.
        shards: the processes that share the texts; masks and global tokens then cover whole texts.

    Raises:
        InputError: a mask or rule that does not fit these inputs.
    """
    token_mask, device = masks.token_mask, call.embedded.device
    num_queries, num_keys = whole_lengths(shards, call.tokens, call.num_keys, token_mask)
    selection = _selection(config, task, call, input_ids, global_attention_mask, num_keys)
    check_positions(selection, token_mask, num_keys, device)
    if selection.every is not None:
        selection = GlobalTokenSelection(mask=global_keys(selection, token_mask, call.batch_size, num_keys, device))
    elif selection.mask is not None and selection.mask.shape[1] < num_keys:
        # a static cache has room for later tokens
        missing = num_keys - selection.mask.shape[1]
        selection = GlobalTokenSelection(mask=derived(lambda mask: pad(mask, (0, missing)), selection.mask))
    rows = None
    if config.global_projections:
        lengths = (call.batch_size, num_queries, num_keys)
        rows = find_global_rows(selection, masks, *lengths, config.is_causal, config.max_global_tokens, device)
    token_mask = replace(token_mask, global_mask=selection.mask)
    return SparseInputs(token_mask, masks.query_offset, masks.matrix, selection.positions, rows)


def _selection(
    config: Any,
    task: str | None,
    call: PreparedCall,
    input_ids: Tensor | None,
    marked: Tensor | None,
    num_keys: int,
) -> GlobalTokenSelection:
    """Return the global tokens that the call marks or, without a mask, those of the config's rule."""
    mask, past = call.attention_mask, call.past_tokens
    is_token = mask if mask is not None and mask.ndim == 2 else None
    if marked is None:
        rule = resolved_rule(config, task)
        return choose_by_rule(rule, num_keys, input_ids, is_token, config.sep_token_id, past)
    if config.position_embedding_type == "relative":
        raise InputError(f"{NOT_RELATIVE} Leave global_attention_mask out, or build the model with 'rope'.")
    # a static cache has more keys than known tokens
    is_counted = isinstance(past, int) and num_keys == call.num_keys
    known = past + call.tokens if is_counted else marked.shape[-1]
    if is_token is not None and is_token.shape[1] != known:
        is_token = None
    return choose_by_mask(marked, call.batch_size, known, is_token)


# Global tokens in `generate`, where every step needs those of the whole text.


def extend_global_mask(
    config: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    inputs_embeds: Tensor | None,
    global_attention_mask: Tensor | None,
) -> Tensor | None:
    """Return which tokens of the text so far are global, [batch, tokens]; None: the model's rule needs no mask.

    A mask that the caller gave for the prompt is extended by zeros: generated tokens are not global.

    Args:
        input_ids: the text so far; after a prompt of embeddings, only what followed it.
        inputs_embeds: a prompt of embeddings, [batch, tokens, hidden_size].
    """
    if global_attention_mask is not None:
        tokens = input_ids.shape[1] + (0 if inputs_embeds is None else inputs_embeds.shape[1])
        return pad(global_attention_mask, (0, tokens - global_attention_mask.shape[1]))
    if inputs_embeds is not None or not needs_input_ids(config.global_tokens):
        return None
    selection = choose_by_rule(config.global_tokens, input_ids.shape[1], input_ids, attention_mask, config.sep_token_id)
    return selection.mask
