"""Fields that no config of a family has: refused, with the name of the field that was probably meant."""

import dataclasses
import difflib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig
from transformers.utils import logging

from hf_efficient_attn.attention.indexed.config_field import INDEXER
from hf_efficient_attn.messages import shown
from hf_efficient_attn.models.config.errors import FieldError
from hf_efficient_attn.models.config.fields import own_fields

logger = logging.get_logger(__name__)
# from 0 to 1: names at least this similar are taken for misspelt
ALIKE = 0.85
# letters; longer names are not compared
LONGEST = 100
# how the configs of transformers, other libraries and older presets call a field or an argument of a preset: the first
# of these names that a family has is the one that was meant
RENAMED: dict[str, tuple[str, ...]] = {
    name: meant
    for names, meant in {
        "causal is_autoregressive": ("is_causal",),
        "n_layer n_layers num_layers num_encoder_layers encoder_num_hidden_layers depth": ("num_hidden_layers",),
        "num_decoder_layers decoder_num_hidden_layers": ("decoder_layers", "num_hidden_layers"),
        "encoder_layers decoder_layers": ("num_hidden_layers",),
        "n_embd n_embed embed_dim d_model dim model_dim hidden_dim hidden": ("hidden_size",),
        "n_head n_heads num_heads heads encoder_attention_heads decoder_attention_heads": ("num_attention_heads",),
        "n_head_kv num_kv_heads n_kv_heads": ("num_key_value_heads",),
        "n_inner d_ff d_inner ffn_dim ffn_hidden_size mlp_dim feed_forward_size": ("intermediate_size",),
        "encoder_ffn_dim decoder_ffn_dim": ("intermediate_size",),
        "n_positions n_ctx max_seq_len max_seq_length max_sequence_length context_length": ("max_position_embeddings",),
        "activation activation_function hidden_activation feed_forward_proj": ("hidden_act",),
        "dropout hidden_dropout_prob dropout_rate dropout_prob resid_pdrop resid_dropout": ("hidden_dropout",),
        "attn_pdrop attn_dropout attention_probs_dropout_prob": ("attention_dropout",),
        "embd_pdrop embed_dropout": ("embedding_dropout",),
        "layer_norm_eps layer_norm_epsilon layernorm_epsilon rms_norm_eps norm_epsilon": ("norm_eps",),
        "init_std initializer_std": ("initializer_range",),
        "type_vocab": ("type_vocab_size",),
        "block_size": ("block_tokens", "chunk_tokens", "cluster_tokens", "lsh_attn_chunk_length"),
        "window window_size sliding_window local_attention_window": (
            *("attention_window", "span_limit", "local_radius", "left"),
            *("cluster_tokens", "attention_pattern", "lsh_attn_chunk_length", "num_nodes"),
        ),
        "pattern layer_pattern layer_types": ("attention_pattern",),
        "clusters n_clusters": ("num_clusters",),
        "window_tokens": ("cluster_tokens",),
        "max_span attn_span adapt_span span_length": ("span_limit",),
        "global_attention": ("global_tokens",),
        "num_rand_blocks": ("num_random_blocks",),
    }.items()
    for name in names.split()
}
# what transformers, older versions of it and libraries write into a config or ask of any, beside what it declares
WRITTEN = {
    *GenerationConfig._get_default_generation_params(),
    *("torch_dtype", "attn_implementation", "experts_implementation", "per_layer_config", "name_or_path", "auto_map"),
    *("rope_theta", "rope_scaling", "partial_rotary_factor", "original_max_position_embeddings", "num_labels"),
    *("quantization_config", "quantization", "compression_config", "custom_pipelines", "adapter_config"),
    *("is_decoder", "add_cross_attention", "cross_attention_hidden_size", "tie_encoder_decoder", "tie_word_embeddings"),
    *("pruned_heads", "prefix", "task_specific_params", "finetuning_task", "tokenizer_class", "problem_type"),
    *("torchscript", "use_bfloat16", "tf_legacy_loss", "xla_device", "gradient_checkpointing", "pretraining_tp"),
    *("use_return_dict", "loss_type", "use_cache", "initializer_range", "summary_dropout_prob", "classifier_bias"),
    *("trust_remote_code", "revision", "transformers_weights", "sentence_transformers", "is_prompt_learning"),
    *("unsloth_version", "unsloth_fixed", "output_router_logits", "router_aux_loss_coef"),
    *("attention_pattern", INDEXER),
}
# the same, by how the names end: as tokenizers name their tokens
WRITTEN_ENDS = ("_token_id", "_token_index")
_OR_PATTERN = ", or set the fields yourself: attention_pattern=Band(32, 32) is a window of 64"


def check_names(config: Any, fields: Mapping[str, Any], families: Iterable[type]) -> None:
    """Raise FieldError for names that are not fields of a config: transformers would keep them, and nothing read them.

    What transformers itself writes, and what other libraries add, passes.

    Args:
        families: configs of all families, of which the message names those that have such a field.
    """
    cls = type(config)
    for name, value in fields.items():
        # found in the class without calling a property
        found = inspect.getattr_static(cls, name, None)
        is_computed = isinstance(found, property) and found.fset is None
        start = f"{shown(name, 60)[1:-1]}={shown(value, 60)} is no field of {cls.__name__}"
        if is_computed or callable(getattr(cls, name, None)) or isinstance(found, Mapping) > isinstance(value, Mapping):
            what = "follows from other fields" if is_computed else "belongs to the class"
            raise FieldError(f"{start}: {name} {what}. Leave it out.")
        if name == "is_decoder" and value and getattr(config, "is_causal", True) is False:
            raise FieldError(f"{start}, whose attention has both directions. Write is_causal=True, or leave it out.")
        if name == "add_cross_attention" and value:
            raise FieldError(f"{start}: it has no cross-attention. SparseSeq2SeqConfig and BPSeq2SeqConfig have it.")
        if not is_known(cls, name):
            raise FieldError(f"{start}, and would change nothing{near(cls, name) or _owners(cls, name, families)}")


def is_known(cls: Any, name: str) -> bool:
    """Return whether a config class may be given a name: a field, or what transformers and libraries write.

    >>> from hf_efficient_attn import SparseTransformerConfig
    >>> is_known(SparseTransformerConfig, "is_decoder"), is_known(SparseTransformerConfig, "n_layer")
    (True, False)
    """
    return (
        name in WRITTEN
        or name.startswith("_")
        or name.endswith(WRITTEN_ENDS)
        # of the class, or an argument of a subclass
        or inspect.getattr_static(cls, name, cls) is not cls
        or name in inspect.signature(cls).parameters
    )


def foreign_fields(cls: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a saved config that this class does not know; warn of them.

    A newer version has written them, or whoever saved the config: the model must load nevertheless.
    """
    found = {name: value for name, value in fields.items() if not is_known(cls, name)}
    if found:
        meant = {name: meant_by(cls, name) for name in [*found][:5]}
        names = ", ".join(shown(name, 60) + (f" (was {like} meant?)" if like else "") for name, like in meant.items())
        logger.warning_once(
            f"A saved {cls.__name__} has fields that this version of hf_efficient_attn does not know: {names}. They "
            "are kept and change nothing. If a newer version has saved it, the model may compute something else there: "
            f"update the package. Fields of your own are declared in a subclass of {cls.__name__}."
        )
    return found


def warn_of_unread(cls: Any, options: Mapping[str, Any]) -> None:
    """Warn of keywords with which a config is loaded that are near to a field: transformers drops them."""
    for name, value in options.items():
        meant = None if is_known(cls, name) else near(cls, name)
        if meant is not None:
            start = f"{shown(name, 60)[1:-1]}={shown(value, 60)} is no field of {cls.__name__}"
            logger.warning_once(f"{start}, and changes nothing in its config{meant}")


def meant_by(cls: Any, name: str) -> str | None:
    """Return the field, or the argument of a preset, that was probably meant by a name; None: it is near to nothing."""
    fields, arguments = _names(cls), preset_arguments(cls)
    renamed = (each for each in RENAMED.get(name, ()) if each in fields or each in arguments)
    meant = next(renamed, None) or nearest_field(cls, name)
    if meant is not None:
        return meant
    # of presets, which make fields of their arguments
    found = [name] if name in arguments else _close(name, [*arguments]) + _longer(name, arguments)
    return next(iter(found), None)


def near(cls: Any, name: str) -> str | None:
    """Return the end of a message that says what was probably meant by a name; None: it is near to nothing."""
    fields, arguments, meant = _names(cls), preset_arguments(cls), meant_by(cls, name)
    if meant is None:
        return None
    if meant in fields:
        return f". Write {meant}=…, or leave it out."
    presets = ", ".join(arguments[meant])
    return (
        f"; {meant} is an argument of its presets: {presets}. "
        f"Write {cls.__name__}.{arguments[meant][0]}({meant}=…){_OR_PATTERN if 'attention_pattern' in fields else ''}."
    )


def _owners(cls: Any, name: str, families: Iterable[type]) -> str:
    """Return the end of a message about a name that is near to nothing: which families have such a field."""
    owners = [family.__name__ for family in families if name in own_fields(family)]
    if owners:
        return f": only {', '.join(owners)} have it. Leave it out."
    return f". help({cls.__name__}) lists its fields; a subclass may declare more."


def preset_arguments(cls: Any) -> dict[str, list[str]]:
    """Return the arguments from which presets of a config class make fields, each with its presets.

    >>> from hf_efficient_attn import SparseTransformerConfig
    >>> preset_arguments(SparseTransformerConfig)["attention_window"]
    ['longformer']
    """
    fields = {field.name for field in dataclasses.fields(cls)}
    arguments: dict[str, list[str]] = {}
    for parent in cls.__mro__[: cls.__mro__.index(PreTrainedConfig)]:
        for preset, method in vars(parent).items():
            if isinstance(method, classmethod):
                for argument in list(inspect.signature(method.__func__).parameters.values())[1:]:
                    if argument.kind is argument.POSITIONAL_OR_KEYWORD and argument.name not in fields:
                        arguments.setdefault(argument.name, []).append(preset)
    return arguments


def nearest_field(cls: Any, name: str) -> str | None:
    """Return the field of a config class of which a name is a misspelling or a short form; None: there is none.

    >>> from hf_efficient_attn import SparseTransformerConfig
    >>> nearest_field(SparseTransformerConfig, "num_layer"), nearest_field(SparseTransformerConfig, "is_decoder")
    ('num_hidden_layers', None)
    """
    names = _names(cls)
    words = _words(name)
    longer = [each for each in names if len(words) > 1 and words[0] == _words(each)[0] and {*words} < {*_words(each)}]
    return next(iter(_close(name, names) + longer), None)


def _names(cls: Any) -> list[str]:
    """Return the fields of a config class, without those of all configs of transformers, and its other names."""
    inherited = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    return [*(field.name for field in dataclasses.fields(cls) if field.name not in inherited), *cls.attribute_map]


def _close(name: str, names: list[str]) -> list[str]:
    # difflib takes quadratic time
    return difflib.get_close_matches(name, names, n=1, cutoff=ALIKE) if len(name) < LONGEST else []


def _longer(name: str, names: Iterable[str]) -> list[str]:
    """Return the names that have one word more."""
    words = {*_words(name)}
    return [each for each in names if words < {*_words(each)} and len(_words(each)) == len(words) + 1]


def _words(name: str) -> list[str]:
    return [word.rstrip("s") for word in name.lower().split("_")]
