"""What transformers may ask of models and attention modules, but the engine cannot compute."""

import sys
from typing import Any

import torch
from torch import Tensor, nn

from hf_efficient_attn.attention.cache_argument import cache_in, is_paged
from hf_efficient_attn.attention.layer_patterns import NAME
from hf_efficient_attn.errors import UnsupportedBackendError

# parts of scores that the engine does not have, by the argument that brings them
UNSUPPORTED = {
    "sinks": "has attention sinks of each query (sinks)",
}
CONTEXT_PARALLEL = "torch.distributed.tensor.experimental._context_parallel._attention"


def refuse_unsupported(module: nn.Module, query: Tensor, options: dict[str, Any]) -> None:
    """Raise UnsupportedBackendError for calls that would be computed wrongly.

    These have sinks per query (sinks per head, `s_aux`, are computed), paged caches, or sequences that are divided into
    shards.
    """
    for option, what in UNSUPPORTED.items():
        if options.get(option) is not None:
            raise UnsupportedBackendError(
                f'{type(module).__name__} {what}, which attn_implementation="{NAME}" cannot compute. Load the model '
                'with attn_implementation="eager" and without attention_pattern.'
            )
    refuse_paged(cache_in(options))
    if torch.compiler.is_compiling():
        return
    context_parallel = sys.modules.get(CONTEXT_PARALLEL)
    if hasattr(query, "placements") or (context_parallel and getattr(context_parallel, "_replaced_functions", None)):
        raise UnsupportedBackendError(
            "Context parallelism cuts the sequence into shards and would drop the pattern. Let processes share texts "
            "(hea.shard_sequence) instead, or train with data parallelism (DDP, FSDP)."
        )


def refuse_tracing() -> None:
    """Raise UnsupportedBackendError under `torch.jit.trace`, which keeps what masks and lengths say of one input."""
    if not torch.compiler.is_compiling() and torch._C._is_tracing():
        raise UnsupportedBackendError(
            "torch.jit.trace (which torch.onnx.export(dynamo=False) and TensorBoard's add_graph call) would keep the "
            "masks, buckets and lengths of the inputs that it is given, and compute other inputs wrongly. Use "
            "torch.export.export, or torch.onnx.export(dynamo=True), which take masks and lengths as inputs."
        )


def refuse_paged(cache: Any) -> None:
    """Raise UnsupportedBackendError for the cache of continuous batching."""
    if is_paged(cache):
        raise UnsupportedBackendError(
            f'Continuous batching keeps a paged cache, which attn_implementation="{NAME}" cannot read. Use generate().'
        )


def refuse_division(model: Any) -> None:
    """Raise UnsupportedBackendError for a model that transformers has divided among processes in a way that fails."""
    if getattr(model, "_pp_stage", None) is not None:
        refuse_stages(type(model).__name__)
    refuse_uneven_heads(model)
    refuse_uneven_vocabulary(model)


def refuse_stages(model: str) -> None:
    """Raise UnsupportedBackendError for a model whose layers pipeline parallelism has dealt out to processes.

    Args:
        model: the name of its class.
    """
    raise UnsupportedBackendError(
        f"Pipeline parallelism (pp_size) would compute {model} wrongly: processes after the first have no first layer, "
        "by whose cache positions and masks are counted, embed what they receive once more, and return no loss. Use "
        "DistributedConfig(fsdp_size=...) or DistributedConfig(tp_size=...)."
    )


def refuse_uneven_heads(model: Any) -> None:
    """Raise UnsupportedBackendError for a model whose key heads tensor parallelism cannot deal out to its processes."""
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
    """Raise UnsupportedBackendError in training where the FSDP2 of transformers would compute with old embeddings.

    It does with any model whose output layer is its embedding, once their rows cannot be divided among its processes.
    May be a hook before every forward pass.
    """
    processes = getattr(model, "_fsdp_size", None) or 1
    if processes == 1 or not model.training or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return
    config = model.config.get_text_config()
    is_tied = config.tie_word_embeddings and model.get_output_embeddings() is not None
    rows = model.get_input_embeddings().num_embeddings
    if is_tied and rows % processes:
        raise UnsupportedBackendError(
            f"fsdp_size={processes} does not divide the {rows} tokens of the vocabulary, which input and output of "
            f"{type(model).__name__} share: transformers' FSDP2 would go on with weights of the step before. Save it "
            "after model.resize_token_embeddings(pad_to_multiple_of=64) and load that, or use FSDP2 by accelerate."
        )
