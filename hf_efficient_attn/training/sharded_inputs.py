"""A batch of whole texts, cut into what one of the processes that share them computes."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.attention.cache_argument import CACHE_NAMES
from hf_efficient_attn.attention.packing import said_positions
from hf_efficient_attn.attention.sharded.sequence_shards import SequenceShards
from hf_efficient_attn.attention.table_form import with_kind
from hf_efficient_attn.attention.token_table import write_table
from hf_efficient_attn.attention.trial_inputs import forward_arguments
from hf_efficient_attn.errors import InputError, UnsupportedBackendError
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.models.base import FamilyPreTrainedModel
from hf_efficient_attn.models.global_tokens.rules import choose_by_rule
from hf_efficient_attn.models.inputs.masks import check_mask, find_documents
from hf_efficient_attn.models.sparse.inputs import looked_at, resolved_rule
from hf_efficient_attn.training.same_batch import refuse_other_batch
from hf_efficient_attn.training.sharded_positions import check_positions, counted_positions, set_largest_position

# what has an entry for each token, and is cut
PER_TOKEN = ("input_ids", "inputs_embeds", "token_type_ids")
# what says something about the whole text
OF_TEXT = (
    "attention_mask",
    "position_ids",
    "labels",
    "shift_labels",
    "num_items_in_batch",
    "global_attention_mask",
)
# what tells where packed documents begin
OF_DOCUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx", "max_length_q", "max_length_k")
# what changes nothing, and is passed on
HARMLESS = ("return_dict", "output_hidden_states", "output_attentions")
# all that is said about texts, which all processes must have got alike
OF_TEXTS = (*PER_TOKEN, *OF_TEXT, *OF_DOCUMENTS)
IGNORED_LABEL = -100


@dataclass(frozen=True)
class ShardedBatch:
    """What one process computes of a batch.

    Attributes:
        inputs: the arguments of the model, of this process's tokens.
        table: the token table of the whole texts, without a kind.
        labels: of this process's tokens, already shifted for a causal model, [B, n]; None: there are none.
        num_labels: how many labels count in the whole texts, or the number that the caller gave.
        whole_labels: of the whole texts.
    """

    inputs: dict[str, Any]
    table: Tensor
    labels: Tensor | None
    num_labels: Any
    whole_labels: Tensor | None


def cut_batch(model: Any, given: dict[str, Any], shards: SequenceShards, is_causal: bool) -> ShardedBatch:
    """Return what this process computes of a batch.

    Args:
        given: the arguments of the model by name, the same in every process.
        is_causal: whether a label belongs to the token before it.

    Raises:
        InputError: texts that differ between the processes, or are shorter than there are processes.
        UnsupportedBackendError: an argument that cannot be cut.
    """
    tokens = checked_tokens(given, shards)
    batch_size, num_tokens = tokens.shape[:2]
    own, mask = shards.own(num_tokens), given.get("attention_mask")
    positions = said_positions(given.get("position_ids"), given, batch_size, num_tokens, 0)
    documents = find_documents(model.config, positions, mask, batch_size, 0)
    if documents is not None and not (said_by_number(given) or isinstance(model, FamilyPreTrainedModel)):
        refuse_restarts(model, is_causal, mask is not None)
    key_mask = torch.ones(batch_size, num_tokens, dtype=torch.bool, device=tokens.device)
    token_mask = TokenMask(key_mask if mask is None else mask.to(tokens.device) != 0, documents)
    positions = counted_positions(model, given.get("input_ids"), mask, tokens) if positions is None else positions
    inputs = own_inputs(given, own)
    inputs |= {name: given[name] for name in HARMLESS if given.get(name) is not None}
    marked = marked_tokens(model, given, mask)
    inputs |= {} if marked is None else {"global_attention_mask": marked}
    model_class: Any = type(model)
    inputs |= {"use_cache": False} if "use_cache" in forward_arguments(model_class) else {}
    check_positions(model, positions)
    set_largest_position(model, positions)
    inputs["position_ids"] = positions[:, own]
    labels, count = labels_of(given, is_causal)
    table: Any = write_table(token_mask, None, num_tokens)
    return ShardedBatch(inputs, table, None if labels is None else labels[:, own], count, labels)


def checked_tokens(given: dict[str, Any], shards: SequenceShards) -> Tensor:
    """Return the tokens of a batch, [B, N] or [B, N, hidden_size], after checking the arguments of the model.

    Raises:
        InputError: none, batches that differ between the processes, a mask of another length.
        UnsupportedBackendError: an argument that cannot be cut.
    """
    tokens = given["input_ids"] if given.get("input_ids") is not None else given.get("inputs_embeds")
    if tokens is None:
        raise InputError("There are no tokens: pass input_ids or inputs_embeds of the whole texts.")
    # first of all: what one process alone refuses, the others would wait for
    refuse_other_batch(shards, {name: given.get(name) for name in OF_TEXTS}, tokens.device)
    refuse_arguments(given, {*OF_TEXTS, *HARMLESS, "use_cache"})
    mask = given.get("attention_mask")
    check_mask(mask, tokens.shape[0], tokens.shape[1], 0)
    if mask is not None and mask.ndim != 2:
        raise UnsupportedBackendError("A mask that is a matrix cannot be cut over processes. Pass [batch, tokens].")
    return tokens


def own_inputs(given: dict[str, Any], own: slice) -> dict[str, Any]:
    """Return the arguments that have an entry for each token, of this process's tokens."""
    return {name: given[name][:, own] for name in PER_TOKEN if given.get(name) is not None}


def marked_tokens(model: Any, given: dict[str, Any], mask: Tensor | None) -> Tensor | None:
    """Return the global tokens of whole texts, where a call or a rule that looks at tokens chooses them; else None."""
    marked, config = given.get("global_attention_mask"), model.config
    if marked is not None or not hasattr(config, "global_tokens"):
        return marked
    task, ids = model.base_model.task, given.get("input_ids")
    if ids is None or looked_at(config, task, ids) is None:
        return None
    return choose_by_rule(resolved_rule(config, task), ids.shape[1], ids, mask, config.sep_token_id).mask


def refuse_restarts(model: Any, is_causal: bool, has_mask: bool) -> None:
    """Raise InputError where position_ids that restart begin no document in one process, in a model of transformers.

    In causal models they do, unless there is a mask.
    """
    if is_causal and not has_mask:
        return
    where = " beside an attention_mask" if is_causal else ""
    way = "Leave the mask out, or pass" if is_causal else "Pass"
    raise InputError(
        f"position_ids restart within a text, but in {type(model).__name__}{where} that begins no document. {way} "
        "seq_idx with them, the number of each token's document."
    )


def said_by_number(given: dict[str, Any]) -> bool:
    """Return whether a call says by more than its positions where documents begin."""
    return any(given.get(name) is not None for name in OF_DOCUMENTS)


def refuse_arguments(given: dict[str, Any], known: set[str]) -> None:
    """Raise UnsupportedBackendError for arguments that a process cannot use with a part of the text."""
    is_idle = {"logits_to_keep": 0, "output_attentions": False, "output_router_logits": False}
    for name, value in given.items():
        if value is None or (name in is_idle and isinstance(value, int) and value == is_idle[name]):
            continue
        if name in CACHE_NAMES:
            raise UnsupportedBackendError(
                "A model on shards of a text (shard_sequence) cannot be called with a cache: keys of earlier "
                "calls, or those that prefix tuning learns, belong to no process. Call it without a cache, and adapt "
                "it by LoRA or prompt tuning, or call shard_sequence(model, None)."
            )
        if name not in known or name == "output_attentions" or (name == "return_dict" and not value):
            raise UnsupportedBackendError(
                f"A model on shards of a text (shard_sequence) cannot be called with {name}: nothing says how it is "
                "to be cut. Leave it out, or call shard_sequence(model, None). Text is generated by whole models."
            )


def labels_of(given: dict[str, Any], is_causal: bool) -> tuple[Tensor | None, Any]:
    """Return the labels of all tokens, shifted for a causal model, and by how many the sum of losses is divided."""
    labels = given.get("shift_labels")
    if labels is None and given.get("labels") is not None:
        labels = given["labels"]
        if is_causal:
            labels = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)
    if labels is None:
        return None, None
    count = given.get("num_items_in_batch")
    return labels, labels.ne(IGNORED_LABEL).sum() if count is None else count


def model_mask(batch: ShardedBatch, is_causal: bool) -> Tensor:
    """Return the mask with which our families are called: the token table of the whole texts."""
    return with_kind(batch.table, is_causal)
