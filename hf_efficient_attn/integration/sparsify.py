"""`sparsify`: give a transformers model or config an attention pattern, or remove it."""

import copy
from typing import Any, TypeVar

from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedConfig, PreTrainedModel

from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.integration.guard import BASE, leave_shared_configs, mark_checked, watch
from hf_efficient_attn.integration.layer_patterns import FIELD, KNOWN, NAME, mark_parts
from hf_efficient_attn.integration.model_info import check_class, checked_pattern
from hf_efficient_attn.integration.trial import base_class, copies_of, mark_tried, try_model

T = TypeVar("T", PreTrainedModel, PreTrainedConfig)

# the attention implementations that sparsify replaced, by config; configs have no hash
_replaced: WeakIdKeyDictionary = WeakIdKeyDictionary()


def sparsify(model_or_config: T, pattern: Any) -> T:
    """Give a model or config of transformers a sparse attention pattern, in place, and return it.

    The pattern is recorded in `config.attention_pattern` and saved with the model, and `attn_implementation` becomes
    "efficient". No weight changes. Positions count from the first token that is not padding. A model gets a copy of its
    config, so other models that were built from the same config object do not change. If you give a config that models
    already hold, all these models follow the pattern.

    A layer attends to nothing but the pattern: no attention sinks are added. A pretrained decoder gives much of its
    attention to the first tokens of a text, and its outputs are bad with a band that does not reach them (StreamingLLM,
    arXiv:2309.17453). Let it also attend to them:

    >>> import transformers
    >>> from hf_efficient_attn.patterns import Band, GlobalTokens
    >>> pattern = Band(left=256, right=0) | GlobalTokens([0, 1, 2, 3])
    >>> config = sparsify(transformers.LlamaConfig(hidden_size=16, num_attention_heads=2), pattern)
    >>> config.attention_pattern["kind"]
    'union'

    To choose global tokens for each example, pass a mask to the model, as for transformers' Longformer:
    `model(**inputs, global_attention_mask=mask)`, [batch, tokens] with cached tokens first, 1 = attends to all tokens
    and all tokens attend to it. In causal layers no token attends to later ones.

    Args:
        model_or_config: a model or config of transformers; in a composite model (vision and language), only the text
            part changes.
        pattern: one of these, or None, which restores the model's own attention:
            - a pattern or its expression, "band(256, 256) | global(0)", for all layers. Causal models use its causal
              form. Layers with sliding or chunked attention of their own keep it;
            - a list with one pattern per layer, or None for the layer's own attention;
            - {"tile": "LLG", "patterns": {"L": ..., "G": ...}}, where the letters are repeated over the layers;
            - {"encoder": ..., "decoder": ...} for an encoder-decoder, each of them one of the above or None. The forms
              above give the pattern to the encoder, and the decoder keeps its own attention. Cross-attention is always
              full. Classes that load only one part (T5EncoderModel, BartForCausalLM) follow the pattern of that part.

    Raises:
        ConfigurationError: a pattern of unknown form, or one that does not fit the model's layers or heads.
        UnsupportedBackendError: the model does not use the attention interface of transformers in every layer that has
            a pattern, or needs something that the engine cannot compute. A trial on the meta device finds this out
            before anything is changed. The error comes at or after the first forward pass instead if the forward pass
            depends on values, or has inputs that `trial_inputs` cannot make (in transformers 5.23 Gemma 4,
            HiggsAudioV2, JetMoe, LayoutLM, MarkupLM, Moshi, Splinter, X-MOD, BLIP-2 as a whole), or if the model is
            loaded or built with a pattern in its config.
    """
    if isinstance(model_or_config, PreTrainedModel):
        _sparsify_model(model_or_config, pattern)
    elif isinstance(model_or_config, PreTrainedConfig):
        _try(base_class(model_or_config), model_or_config, pattern)
        _record(model_or_config, pattern)
        model_or_config._attn_implementation = _implementation(model_or_config, pattern)
    else:
        raise ConfigurationError(
            f"sparsify takes a model or a config of transformers, not {type(model_or_config).__name__}. If another "
            "library wraps your model, give the model itself (model.module, model.get_base_model())."
        )
    return model_or_config


def _sparsify_model(model: PreTrainedModel, pattern: Any) -> None:
    check_class(type(model), model.config)
    is_tried = _try(type(model), model.config, pattern)
    shared = model.config
    leave_shared_configs(model)
    if shared in _replaced:
        _replaced[model.config] = _replaced[shared]
    text_config = model.config.get_text_config()
    before = getattr(text_config, FIELD, None)
    spec = _record(model.config, pattern)
    copies = copies_of(text_config, model)
    for config in copies:
        _write(config, spec)
    for module in model.modules():
        # this makes a compiled model recompile
        module.__dict__.pop(KNOWN, None)
    if pattern is None:
        model._supports_context_parallel = getattr(type(model), "_supports_context_parallel", False)
    # this also guards the model
    model.set_attn_implementation(_implementation(model.config, pattern) or model.get_correct_attn_implementation(None))
    for config in copies:
        config._attn_implementation = text_config._attn_implementation
    if spec != before:
        # the base that an adapter would name, see `warn_of_base`
        setattr(model, BASE, None if pattern is None else model.name_or_path)
    mark_parts(model)
    watch(model)
    mark_checked(model)
    for config in copies if is_tried else ():
        mark_tried(config)


def _try(model_class: Any, config: PreTrainedConfig, pattern: Any) -> bool:
    """Raise if a model would not follow the pattern, before anything changes; return whether a trial could be run."""
    if pattern is None or model_class is None:
        return False
    config = copy.deepcopy(config)
    _record(config, pattern)
    check = getattr(config.get_text_config(), "check", None)
    if check is not None:
        # some families of this package allow only certain patterns
        check()
    return try_model(model_class, config)


def _record(config: PreTrainedConfig, pattern: Any) -> Any:
    """Write the pattern into the config if it fits the model, and return the spec."""
    spec = None if pattern is None else checked_pattern(pattern, config)
    _write(config.get_text_config(), spec)
    return spec


def _write(config: PreTrainedConfig, spec: Any) -> None:
    if spec is None:
        config.__dict__.pop(FIELD, None)
    else:
        setattr(config, FIELD, spec)


def _implementation(config: PreTrainedConfig, pattern: Any) -> str | None:
    """Return the attention implementation to set, None for the default; store the one that "efficient" replaces."""
    current = config._attn_implementation
    if pattern is not None:
        if current != NAME:
            _replaced[config] = current
        return NAME
    replaced: str | None = _replaced.pop(config, None)
    return replaced if current == NAME else current
