"""Checks that refuse, with the reason, what the engine cannot compute: calls, inputs, and processes that disagree."""

import hashlib
import json
import sys
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from hf_efficient_attn.errors import ConfigurationError, InputError, UnsupportedBackendError
from hf_efficient_attn.integration.forward_context import cache_in, is_paged
from hf_efficient_attn.integration.layer_patterns import NAME
from hf_efficient_attn.layout.tracing import run_untraced
from hf_efficient_attn.layout.transfer import on_host, prefetch_to_host
from hf_efficient_attn.messages import shown

CONTEXT_PARALLEL = "torch.distributed.tensor.experimental._context_parallel._attention"


def refuse_unsupported(module: nn.Module, query: Tensor, options: dict[str, Any]) -> None:
    """Raise UnsupportedBackendError for calls that would be computed wrongly.

    Such calls have sinks per query (sinks per head, `s_aux`, are supported), a paged cache, or a sequence that is cut
    into shards by torch.
    """
    if options.get("sinks") is not None:
        raise UnsupportedBackendError(
            f'{type(module).__name__} has attention sinks for each query (sinks), which attn_implementation="{NAME}" '
            'cannot compute. Load the model with attn_implementation="eager" and without attention_pattern.'
        )
    refuse_paged(cache_in(options))
    if torch.compiler.is_compiling():
        return
    context_parallel = sys.modules.get(CONTEXT_PARALLEL)
    if hasattr(query, "placements") or (context_parallel and getattr(context_parallel, "_replaced_functions", None)):
        raise UnsupportedBackendError(
            "Context parallelism cuts the sequence into shards and would drop the pattern. Use hea.shard_sequence "
            "instead, with which processes share texts, or train with data parallelism (DDP, FSDP)."
        )


def refuse_paged(cache: Any) -> None:
    """Raise UnsupportedBackendError for the cache of continuous batching."""
    if is_paged(cache):
        raise UnsupportedBackendError(
            f'Continuous batching uses a paged cache, which attn_implementation="{NAME}" does not support. Use '
            "generate()."
        )


def refuse_division(model: Any) -> None:
    """Raise UnsupportedBackendError for a model that transformers has divided among processes in a way that fails."""
    if getattr(model, "_pp_stage", None) is not None:
        refuse_stages(type(model).__name__)
    refuse_uneven_heads(model)
    refuse_uneven_vocabulary(model)


def refuse_stages(model: str) -> None:
    """Raise UnsupportedBackendError for a model whose layers are divided among processes by pipeline parallelism.

    Args:
        model: the name of its class.
    """
    raise UnsupportedBackendError(
        f"Pipeline parallelism (pp_size) would compute {model} wrongly: processes after the first do not have the "
        "first layer, whose cache determines positions and masks; they embed their inputs again, and they return no "
        "loss. Use DistributedConfig(fsdp_size=...) or DistributedConfig(tp_size=...)."
    )


def refuse_uneven_heads(model: Any) -> None:
    """Raise UnsupportedBackendError if tensor parallelism cannot divide the key heads of a model among processes."""
    processes = getattr(model, "_tp_size", None) or 1
    if processes == 1:
        return
    count = getattr(model.config.get_text_config(), "num_key_value_heads", None)
    cuts_keys = any(name.endswith("k_proj") and how == "colwise" for name, how in (model._tp_plan or {}).items())
    if count is not None and count % processes and cuts_keys:
        raise UnsupportedBackendError(
            f"tp_size={processes} does not divide the {count} key head{'s' * (count > 1)} of {type(model).__name__}, "
            "whose projections would be cut within a head. Use a tp_size that divides them, or fsdp_size."
        )


def refuse_uneven_vocabulary(model: Any, *_: Any) -> None:
    """Raise UnsupportedBackendError in training if the FSDP2 of transformers would compute with outdated embeddings.

    This happens if a model's output layer is tied to its embedding, and the number of rows is not divisible by the
    number of processes. The signature allows use as a forward pre-hook.
    """
    processes = getattr(model, "_fsdp_size", None) or 1
    if processes == 1 or not model.training or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return
    config = model.config.get_text_config()
    is_tied = config.tie_word_embeddings and model.get_output_embeddings() is not None
    rows = model.get_input_embeddings().num_embeddings
    if is_tied and rows % processes:
        raise UnsupportedBackendError(
            f"fsdp_size={processes} does not divide the {rows} tokens of the vocabulary, and the input and output "
            f"embeddings of {type(model).__name__} are tied: transformers' FSDP2 would continue with the weights of "
            "the previous step. Call model.resize_token_embeddings(pad_to_multiple_of=64), save the model and load "
            "it again, or use FSDP2 through accelerate."
        )


# Inputs that no model of this package or on "efficient" accepts: no tokens, masks with values other than 0 and 1.


# the argument by which a call marks its global tokens, as in transformers' Longformer
MARKED = "global_attention_mask"


def refuse_empty(name: str, given: Any, num_axes: int) -> None:
    """Raise InputError if one of the first `num_axes` sizes of an input is 0 (no examples or no tokens).

    The models of transformers cannot compute such inputs either. While compiling, nothing is checked.
    """
    if not isinstance(given, Tensor) or torch.compiler.is_compiling():
        return
    if 0 in given.shape[:num_axes]:
        advice = "" if given.shape[0] == 0 else " If a cache holds the whole text already, pass a new one."
        raise InputError(f"There are no tokens: {name} has shape {list(given.shape)}. Leave such batches out.{advice}")


def check_mask_values(attention_mask: Any, name: str = "attention_mask") -> None:
    """Raise InputError for a padding mask with values other than 0 and 1, which models would interpret differently.

    While compiling, nothing is checked. Bool masks need no check; others are copied from an accelerator once per
    forward pass. An assertion on the device would not wait, but it would end the process without this message.
    """
    is_padding_mask = isinstance(attention_mask, Tensor) and attention_mask.ndim == 2
    if torch.compiler.is_compiling() or not is_padding_mask or attention_mask.dtype == torch.bool:
        return
    values = on_host(attention_mask)
    is_other = (values != 0) & (values != 1)
    if bool(is_other.any()):
        raise InputError(
            f"{name} holds {values[is_other][0].item()}; it must hold 1 for tokens and 0 for padding. Mark global "
            "tokens, 2 in the authors' masks, in global_attention_mask. A mask that is added to the scores must have "
            "four dimensions, [batch, 1, queries, keys]."
        )


def check_marked_shape(marked: Any, batch_size: int, num_tokens: int) -> None:
    """Raise InputError unless `global_attention_mask` has an entry for each token, the cached ones included."""
    if not isinstance(marked, Tensor) or tuple(marked.shape) != (batch_size, num_tokens):
        given = f"shape {list(marked.shape)}" if isinstance(marked, Tensor) else f"type {type(marked).__name__}"
        raise InputError(
            f"{MARKED} has {given}; it must be a tensor, [batch, tokens] = [{batch_size}, {num_tokens}], cached "
            "tokens first (a PatternCache takes no such mask once it has dropped tokens)."
        )


def check_marked(marked: Tensor, is_token: Tensor | None) -> None:
    """Raise InputError if `global_attention_mask` has values besides 0 and 1, or marks only padding in an example.

    While compiling, nothing is checked.

    is_token: [batch, tokens], 0 for padding; None: all are tokens.
    """
    if torch.compiler.is_compiling():
        return
    prefetch_to_host(marked, is_token)
    is_marked = on_host(marked)
    if bool(((is_marked != 0) & (is_marked != 1)).any()):
        raise InputError(
            f"{MARKED} holds {is_marked.unique().tolist()[:5]}; it must hold 0 and 1, separately from attention_mask. "
            "(The authors' single mask, with 2 for global tokens, is the sum of both.)"
        )
    if is_token is not None:
        on_padding = is_marked.any(1) & ~(is_marked.bool() & on_host(is_token).bool()).any(1)
        if bool(on_padding.any()):
            raise InputError(
                f"{MARKED} marks only padding in example {int(on_padding.nonzero()[0])}: the two masks are padded on "
                "different sides. Mark tokens where attention_mask is 1."
            )


# Processes that train one model must agree on its pattern; they compare it at the first training step.
#
# The first process that trains a model writes its config's fields into the store of the process group; every other
# process compares its own fields with these, and raises if they differ. No process waits, so a process that trains
# nothing, or another model, does not block the others. Models in DDP are compared only with models in DDP, so a process
# may first train another model, such as a reference, alone.


# the config fields of all families that decide which pairs are allowed
FIELDS = (
    "attention_pattern",
    "global_tokens",
    "global_projections",
    "full_attention_up_to",
    "random_blocks_in_eval",
    "span",
    "span_limit",
    "span_ramp",
    "include_self",
    "frozen_spans",
    "num_routing_heads",
    "layers_with_routing",
    "num_clusters",
    "cluster_tokens",
    "membership",
    "share_qk",
    "block",
    "attn_layers",
    "lsh_attn_chunk_length",
    "local_attn_chunk_length",
    "num_buckets",
    "num_hashes",
    "chunk_by_bucket",
    "hash_seed",
    "ring",
    "relay_init",
    "separate_sentences",
)
# the fields that distinguish models that processes may train side by side
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
# the attribute in which a module stores the pattern that was compared
COMPARED = "_compared_pattern"


def compare_processes(module: nn.Module) -> None:
    """Compare the module's config with that of the other processes, once in training and for every new pattern.

    Raises:
        ConfigurationError: another process of the default process group trains the model with another pattern.
    """
    if not module.training or not torch.is_grad_enabled():
        return
    if distributed.is_available() and distributed.is_initialized():
        run_untraced(_compare, module)


def _compare(module: nn.Module) -> None:
    config: Any = module.config
    pattern = getattr(config, FIELDS[0], None)
    num_processes, backend = distributed.get_world_size(), distributed.get_backend()
    if module.__dict__.get(COMPARED, module) is pattern or num_processes == 1 or backend == "fake":
        return
    store = distributed.distributed_c10d._get_default_store()
    rank, sizes = distributed.get_rank(), [getattr(config, name, None) for name in SIZES]
    # DDP is the only wrapper that modules within it can detect
    by = "DDP" if DistributedDataParallel._get_active_ddp_module() is not None else "itself"
    model = f"{type(config).__name__}{sizes} by {by}"
    # models of the same class and sizes are compared in the order in which they are trained
    number = store.add(f"hf_efficient_attn/{model}/trained by {rank}", 1)
    own = {"rank": rank, **{name: _described(getattr(config, name, None)) for name in FIELDS}}
    first = store.compare_set(f"hf_efficient_attn/{model}/{number}", "", json.dumps(own))
    _refuse_difference(json.loads(first), own)
    module.__dict__[COMPARED] = pattern


def _described(value: Any) -> list[str]:
    """Return a digest of a value, and its short form for messages; the store does not take long texts."""
    text = json.dumps(value, sort_keys=True, default=str)
    return [hashlib.sha256(text.encode()).hexdigest(), shown(value)]


def _refuse_difference(first: dict[str, Any], own: dict[str, Any]) -> None:
    for name in FIELDS:
        if first[name] != own[name]:
            raise ConfigurationError(
                f"The processes train different models: {name} is {first[name][1]} on rank {first['rank']} and "
                f"{own[name][1]} on rank {own['rank']}. Build the model from the same config in every process, or "
                "load the same checkpoint."
            )
