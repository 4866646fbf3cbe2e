"""What every config of this package does when it is built or saved, whatever its fields."""

import sys
from typing import Any

from transformers import PreTrainedConfig

from hf_efficient_attn.integration.forward_context import CACHE_NAMES
from hf_efficient_attn.integration.layer_patterns import FIELD, NAME
from hf_efficient_attn.integration.model_info import checked_pattern
from hf_efficient_attn.integration.saving import SAVED_EXPERTS
from hf_efficient_attn.models.config.checks import write_pattern
from hf_efficient_attn.models.config.errors import check_names, foreign_fields, warn_of_unread

# how the modules of classes begin whose files make no sense outside their package
PACKAGE = "hf_efficient_attn."
# under which `from_dict` passes on fields that this version does not know
FOREIGN = "_foreign_fields"


class LibraryConfig:
    """Mixin for configs, before `PreTrainedConfig`: checks, and fields that training and adapter libraries read.

    A family says in `check()` what no model can be built from.

    Attributes:
        auto_map: Auto class → class in the model's own code; empty unless saved with such code. TRL reads it from every
            model that is not in transformers.
        lora_modules, ia3_modules: the linear maps that LoRA and similar adapters, and IA3, adapt in PEFT by default.
            IA3 scales the input of the last map of an MLP, `down_proj`, and the output of the others.
    """

    # the attention implementation of models for which none is asked; None: the default of transformers
    default_implementation = NAME
    # whether layers ask the engine themselves, not through the attention interface of transformers
    follows_patterns = True
    # whether `shard_sequence` takes models of the family
    can_shard_sequence = False
    # whether backbones check by themselves what `before_forward` checks for other models on "efficient"
    checks_inputs = True
    lora_modules = ["q_proj", "v_proj"]
    ia3_modules = ["k_proj", "v_proj", "down_proj"]
    # by `Trainer.predict`; transformers reads it from a config whatever its own name of a cache is
    keys_to_ignore_at_inference = list(CACHE_NAMES)

    def __post_init__(self, **kwargs: Any) -> None:
        this: Any = self
        parent: Any = super()
        if FIELD in kwargs:
            # a field of every model that can be sparsified, which `check` asks for
            setattr(self, FIELD, kwargs.pop(FIELD))
        this.check()
        foreign = kwargs.pop(FOREIGN, {})
        check_names(self, kwargs)
        parent.__post_init__(**{"auto_map": {}, **kwargs, **foreign})

    @property
    def _attn_implementation(self) -> Any:
        """As `PreTrainedConfig`'s, with the family's own by default, whatever model is built of the config.

        transformers asks the class of the model for a default, and that of a user's own, around one of our backbones,
        would answer for it.
        """
        default = "eager" if self.__dict__.get("_output_attentions") else self.default_implementation
        return self.__dict__.get("_attn_implementation_internal") or default

    @_attn_implementation.setter
    def _attn_implementation(self, value: Any) -> None:
        PreTrainedConfig._attn_implementation.fset(self, value)

    @property
    def output_attentions(self) -> bool | None:
        """As `PreTrainedConfig`'s: set before an implementation was chosen, it chooses "eager"."""
        return self._output_attentions

    @output_attentions.setter
    def output_attentions(self, value: bool | None) -> None:
        if self.__dict__.get("_attn_implementation_internal") is None:
            self._output_attentions = value
        else:
            PreTrainedConfig.output_attentions.fset(self, value)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As `PreTrainedConfig.from_dict`; warns about unknown fields, and keeps those that come from the file.

        Unknown fields of a file may come from a newer version or from its author, and a saved model must load. Unknown
        keywords may be meant for a tokenizer or a model.
        """
        parent: Any = super()
        foreign = foreign_fields(cls, config_dict)
        warn_of_unread(cls, kwargs)
        if foreign:
            config_dict = {name: value for name, value in config_dict.items() if name not in foreign}
            config_dict[FOREIGN] = foreign
        return parent.from_dict(config_dict, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """As transformers', for classes of others; those of this package are saved with a stub (`hub.saving`)."""
        if not cls.__module__.startswith(PACKAGE):
            parent: Any = super()
            parent.register_for_auto_class(auto_class)

    def to_dict(self) -> dict[str, Any]:
        """As `PreTrainedConfig.to_dict`, but without an empty `auto_map`, and without the saved name as experts.

        Nothing loads a family without this package, whose name it would be refused by. PEFT calls this before it looks
        up which modules a model of this type has.
        """
        parent: Any = super()
        name_adapted_modules(self)
        written: dict[str, Any] = parent.to_dict()
        written.pop(SAVED_EXPERTS, None)
        if not written.get("auto_map"):
            written.pop("auto_map", None)
        return written


def name_adapted_modules(config: Any) -> None:
    """Tell PEFT, if it has been imported, which modules of a model with this config it adapts by default."""
    constants = sys.modules.get("peft.utils.constants")
    known = {} if constants is None else vars(constants)
    lora = known.get("TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING", {})
    if not lora or lora.get(config.model_type) == config.lora_modules:
        return
    # other methods of PEFT adapt the modules of LoRA: those of Llama tell which
    for name, modules in known.items():
        if name.endswith("_TARGET_MODULES_MAPPING") and modules.get("llama") == lora["llama"]:
            modules[config.model_type] = config.lora_modules
    known["TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING"][config.model_type] = config.ia3_modules
    known["TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING"][config.model_type] = ["down_proj"]


def check_given_pattern(config: Any) -> None:
    """Write the `attention_pattern` that `sparsify` gives to a family without this field in JSON types.

    Raises:
        ConfigurationError: a pattern of unknown form, or one that the model cannot have.
    """
    spec = getattr(config, FIELD, None)
    if spec is not None:
        checked_pattern(spec, config)
        write_pattern(config)


def count_key_heads(config: Any) -> None:
    """Write the number of key heads into the config of a model, where None stands for as many as query heads.

    PEFT multiplies by it. This waits until a model is built, since the number of heads may change until then.
    """
    if getattr(config, "num_key_value_heads", 0) is None:
        config.num_key_value_heads = config.key_value_heads
