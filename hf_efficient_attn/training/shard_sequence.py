"""`shard_sequence`: split every sequence of a model among the processes of a mesh.

A hook before the model checks that all processes got the same batch, and selects the tokens of this process; a hook
after the model returns the loss of the whole texts.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from hf_efficient_attn.attention.sharded.collectives import SumOfProcesses
from hf_efficient_attn.attention.sharded.layer import refuse_compiled
from hf_efficient_attn.attention.sharded.shards import MODES, SHARDS, SequenceShards, shards_of
from hf_efficient_attn.errors import ConfigurationError, InputError, UnsupportedBackendError
from hf_efficient_attn.integration.forward_context import CACHE_NAMES, set_whole_table
from hf_efficient_attn.integration.masks import write_table
from hf_efficient_attn.integration.names import with_kind
from hf_efficient_attn.integration.packing import parsed_positions
from hf_efficient_attn.integration.trial import forward_arguments
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.messages import shown
from hf_efficient_attn.models.base import FamilyPreTrainedModel
from hf_efficient_attn.models.global_tokens.rules import choose_by_rule
from hf_efficient_attn.models.heads.outputs import add_auxiliary_loss
from hf_efficient_attn.models.indexed.index_training import own_loss
from hf_efficient_attn.models.inputs import check_mask, find_documents
from hf_efficient_attn.models.parts.embeddings import Positions, positions_among_real
from hf_efficient_attn.models.sparse.inputs import looked_at, resolved_rule
from hf_efficient_attn.training.shardable_models import refuse_model, refuse_wrapped, shifts_labels

T = TypeVar("T", bound=PreTrainedModel)

# the attribute in which a model stores the handles of its hooks
HOOKS = "_sequence_hooks"
# the attribute in which a model stores the batch of a forward pass
BATCH = "_sharded_batch"
# outputs without an axis of tokens
NOT_CUT = ("loss", "auxiliary_loss")
# arguments with an entry for each token; a process gets the entries of its own tokens
PER_TOKEN = ("input_ids", "inputs_embeds", "token_type_ids")
# arguments about the whole text
OF_TEXT = (
    "attention_mask",
    "position_ids",
    "labels",
    "shift_labels",
    "num_items_in_batch",
    "global_attention_mask",
)
# arguments that say where packed documents begin
OF_DOCUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx", "max_length_q", "max_length_k")
# arguments that are passed on unchanged
HARMLESS = ("return_dict", "output_hidden_states", "output_attentions")
# all arguments that must be the same in all processes
OF_TEXTS = (*PER_TOKEN, *OF_TEXT, *OF_DOCUMENTS)
IGNORED_LABEL = -100
# functions of RoBERTa and similar models that count positions from padding_idx + 1: methods, or functions of the module
COUNT_IDS, COUNT_EMBEDS = "create_position_ids_from_input_ids", "create_position_ids_from_inputs_embeds"
# model types of transformers that count only the tokens that are not padding
COUNT_REAL_TOKENS = {"opt"}
# rope types whose frequencies do not depend on the length of the text
FIXED_ROPE = {"default", "linear", "llama3", "proportional", "yarn"}
# the attribute in which a module with other frequencies stores the largest position of the whole texts, a tensor
LARGEST = "_largest_position"
# the multiplier of Knuth's linear congruential generator (MMIX)
MULTIPLIER = 6364136223846793005


@dataclass(frozen=True)
class ShardedBatch:
    """The part of a batch that one process computes.

    Attributes:
        inputs: the arguments of the model for this process's tokens.
        table: the token table of the whole texts, without a kind.
        labels: the labels of this process's tokens, already shifted for a causal model, [B, n]; None: there are none.
        num_labels: how many labels count in the whole texts, or the number that the caller gave.
        whole_labels: the labels of the whole texts, [B, N].
    """

    inputs: dict[str, Any]
    table: Tensor
    labels: Tensor | None
    num_labels: Any
    whole_labels: Tensor | None


def shard_sequence(model: T, mesh: Any, mode: str = "auto") -> T:
    """Let the processes of `mesh` share every sequence of a model (sequence parallelism), in place; return the model.

    All processes call the model with the same whole batch, as one process would: ids, padding mask, positions, labels.
    Each process computes its own part of the tokens, so memory for activations is divided by the number of processes,
    and sequences may be as long as all processes together can hold. Layers exchange what they need of other processes'
    tokens in one of two ways:

    - "halo": a process receives only the keys that its queries attend to, such as the edges of its neighbours for a
      band. Queries that attend to nearly all keys (global tokens) are sent to the keys instead.
    - "heads": every process gets whole sequences for some of the heads (DeepSpeed Ulysses). This is for patterns that
      reach far, and for layers that compute with all tokens of a head; there must be at least one head for each
      process.

    While keys are sent, queries that need none of them are computed. `explain` says how many bytes each process sends.
    If a process dies, the others raise torch's RuntimeError, at the latest after the timeout of the process group.

    Trainer gives different batches to its processes. `SharedTextsMixin` gives all processes of a mesh the same batch,
    in training and in evaluation:

        class SequenceTrainer(hea.training.SharedTextsMixin, Trainer):
            pass

    Outputs (logits, hidden states) are those of the process's own tokens. With labels, every process returns the loss
    of the whole sequences. The mean of the gradients over the processes is the gradient of that loss: wrap the model in
    DistributedDataParallel or FSDP, as Trainer does, or average the gradients.

    Args:
        model: a causal or masked language model, a token classifier, or the backbone of one, of the families
            sparse_transformer, adaptive_span and simplified_transformer, or of transformers with
            attn_implementation="efficient". Wrap it (PEFT) afterwards.
        mesh: a `torch.distributed.device_mesh.DeviceMesh` of one dimension, such as `mesh["sp"]`; None: the model
            computes whole sequences again.
        mode: "halo", "heads", or "auto": in every layer the way that sends the fewest bytes.

    Raises:
        ConfigurationError: `mesh` is not a mesh, or has several dimensions; an unknown mode.
        UnsupportedBackendError: the model needs more of other processes' tokens than attention does, its loss is not
            known to be a sum over tokens, or it is wrapped. A call raises it if an output has no axis of tokens.
    """
    refuse_wrapped(model)
    if mode not in MODES:
        raise ConfigurationError(f"mode is {shown(mode)}; it must be one of {', '.join(MODES)}.")
    shards = None
    if mesh is not None:
        check_mesh(mesh)
        refuse_model(model)
        shards = SequenceShards(mesh, mode)
    for hook in model.__dict__.pop(HOOKS, ()):
        hook.remove()
    model.__dict__.pop("generate", None)
    for module in model.modules():
        module.__dict__.pop(SHARDS, None)
    if shards is not None:
        for module in model.modules():
            module.__dict__[SHARDS] = shards
        before = model.register_forward_pre_hook(cut_inputs, with_kwargs=True)
        after = model.register_forward_hook(join_loss, always_call=True)
        rotations = varying_rotations(model)
        ahead = [each.register_forward_pre_hook(add_largest_position, with_kwargs=True) for each in rotations]
        behind = [each.register_forward_hook(drop_largest_position) for each in rotations]
        model.__dict__.update({HOOKS: (before, after, *ahead, *behind), "generate": refuse_generation})
    return model


def check_mesh(mesh: Any) -> None:
    """Raise ConfigurationError if `mesh` is not a mesh of one dimension."""
    if not hasattr(mesh, "ndim") or not hasattr(mesh, "get_group"):
        raise ConfigurationError(
            f"mesh is {shown(mesh)}; it must be a torch.distributed.device_mesh.DeviceMesh of the processes that "
            "share a text, made by init_device_mesh(device, (num_processes,)) in all of them, or None, with which "
            "the model computes whole texts again."
        )
    if mesh.ndim != 1:
        raise ConfigurationError(
            f"The mesh has {mesh.ndim} dimensions; pass only the one along which texts are split, such as mesh['sp']."
        )


def refuse_generation(*args: Any, **kwargs: Any) -> None:
    """Raise UnsupportedBackendError; replaces `generate` of a sharded model."""
    raise UnsupportedBackendError(
        "A sharded model (shard_sequence) cannot generate: a new token belongs to one process, and the others would "
        "wait. Call shard_sequence(model, None), or generate with a copy that was not sharded."
    )


def cut_inputs(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments for this process's tokens; a hook before every forward pass."""
    # another hook may have refused an earlier call, which leaves its batch here
    model.__dict__.pop(BATCH, None)
    refuse_compiled()
    model_class: Any = type(model)
    given = {**dict(zip(forward_arguments(model_class), args, strict=False)), **kwargs}
    shards: Any = shards_of(model)
    batch = cut_batch(model, given, shards, shifts_labels(model))
    inputs = dict(batch.inputs)
    if isinstance(model, FamilyPreTrainedModel):
        # the mask for models of this package's families: the token table of the whole texts
        inputs["attention_mask"] = with_kind(batch.table, model.config.is_causal)
    set_whole_table(model.config, batch.table)
    model.__dict__[BATCH] = batch
    return (), inputs


def join_loss(model: Any, args: tuple[Any, ...], outputs: Any) -> Any:
    """Return the outputs with the loss of the whole texts; a hook after every forward pass, even a failed one."""
    batch: Any = model.__dict__.pop(BATCH, None)
    shards: Any = shards_of(model)
    if batch is None or outputs is None:
        return outputs
    refuse_outputs(model, outputs, batch)
    return outputs if batch.labels is None else with_loss(model, outputs, batch, shards)


def refuse_outputs(model: Any, outputs: Any, batch: ShardedBatch) -> None:
    """Raise UnsupportedBackendError for outputs without an axis of this process's tokens, such as a pooled output."""
    shape = batch.inputs["input_ids" if "input_ids" in batch.inputs else "inputs_embeds"].shape[:2]
    for name, value in outputs.items():
        if name not in NOT_CUT and torch.is_tensor(value) and (value.ndim < 3 or value.shape[:2] != shape):
            raise UnsupportedBackendError(
                f"{type(model).__name__} returns {name} of shape {[*value.shape]}, without an axis for the {shape[1]} "
                "tokens of this process, so it needs the whole text. Use a language model, a token classifier or a "
                "model that returns only hidden states, or call shard_sequence(model, None)."
            )


def with_loss(model: Any, outputs: Any, batch: ShardedBatch, shards: SequenceShards) -> Any:
    """Return the outputs with the loss of the whole texts."""
    labels: Any = batch.labels
    if getattr(model, "_loss_function", None) is not None:
        raise UnsupportedBackendError("A custom loss function (model.loss_function) cannot be summed over shards.")
    flat = outputs.logits.float().flatten(0, 1), labels.flatten().to(outputs.logits.device)
    own = cross_entropy(*flat, ignore_index=IGNORED_LABEL, reduction="sum")
    loss = SumOfProcesses.apply(own, shards.group) / torch.as_tensor(batch.num_labels, device=own.device)
    loss = own_loss(model.config, loss)
    loss = add_auxiliary_loss(loss, outputs.get("auxiliary_loss"), batch.whole_labels, batch.num_labels)
    # the loss must come first, because outputs may be indexed by number
    return type(outputs)(**{"loss": loss, **outputs})


def cut_batch(model: Any, given: dict[str, Any], shards: SequenceShards, is_causal: bool) -> ShardedBatch:
    """Return the part of a batch that this process computes.

    Args:
        given: the arguments of the model by name, the same in every process.
        is_causal: whether labels are shifted, so that each belongs to the token before it.

    Raises:
        InputError: the texts differ between the processes, or have fewer tokens than there are processes.
        UnsupportedBackendError: an argument cannot be split.
    """
    tokens = checked_tokens(given, shards)
    batch_size, num_tokens = tokens.shape[:2]
    own, mask = shards.own(num_tokens), given.get("attention_mask")
    positions = parsed_positions(given.get("position_ids"), given, batch_size, num_tokens, 0)
    documents = find_documents(model.config, positions, mask, batch_size, 0)
    gives_documents = any(given.get(name) is not None for name in OF_DOCUMENTS)
    if documents is not None and not (gives_documents or isinstance(model, FamilyPreTrainedModel)):
        refuse_restarts(model, is_causal, mask is not None)
    key_mask = torch.ones(batch_size, num_tokens, dtype=torch.bool, device=tokens.device)
    token_mask = TokenMask(key_mask if mask is None else mask.to(tokens.device) != 0, documents)
    positions = counted_positions(model, given.get("input_ids"), mask, tokens) if positions is None else positions
    inputs = {name: given[name][:, own] for name in PER_TOKEN if given.get(name) is not None}
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
        InputError: there are no tokens, batches differ between the processes, or the mask has another length.
        UnsupportedBackendError: an argument cannot be split.
    """
    tokens = given["input_ids"] if given.get("input_ids") is not None else given.get("inputs_embeds")
    if tokens is None:
        raise InputError("There are no tokens: pass input_ids or inputs_embeds of the whole texts.")
    # this exchange comes first: if a single process raised an error before it, the others would wait
    refuse_other_batch(shards, {name: given.get(name) for name in OF_TEXTS}, tokens.device)
    refuse_arguments(given, {*OF_TEXTS, *HARMLESS, "use_cache"})
    mask = given.get("attention_mask")
    check_mask(mask, tokens.shape[0], tokens.shape[1], 0)
    if mask is not None and mask.ndim != 2:
        raise UnsupportedBackendError("A mask matrix cannot be split among processes. Pass a mask [batch, tokens].")
    return tokens


def marked_tokens(model: Any, given: dict[str, Any], mask: Tensor | None) -> Tensor | None:
    """Return the global tokens of whole texts if the call, or a rule that depends on ids, chooses them; else None."""
    marked, config = given.get("global_attention_mask"), model.config
    if marked is not None or not hasattr(config, "global_tokens"):
        return marked
    task, ids = model.base_model.task, given.get("input_ids")
    if ids is None or looked_at(config, task, ids) is None:
        return None
    return choose_by_rule(resolved_rule(config, task), ids.shape[1], ids, mask, config.sep_token_id).mask


def refuse_restarts(model: Any, is_causal: bool, has_mask: bool) -> None:
    """Raise InputError if position_ids restart, but would not begin documents in an unsharded model of transformers.

    They begin documents only in causal models without a mask.
    """
    if is_causal and not has_mask:
        return
    where = " with an attention_mask" if is_causal else ""
    way = "Leave the mask out, or also pass" if is_causal else "Also pass"
    raise InputError(
        f"position_ids restart within a text, but in {type(model).__name__}{where} this does not begin a document. "
        f"{way} seq_idx, the number of each token's document."
    )


def refuse_arguments(given: dict[str, Any], known: set[str]) -> None:
    """Raise UnsupportedBackendError for arguments that a process cannot use with a part of the text."""
    is_idle = {"logits_to_keep": 0, "output_attentions": False, "output_router_logits": False}
    for name, value in given.items():
        if value is None or (name in is_idle and isinstance(value, int) and value == is_idle[name]):
            continue
        if name in CACHE_NAMES:
            raise UnsupportedBackendError(
                "A sharded model (shard_sequence) cannot be called with a cache: keys of earlier calls, or keys "
                "learned by prefix tuning, belong to no process. Call it without a cache, and use LoRA or prompt "
                "tuning for adapters, or call shard_sequence(model, None)."
            )
        if name not in known or name == "output_attentions" or (name == "return_dict" and not value):
            raise UnsupportedBackendError(
                f"A sharded model (shard_sequence) cannot be called with {name}, because it is unknown how to split "
                "it. Leave it out, or call shard_sequence(model, None). To generate text, use an unsharded model."
            )


def labels_of(given: dict[str, Any], is_causal: bool) -> tuple[Tensor | None, Any]:
    """Return the labels of all tokens, shifted for a causal model, and the number that divides the sum of losses."""
    labels = given.get("shift_labels")
    if labels is None and given.get("labels") is not None:
        labels = given["labels"]
        if is_causal:
            labels = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)
    if labels is None:
        return None, None
    count = given.get("num_items_in_batch")
    return labels, labels.ne(IGNORED_LABEL).sum() if count is None else count


def counted_positions(model: Any, input_ids: Tensor | None, mask: Tensor | None, tokens: Tensor) -> Tensor:
    """Return the positions that the model would count in the whole texts, [B or 1, N]."""
    index = torch.arange(tokens.shape[1], device=tokens.device)[None]
    if getattr(model, "counts_real_tokens", False):
        return index if mask is None else positions_among_real(mask).to(tokens.device)
    if model.config.model_type in COUNT_REAL_TOKENS and mask is not None:
        # padding, to which nothing attends, gets -1, as in the model
        return (mask.long().cumsum(-1) * mask.long() - 1).to(tokens.device)
    for module in model.modules():
        if hasattr(module, COUNT_EMBEDS) and hasattr(module, "position_embeddings"):
            if input_ids is None:
                return index + module.padding_idx + 1
            count = getattr(module, COUNT_IDS, None) or getattr(sys.modules[type(module).__module__], COUNT_IDS)
            return count(input_ids, module.padding_idx)
    return index


def check_positions(model: nn.Module, positions: Tensor) -> None:
    """Raise InputError, in all processes alike, if a position is beyond the end of a learned table of our families."""
    for module in model.modules():
        if isinstance(module, Positions):
            module.check_table(positions)


def varying_rotations(model: nn.Module) -> list[nn.Module]:
    """Return the modules whose rotary frequencies depend on the largest position of a call, for any layer type."""
    found = []
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        kinds = set(kinds.values()) if isinstance(kinds, dict) else {kinds} - {None}
        if kinds - FIXED_ROPE:
            found.append(module)
    return found


def set_largest_position(model: nn.Module, positions: Tensor) -> None:
    """Store the largest position of the whole texts in all modules whose frequencies depend on it."""
    for module in varying_rotations(model):
        module.__dict__[LARGEST] = positions.max()


def add_largest_position(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with one more token, at the largest position; a hook before a `varying_rotations` module.

    Raises:
        UnsupportedBackendError: the module is called without `position_ids`.
    """
    given = {**dict(zip(("x", "position_ids"), args, strict=False)), **kwargs}
    positions = given.get("position_ids")
    if not torch.is_tensor(positions) or positions.ndim < 2:
        raise UnsupportedBackendError(
            f"{type(module).__name__} has frequencies that depend on the length of the text, but is called without "
            "position_ids, so a process does not know the positions of the whole text. Use rope_type='default'."
        )
    last = module.__dict__[LARGEST].to(positions).expand(*positions.shape[:-1], 1)
    given["position_ids"] = torch.cat([positions, last], -1)
    rest = args[2:]
    return (given.pop("x"), given.pop("position_ids"), *rest), given


def drop_largest_position(module: nn.Module, args: Any, out: Any) -> Any:
    """Return the outputs without the additional token; a hook after a `varying_rotations` module."""
    return out[..., :-1, :] if torch.is_tensor(out) else tuple(each[..., :-1, :] for each in out)


def refuse_other_batch(shards: SequenceShards, given: Mapping[str, Any], device: torch.device) -> None:
    """Raise InputError unless all processes got the same arguments; they exchange one digest per argument.

    Args:
        given: the arguments by name, with the same names in every process; None: not given.
        device: the device on which to exchange.
    """
    own = torch.stack([digest(value).to(device) for value in given.values()])
    everywhere = [torch.empty_like(own) for _ in range(shards.size)]
    distributed.all_gather(everywhere, own, group=shards.group)
    differs = torch.stack(everywhere).ne(everywhere[0])
    if not bool(differs.any()):
        return
    rank = int(differs.any(1).nonzero()[0])
    names = [name for name, is_other in zip(given, differs[rank].tolist(), strict=True) if is_other]
    raise InputError(
        f"The processes of the mesh share every text, but process {rank} got another batch than process 0 (different "
        f"{', '.join(names)}). Pass the same batch to all of them; with Trainer, use SharedTextsMixin."
    )


def digest(value: Any) -> Tensor:
    """Return a 64-bit integer that depends on the shape and on each entry and its place; 0 for non-numeric values.

    >>> rows = torch.arange(6).view(2, 3)
    >>> digests = {int(digest(each)) for each in (rows, rows.flip(0), rows.flip(1), rows.view(3, 2), rows.double())}
    >>> len(digests), int(digest(None))
    (5, 0)
    """
    if not isinstance(value, Tensor | int | float):
        # None, or a value that `refuse_arguments` refuses after this check
        return torch.zeros((), dtype=torch.int64)
    entries = torch.as_tensor(value).detach()
    bits = entries.double().view(torch.int64) if entries.is_floating_point() else entries.long()
    shape = torch.tensor([entries.ndim + 1, *entries.shape], device=entries.device)
    numbers = torch.cat([shape, bits.flatten()])
    # sums and products of integers wrap around; without the shift the weights would be an arithmetic sequence
    weights = torch.arange(1, len(numbers) + 1, device=entries.device) * MULTIPLIER
    return (numbers * (weights ^ (weights >> 29))).sum()
