"""`shard_sequence`: let the processes of a mesh share every text that a model reads."""

from typing import Any, TypeVar

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from hf_efficient_attn.attention.forward_context import set_whole_table
from hf_efficient_attn.attention.sharded.layer import refuse_compiled
from hf_efficient_attn.attention.sharded.sequence_shards import MODES, SHARDS, SequenceShards, shards_of
from hf_efficient_attn.attention.sharded.sums import SumOfProcesses
from hf_efficient_attn.attention.trial_inputs import forward_arguments
from hf_efficient_attn.errors import ConfigurationError, UnsupportedBackendError
from hf_efficient_attn.messages import shown
from hf_efficient_attn.models.base import FamilyPreTrainedModel
from hf_efficient_attn.models.heads.auxiliary_loss import add_auxiliary_loss
from hf_efficient_attn.models.indexed.index_training import own_loss
from hf_efficient_attn.training.shardable_models import refuse_model, refuse_wrapped, sharing_modules, shifts_labels
from hf_efficient_attn.training.sharded_inputs import IGNORED_LABEL, ShardedBatch, cut_batch, model_mask
from hf_efficient_attn.training.sharded_positions import (
    add_largest_position,
    drop_largest_position,
    varying_rotations,
)
from hf_efficient_attn.training.sharded_sources import cut_source

T = TypeVar("T", bound=PreTrainedModel)

# the attribute in which a model keeps the handles of its hooks
HOOKS = "_sequence_hooks"
# that in which it keeps the batch of a forward pass
BATCH = "_sharded_batch"
# outputs that are of no single token, or of the global input of ETC, which all processes have
NOT_CUT = ("loss", "auxiliary_loss", "global_hidden_state", "global_mask", "global_documents")


def shard_sequence(model: T, mesh: Any, mode: str = "auto") -> T:
    """Return the model, changed in place: the processes of `mesh` share every text, each computes some of its tokens.

    All of them call the model with the same whole batch, as one process would: ids, padding mask, positions, labels.
    Each cuts out its own tokens, so that memory for activations is divided by the number of processes; texts may be as
    long as all processes together can hold. What a layer reads of other processes' tokens is exchanged, by "halo" or by
    "heads":

    - "halo": only the keys that the pattern lets some query of a process read, such as the edges of its neighbours for
      a band. Queries that read nearly everything (global tokens) are sent to the keys instead.
    - "heads": every process gets whole texts for some of the heads (DeepSpeed Ulysses), for patterns that read far, and
      for what layers compute of all tokens of a head; there must be a head for each process.

    While keys travel, queries that need none of them are computed. `explain` says how many bytes each process sends. If
    a process is lost, the others raise torch's RuntimeError, at the latest after the timeout of the process group.

    Trainer deals out batches to its processes; `SharedTextsMixin` lets all of a mesh have the same one, in training and
    in evaluation:

        class SequenceTrainer(hea.SharedTextsMixin, Trainer):
            pass

    Of an encoder-decoder (`sparse_seq2seq`) they share the source. Every process computes the whole target, whose
    tokens read the keys where they are: for long documents with short targets.

    Outputs (logits, hidden states) are those of the process's tokens, or of the whole target. With labels, every
    process returns the loss of the whole texts, and its gradients are such that their mean over the processes is the
    gradient of that loss: wrap the model in DistributedDataParallel or FSDP, as Trainer does, or average them.

    Args:
        model: a causal or masked language model, a token classifier, our sparse encoder-decoder with a language model's
            head, or the model below these heads, of one of our families or of transformers with
            attn_implementation="efficient"; wrap it (PEFT) afterwards.
        mesh: a `torch.distributed.device_mesh.DeviceMesh` of one dimension, such as `mesh["sp"]`; None: the model reads
            whole texts again.
        mode: "halo", "heads", or "auto": in every layer what sends least.

    Raises:
        ConfigurationError: what is no mesh, or one of several dimensions; an unknown mode.
        UnsupportedBackendError: a model that needs more of other processes' tokens than attention reads, whose loss is
            not known to be one of single tokens, or that is wrapped; calls, if its outputs are not of single tokens.
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
        for module in sharing_modules(model):
            module.__dict__[SHARDS] = shards
    if shards is not None:
        before = model.register_forward_pre_hook(cut_inputs, with_kwargs=True)
        after = model.register_forward_hook(join_loss, always_call=True)
        rotations = varying_rotations(model)
        ahead = [each.register_forward_pre_hook(add_largest_position, with_kwargs=True) for each in rotations]
        behind = [each.register_forward_hook(drop_largest_position) for each in rotations]
        model.__dict__.update({HOOKS: (before, after, *ahead, *behind), "generate": refuse_generation})
    return model


def check_mesh(mesh: Any) -> None:
    """Raise ConfigurationError for what is no mesh of one dimension."""
    if not hasattr(mesh, "ndim") or not hasattr(mesh, "get_group"):
        raise ConfigurationError(
            f"mesh is {shown(mesh)}, but it must be a torch.distributed.device_mesh.DeviceMesh, which says the "
            "processes that share a text: init_device_mesh(device, (num_processes,)), called by all of them; or None, "
            "and the model reads whole texts again."
        )
    if mesh.ndim != 1:
        raise ConfigurationError(
            f"The mesh has {mesh.ndim} dimensions; give the one over which texts are cut, such as mesh['sp']."
        )


def refuse_generation(*args: Any, **kwargs: Any) -> None:
    """Raise UnsupportedBackendError."""
    raise UnsupportedBackendError(
        "A model on shards of a text (shard_sequence) does not generate: a new token belongs to one process, and the "
        "others would wait. Call shard_sequence(model, None), or generate with a copy that was not sharded."
    )


def cut_inputs(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of this process's tokens; a hook before every forward pass."""
    # an earlier call may have been refused by another hook
    model.__dict__.pop(BATCH, None)
    refuse_compiled()
    model_class: Any = type(model)
    given = {**dict(zip(forward_arguments(model_class), args, strict=False)), **kwargs}
    shards: Any = shards_of(model)
    is_pair = model.config.is_encoder_decoder
    batch = cut_source(model, given, shards) if is_pair else cut_batch(model, given, shards, shifts_labels(model))
    inputs = dict(batch.inputs)
    if not is_pair and isinstance(model, FamilyPreTrainedModel):
        inputs["attention_mask"] = model_mask(batch, model.config.is_causal)
    set_whole_table(model.config, batch.table)
    model.__dict__[BATCH] = batch
    return (), inputs


def join_loss(model: Any, args: tuple[Any, ...], outputs: Any) -> Any:
    """Return the outputs with the loss of the whole texts; a hook after every forward pass, even if that fails."""
    batch: Any = model.__dict__.pop(BATCH, None)
    shards: Any = shards_of(model)
    if batch is None or outputs is None or model.config.is_encoder_decoder:
        # the target, and its loss, are whole
        return outputs
    refuse_outputs(model, outputs, batch)
    return outputs if batch.labels is None else with_loss(model, outputs, batch, shards)


def refuse_outputs(model: Any, outputs: Any, batch: ShardedBatch) -> None:
    """Raise UnsupportedBackendError for outputs that are not of the tokens of this process, such as a pooled text."""
    shape = batch.inputs["input_ids" if "input_ids" in batch.inputs else "inputs_embeds"].shape[:2]
    for name, value in outputs.items():
        if name not in NOT_CUT and torch.is_tensor(value) and (value.ndim < 3 or value.shape[:2] != shape):
            raise UnsupportedBackendError(
                f"{type(model).__name__} returns {name} of shape {[*value.shape]}, which is not of the "
                f"{shape[1]} tokens that this process holds: it needs the whole text. Use a language model, a token "
                "classifier or a model that returns hidden states alone, or call shard_sequence(model, None)."
            )


def with_loss(model: Any, outputs: Any, batch: ShardedBatch, shards: SequenceShards) -> Any:
    """Return the outputs with the loss of the whole texts."""
    labels: Any = batch.labels
    if getattr(model, "_loss_function", None) is not None:
        raise UnsupportedBackendError("A loss function of your own (model.loss_function) cannot be summed over shards.")
    flat = outputs.logits.float().flatten(0, 1), labels.flatten().to(outputs.logits.device)
    own = cross_entropy(*flat, ignore_index=IGNORED_LABEL, reduction="sum")
    loss = SumOfProcesses.apply(own, shards.group) / torch.as_tensor(batch.num_labels, device=own.device)
    loss = own_loss(model.config, loss)
    loss = add_auxiliary_loss(loss, outputs.get("auxiliary_loss"), batch.whole_labels, batch.num_labels)
    # the loss comes first, also for those who index the outputs
    return type(outputs)(**{"loss": loss, **outputs})
