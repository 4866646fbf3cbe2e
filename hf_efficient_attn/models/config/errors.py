"""Config classes with typed fields: the error for a wrong or unknown field names it, and says what is allowed."""

import dataclasses
import difflib
import inspect
import re
from collections.abc import Mapping
from functools import wraps
from typing import Any, TypeVar

from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers import GenerationConfig, PreTrainedConfig
from transformers.utils import logging

from hf_efficient_attn.errors import ConfigurationError
from hf_efficient_attn.integration.names import INDEXER
from hf_efficient_attn.messages import shown

Config = TypeVar("Config")


class FieldError(ConfigurationError, StrictDataclassFieldValidationError, TypeError):
    """Error for a config field that transformers refuses; inherits from every exception that transformers would raise.

    Args:
        message: what is wrong, the value, and what is allowed.
    """

    def __init__(self, message: str) -> None:
        ConfigurationError.__init__(self, message)


def strict_config(cls: type[Config]) -> type[Config]:
    """Make a config class `strict`, so that the types of its fields are checked; wrong ones raise FieldError."""
    checked: Any = strict(cls)
    build, write = checked.__init__, checked.__setattr__

    @wraps(build)
    def __init__(self: Any, *args: Any, **fields: Any) -> None:
        if args:
            raise FieldError(
                f"{checked.__name__}({shown(args[0])}, …) has a positional argument. Pass fields by name, such as "
                "hidden_size=64."
            )
        # aliases are resolved before the fields are checked
        build(self, **{checked.attribute_map.get(name, name): value for name, value in fields.items()})

    @wraps(write)
    def __setattr__(self: Any, name: str, value: Any) -> None:
        name = checked.attribute_map.get(name, name)
        try:
            write(self, name, value)
        except StrictDataclassFieldValidationError as error:
            raise FieldError(f"{name}={shown(value)}; it must be {allowed_types(checked, name)}.") from error

    checked.__init__, checked.__setattr__ = __init__, __setattr__
    return cls


def allowed_types(cls: Any, name: str) -> str:
    """Return the types a field of a config may have, in words: "int or None"."""
    kind = cls.__dataclass_fields__[name].type
    text = kind.__name__ if isinstance(kind, type) and not hasattr(kind, "__args__") else str(kind)
    return re.sub(r"\b(typing|transformers)\.(\w+\.)*", "", text).replace(" | ", " or ")


# Unknown fields are refused, with the name of the field that was probably meant.


logger = logging.get_logger(__name__)
# similarity, from 0 to 1, from which a name counts as a misspelt field
ALIKE = 0.85
# names with more letters are not compared, because comparing takes quadratic time
LONGEST = 100
# names of fields in other libraries → our fields; the first field that the family has is the one that was meant
SPELLINGS: dict[str, tuple[str, ...]] = {
    spelling: fields
    for spellings, fields in {
        "causal": ("is_causal",),
        "n_layer n_layers num_layers depth": ("num_hidden_layers",),
        "num_decoder_layers": ("decoder_layers", "num_hidden_layers"),
        "n_embd d_model embed_dim dim": ("hidden_size",),
        "n_head n_heads num_heads": ("num_attention_heads",),
        "n_inner d_ff ffn_dim": ("intermediate_size",),
        "n_positions n_ctx max_seq_len": ("max_position_embeddings",),
        "activation_function": ("hidden_act",),
        "dropout hidden_dropout_prob": ("hidden_dropout",),
        "attention_probs_dropout_prob": ("attention_dropout",),
        "layer_norm_eps rms_norm_eps": ("norm_eps",),
        "block_size": ("block_tokens", "lsh_attn_chunk_length", "attention_pattern"),
        "attention_window window window_size sliding_window": (
            "span_limit",
            "attention_pattern",
            "lsh_attn_chunk_length",
        ),
        "pattern layer_types": ("attention_pattern",),
        "max_span": ("span_limit",),
    }.items()
    for spelling in spellings.split()
}
# names that transformers (or an older version) and other libraries write into any config, or ask any config for
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
# endings of such names, which tokenizers give to their special tokens
WRITTEN_ENDS = ("_token_id", "_token_index")


def check_names(config: Any, fields: Mapping[str, Any]) -> None:
    """Raise FieldError for names that are not fields of a config; transformers would keep them without any effect.

    Names that transformers or other libraries write are accepted.
    """
    cls = type(config)
    for name, value in fields.items():
        # static, so that a property is not called
        found = inspect.getattr_static(cls, name, None)
        start = f"{shown(name, 60)[1:-1]}={shown(value, 60)} is not a field of {cls.__name__}"
        if callable(getattr(cls, name, None)) or (isinstance(found, property) and found.fset is None):
            raise FieldError(f"{start}: the class defines {name} itself. Leave it out.")
        if name == "is_decoder" and value and getattr(config, "is_causal", True) is False:
            raise FieldError(f"{start}, and its attention is bidirectional. Write is_causal=True, or leave {name} out.")
        if name == "add_cross_attention" and value:
            raise FieldError(f"{start}, which has no cross-attention. SparseSeq2SeqConfig and BPSeq2SeqConfig have it.")
        if not is_known(cls, name):
            raise FieldError(f"{start} and would have no effect. {advice(cls, name)}")


def is_known(cls: Any, name: str) -> bool:
    """Return whether a config class accepts a name: a field, or a name that transformers or other libraries write.

    >>> from hf_efficient_attn import SparseTransformerConfig
    >>> is_known(SparseTransformerConfig, "is_decoder"), is_known(SparseTransformerConfig, "n_layer")
    (True, False)
    """
    return (
        name in WRITTEN
        or name.startswith("_")
        or name.endswith(WRITTEN_ENDS)
        # an attribute of the class, or an argument of a subclass
        or inspect.getattr_static(cls, name, cls) is not cls
        or name in inspect.signature(cls).parameters
    )


def foreign_fields(cls: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a saved config that this class does not know, and warn about them.

    They come from a newer version or from the author of the config, and the model must load all the same.
    """
    found = {name: value for name, value in fields.items() if not is_known(cls, name)}
    if found:
        logger.warning_once(
            f"A saved {cls.__name__} has fields that this version of hf_efficient_attn does not know: "
            f"{', '.join(shown(name, 60) for name in [*found][:5])}. They are kept, but have no effect. If a newer "
            "version saved it, the model may compute something else with them: update the package. Declare fields of "
            f"your own in a subclass of {cls.__name__}."
        )
    return found


def warn_of_unread(cls: Any, options: Mapping[str, Any]) -> None:
    """Warn about unknown keywords of `from_pretrained` that resemble a field; transformers drops them."""
    for name, value in options.items():
        meant = None if is_known(cls, name) else near_field(cls, name)
        if meant is not None:
            given = f"{shown(name, 60)[1:-1]}={shown(value, 60)}"
            logger.warning_once(f"{given} is not a field of {cls.__name__} and has no effect. Write {meant}=….")


def near_field(cls: Any, name: str) -> str | None:
    """Return the field of a config class that was probably meant by a name; None: no field resembles it.

    >>> from hf_efficient_attn import SparseTransformerConfig
    >>> near_field(SparseTransformerConfig, "num_layer"), near_field(SparseTransformerConfig, "is_decoder")
    ('num_hidden_layers', None)
    """
    inherited = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    names = [*(field.name for field in dataclasses.fields(cls) if field.name not in inherited), *cls.attribute_map]
    spelt = SPELLINGS.get(name) or SPELLINGS.get(f"{name}s", ())
    meant = next((each for each in spelt if each in names), None)
    if meant is not None or len(name) > LONGEST:
        return meant
    return next(iter(difflib.get_close_matches(name, names, n=1, cutoff=ALIKE)), None)


def advice(cls: Any, name: str) -> str:
    """Return what to write instead of an unknown name, in a sentence."""
    meant = near_field(cls, name)
    if meant == "attention_pattern":
        return "Write attention_pattern=…, in which Band(32, 32) is a window of 64, or the argument of a preset."
    if meant is not None:
        return f"Write {meant}=…, or leave it out."
    return f"help({cls.__name__}) lists its fields; a subclass may declare more."
