"""`index`: add an indexer to every layer of a decoder, which learns to select the keys to attend to."""

import functools
import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer, StaticIndexedLayer, StaticLayer

from hf_efficient_attn.errors import ConfigurationError, UnsupportedBackendError
from hf_efficient_attn.integration.forward_context import cache_in
from hf_efficient_attn.integration.indexer import (
    DENSE,
    LOSSES,
    STAGES,
    STATES,
    WARMUP,
    IndexStates,
    LightningIndexer,
    indexers_of,
    keeping,
)
from hf_efficient_attn.integration.layer_patterns import ENCODER, FIELD, FULL_ATTENTION, NAME, config_patterns
from hf_efficient_attn.integration.names import INDEXER, has_indexer
from hf_efficient_attn.integration.trial import passes_on
from hf_efficient_attn.messages import shown
from hf_efficient_attn.models.indexed.index_training import add_index_loss, name_units
from hf_efficient_attn.models.indexed.own_rotary import READS_CHOICE
from hf_efficient_attn.patterns.bands import Causal
from hf_efficient_attn.patterns.serialization import is_integer

# Before the attention of a layer: the indexer's states are added to the arguments, and its keys to the cache.


# cache layers, and the cache layers that also keep the keys of an indexer
INDEXED_LAYERS: dict[type, Any] = {DynamicLayer: DynamicIndexedLayer, StaticLayer: StaticIndexedLayer}


def with_index_states(module: Any, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Add the states of the indexer to the arguments of an attention module; a forward pre-hook.

    Raises:
        UnsupportedBackendError: the model uses another attention implementation, the cache cannot keep the keys of an
            indexer, or the loss of the indexer would be lost.
    """
    field = getattr(module.config, INDEXER)
    if field["stage"] == DENSE:
        return None
    if module.config._attn_implementation not in getattr(module, READS_CHOICE, (NAME,)):
        raise UnsupportedBackendError(
            f"{type(module).__name__} has an indexer, but its attn_implementation is "
            f"{shown(module.config._attn_implementation)}, which would attend to all keys. Call "
            f'model.set_attn_implementation("{NAME}"), or hea.training.index_stage(model, "dense").'
        )
    hidden_states = options["hidden_states"] if "hidden_states" in options else inputs[0]
    with keeping(field["stage"]):
        queries, keys, weights = module.indexer(hidden_states, *options["position_embeddings"])
    if module.training and queries.requires_grad and LOSSES not in options:
        raise UnsupportedBackendError(
            f"{type(module).__name__} has an indexer (hea.index), but its loss would be lost: the forward that adds "
            "it was not called, or the layers do not pass keyword arguments on. Call the model itself, remove what "
            'replaces its forward or its layers, or call hea.training.index_stage(model, "dense").'
        )
    cache = cache_in(options)
    if cache is not None:
        keys = indexed_layer_of(cache, module.layer_idx).update_indexer(keys)
    return inputs, {**options, STATES: IndexStates(queries, keys, weights, field["top_k"], field["stage"])}


def indexed_layer_of(cache: Any, layer: int) -> Any:
    """Return a layer of a cache, replaced if necessary by one that also keeps the keys of an indexer.

    Raises:
        UnsupportedBackendError: there is no such replacement for this kind of layer.
    """
    # add missing layers as the cache does
    while len(cache.layers) <= layer and cache.layer_class_to_replicate is not None:
        cache.layers.append(cache.layer_class_to_replicate())
    found = cache.layers[layer]
    if hasattr(found, "update_indexer"):
        return found
    kind = INDEXED_LAYERS.get(type(found))
    if kind is None:
        raise UnsupportedBackendError(
            f"The cache has a {type(found).__name__}, which does not keep the keys of an indexer. Generate with the "
            'default cache, or with cache_implementation="static".'
        )
    replaced = kind(max_cache_len=getattr(found, "max_cache_len", None))
    replaced.__dict__.update(found.__dict__)
    cache.layers[layer] = replaced
    return replaced


def rotated_dims(rotary: Any, states: Tensor, position_ids: Tensor) -> int | None:
    """Return how many dimensions a model rotates, if dimension i is paired with i + half of them, otherwise None."""
    cos = rotary(states, position_ids)[0]
    first, second = cos.chunk(2, -1)
    return int(cos.shape[-1]) if bool((first == second).all()) else None


def index(model: PreTrainedModel, top_k: int, num_heads: int = 16, head_dim: int | None = None) -> PreTrainedModel:
    """Add an indexer to every layer of a decoder, in place (DeepSeek sparse attention); return the model.

    This is the sparse attention of DeepSeek-V3.2 (arXiv:2512.02556) for any Llama-like decoder: a small indexer scores
    all earlier keys, and a query attends to the `top_k` keys with the highest scores, the same keys for all heads.
    Indexers are trained in two stages, and start in the first:

    1. "warmup": the model keeps full attention and its weights are frozen, while the indexers learn to predict its
       attention (KL divergence from the mean of the heads). The paper uses a learning rate of 1e-3.
    2. `index_stage(model, "sparse")`: queries attend to the selected keys. The model learns from its own loss, and each
       indexer from the attention over the keys that it selected; neither loss has a gradient for the other part. The
       paper uses 7.3e-6.

    In training, the loss of the indexers is added to the model's loss, and is the `auxiliary_loss` of its output; if
    you compute your own loss, add it. It is the mean over queries, summed over layers; the paper also sums over
    queries. `Trainer` works as it is; `AuxiliaryLossCallback` logs this loss. `save_pretrained` and `from_pretrained`
    keep the indexers and the stage; generation keeps their keys in the cache. `index_recall` returns the share of the
    attention on the selected keys.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> import hf_efficient_attn as hea
    >>> sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 9}
    >>> model = hea.index(LlamaForCausalLM(LlamaConfig(num_attention_heads=2, **sizes)), top_k=8, num_heads=2)
    >>> sum(p.numel() for p in model.parameters() if p.requires_grad)
    1632
    >>> hea.training.index_stage(model, "sparse").config.attention_indexer["stage"]
    'sparse'

    Args:
        model: a decoder of transformers with rotary positions and full causal attention, or a SparseTransformer or
            SimplifiedTransformer of this kind. Shaped attention then subtracts the mean over the selected keys. For a
            model without a head, `auxiliary_loss` is the only loss of the output.
        top_k: how many keys a query attends to; sequences of at most `top_k` tokens keep full attention. DeepSeek-V3.2
            has 2,048.
        num_heads, head_dim: number and width of the indexer's heads; head_dim None: the number of dimensions that the
            model rotates. The paper has 64 heads of 128.

    Raises:
        ConfigurationError: numbers below 1, or a model that already has indexers or has an attention_pattern.
        UnsupportedBackendError: another kind of model.
    """
    for name, value in (("top_k", top_k), ("num_heads", num_heads), ("head_dim", head_dim)):
        if not (is_integer(value) and value > 0) and (name, value) != ("head_dim", None):  # type: ignore[operator]
            raise ConfigurationError(f"{name}={shown(value)} must be an integer of at least 1.")
    rotated = checked_rotation(model)
    head_dim = rotated if head_dim is None else head_dim
    if head_dim < rotated:
        raise ConfigurationError(
            f"head_dim={head_dim} must be at least {rotated}, the number of dimensions that RoPE rotates."
        )
    model.set_attn_implementation(NAME)
    field = {"top_k": top_k, "num_heads": num_heads, "head_dim": head_dim, "stage": WARMUP}
    setattr(model.config, INDEXER, field)
    add_indexers(model)
    for each in (model.base_model, model):
        name_units(each)
    for module in indexers_of(model):
        module.to(model.device, model.dtype)
        module.apply(model._init_weights)
    return index_stage(model, WARMUP)


def index_stage(model: Any, stage: str) -> Any:
    """Put the indexers of a model into a stage, choose which parameters are trained, and return the model.

    Args:
        model: made by `index`, or loaded.
        stage: "warmup": full attention, and only the indexers are trained; "sparse": attention to the selected keys,
            and all parameters are trained; "dense": full attention, and all parameters except the indexers are trained.

    Raises:
        ConfigurationError: a model without indexers, or an unknown stage.
    """
    if stage not in STAGES:
        raise ConfigurationError(f"stage={shown(stage)} must be one of {', '.join(map(shown, STAGES))}.")
    if not isinstance(model, PreTrainedModel):
        raise ConfigurationError(
            f"index_stage takes a model of transformers, not {type(model).__name__}: it would train frozen weights. "
            "Choose the stage before get_peft_model(model, LoraConfig(..., modules_to_save=['indexer'])), which trains "
            "indexers together with the adapters."
        )
    found = list(indexers_of(model))
    if not found:
        raise ConfigurationError(f"This {type(model).__name__} has no indexers. Call hea.index(model, top_k=...).")
    # a new dict, because the dict of a loaded config may be shared
    setattr(model.config, INDEXER, {**getattr(model.config, INDEXER), "stage": stage})
    of_indexers = {parameter for module in found for parameter in module.parameters()}
    for parameter in model.parameters():
        # quantized weights cannot require gradients
        if parameter.is_floating_point():
            parameter.requires_grad_(stage != DENSE if parameter in of_indexers else stage != WARMUP)
    return model


def checked_rotation(model: Any) -> int:
    """Return how many dimensions of its heads a model rotates, after checking that it can have indexers.

    Raises:
        ConfigurationError: the model already has indexers, or it has an attention_pattern.
        UnsupportedBackendError: the model cannot have indexers.
    """
    if not isinstance(model, PreTrainedModel):
        raise ConfigurationError(f"index takes a model of transformers, not {type(model).__name__}.")
    if has_indexer(model.config):
        raise ConfigurationError("This model already has indexers. Call hea.training.index_stage(model, stage).")
    if not attends_to_all_before(model.config):
        raise ConfigurationError("This model has an attention_pattern; remove it with sparsify(model, None).")
    name, base = type(model).__name__, model.base_model
    rotary = model.index_rotary() if hasattr(model, "index_rotary") else getattr(base, "rotary_emb", None)
    layers = getattr(base, "layers", None)
    kinds = set(getattr(model.config, "layer_types", None) or [FULL_ATTENTION])
    if layers is None or rotary is None or not all(takes_states(getattr(layer, "self_attn", None)) for layer in layers):
        raise UnsupportedBackendError(f"index needs a decoder with rotary positions, such as Llama; {name} is not one.")
    if kinds != {FULL_ATTENTION} or getattr(model.config, "sliding_window", None) is not None:
        raise UnsupportedBackendError(
            f"{name} has layers that do not attend to all earlier tokens; index needs full attention."
        )
    positions = torch.arange(2, device=model.device)[None]
    rotated = rotated_dims(rotary, torch.zeros(1, 2, 1, device=model.device), positions)
    if rotated is None:
        raise UnsupportedBackendError(
            f"{name} rotates neighbouring dimensions; index needs RoPE that rotates halves, as in Llama."
        )
    # layers of our families pass them on
    if not hasattr(model, "index_rotary") and not passes_on(type(model), model.config, LOSSES):
        raise UnsupportedBackendError(
            f"The layers of {name} do not pass keyword arguments on to their attention, but index needs this. Use a "
            "decoder whose layers do, such as Llama."
        )
    return rotated


def attends_to_all_before(config: Any) -> bool:
    """Return whether every layer of a causal model attends to all earlier tokens, judged by its `attention_pattern`."""
    spec = getattr(config, FIELD, None)
    patterns = () if spec is None else config_patterns(spec, config, ENCODER) or ()
    return all(pattern is None or pattern.causal() == Causal() for pattern in patterns)


def takes_states(attention: Any) -> bool:
    """Return whether a module is an attention module that passes keyword arguments on to the attention function."""
    kinds = () if attention is None else inspect.signature(attention.forward).parameters.values()
    return hasattr(attention, "layer_idx") and any(kind.kind is inspect.Parameter.VAR_KEYWORD for kind in kinds)


def add_indexers(model: Any) -> None:
    """Add the indexers of the config to layers without them, and the loss of the indexers to the model's forward."""
    field, config = getattr(model.config, INDEXER), model.config
    for layer in model.base_model.layers:
        attention = layer.self_attn
        if not hasattr(attention, "indexer"):
            attention.indexer = LightningIndexer(config.hidden_size, field["num_heads"], field["head_dim"])
            attention.register_forward_pre_hook(with_index_states, with_kwargs=True)
    for each in (model.base_model, model):
        add_index_loss(each)


# A model whose config has indexers gets them when it is built, before its weights are loaded.


MARK = "_adds_indexers"


def build_indexers() -> None:
    """Make transformers add indexers to models whose configs have them; further calls do nothing.

    This replaces two methods of `PreTrainedModel`: `post_init`, because it is the only call between the construction of
    the modules and the loading of weights, and `from_pretrained`, because it makes all parameters trainable.
    """
    model_class: Any = PreTrainedModel
    if not getattr(model_class.post_init, MARK, False):
        model_class.post_init = with_indexers(model_class.post_init)
        model_class.from_pretrained = classmethod(with_stage(model_class.from_pretrained.__func__))


def with_indexers(post_init: Any) -> Any:
    """Wrap `post_init` so that it first adds the indexers, which it then initializes like all other modules."""

    @functools.wraps(post_init)
    def adding(model: Any, *args: Any, **kwargs: Any) -> Any:
        if is_indexed(model):
            add_indexers(model)
        result = post_init(model, *args, **kwargs)
        if is_indexed(model):
            # `post_init` sets the sharding units of all other modules
            name_units(model)
        freeze(model)
        return result

    setattr(adding, MARK, True)
    return adding


def with_stage(from_pretrained: Any) -> Any:
    """Wrap `from_pretrained` so that it freezes the parameters that are not trained in the model's stage."""

    @functools.wraps(from_pretrained)
    def loading(model_class: Any, *args: Any, **kwargs: Any) -> Any:
        result = from_pretrained(model_class, *args, **kwargs)
        # with output_loading_info, the result is a pair
        freeze(result[0] if isinstance(result, tuple) else result)
        return result

    return loading


def freeze(model: Any) -> None:
    """Freeze the parameters that are not trained in the stage of a model with indexers."""
    if is_indexed(model):
        index_stage(model, getattr(model.config, INDEXER)["stage"])


def is_indexed(model: Any) -> bool:
    """Return whether the config of a model has indexers and the model has layers for them."""
    return has_indexer(getattr(model, "config", None)) and hasattr(model.base_model, "layers")
