"""Each indexer has its parameters in shards of its own under FSDP, as the layers of the model have.

The loss of an indexer has a backward pass beside that of its layer: FSDP would gather the parameters of the layer only
for the latter, and would be done with their gradients when that is over.
"""

from typing import Any

from torch import distributed, nn

from hf_efficient_attn.attention.indexed.lightning_indexer import LightningIndexer
from hf_efficient_attn.errors import UnsupportedBackendError

# where transformers keeps what is in shards of its own, and how; both by the names of modules
PLAN, FREED = "_fsdp_plan", "free_full_weight"


def name_units(model: Any) -> None:
    """Have accelerate, Trainer and transformers put the indexers of a model in shards of their own."""
    model._no_split_modules = {*(model._no_split_modules or ()), LightningIndexer.__name__}
    plan = getattr(model, PLAN, None)
    if plan:
        base = next(name for name, module in model.named_modules() if module is model.base_model)
        plan[".".join(filter(None, (base, "layers.*.self_attn.indexer")))] = FREED


def refuse_shared_units(model: Any) -> None:
    """Raise UnsupportedBackendError if an indexer is in the shards of its layer."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    for layer in model.base_model.layers:
        indexer = layer.self_attn.indexer
        if not any(map(is_unit, indexer.modules())) and any(map(is_unit, modules_around(indexer, layer))):
            raise UnsupportedBackendError(
                f"FSDP has the indexers of this {type(model).__name__} in the shards of their layers, where they would "
                "not learn. Shard each before its layer by fully_shard(layer.self_attn.indexer), or name both in "
                "fsdp_transformer_layer_cls_to_wrap, "
                f"as in LlamaDecoderLayer,{LightningIndexer.__name__}; accelerate does so where it is left out."
            )


def modules_around(module: nn.Module, outermost: nn.Module) -> list[nn.Module]:
    """Return the modules within another that hold a module, and the other."""
    return [each for each in outermost.modules() if any(inner is module for inner in each.modules())]


def is_unit(module: nn.Module) -> bool:
    """Return whether FSDP, of either version, has parameters of a module in shards of their own."""
    # slow to import, and missing where torch is built without processes
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    return isinstance(module, FSDPModule | FullyShardedDataParallel)
