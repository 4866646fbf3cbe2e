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

# prefix of modules whose files do not work outside this package
PACKAGE = "hf_efficient_attn."
# the key under which `from_dict` passes on fields that this version does not know
FOREIGN = "_foreign_fields"


class LibraryConfig:
    """Mixin for configs, before `PreTrainedConfig`: checks, and fields that training and adapter libraries read.

    A family's `check()` raises for fields from which no model can be built.

    Attributes:
        auto_map: Auto class → class in the model's own code; empty unless saved with such code. TRL reads it from every
            model that is not in transformers.
        lora_modules, ia3_modules: the linear maps that LoRA and similar adapters, and IA3, adapt in PEFT by default.
            IA3 scales the input of the last map of an MLP, `down_proj`, and the output of the others.
    """

    # the attention implementation if none is requested; None: the default of transformers
    default_implementation = NAME
    # whether layers call the engine directly, not through the attention interface of transformers
    follows_patterns = True
    # whether `shard_sequence` takes models of the family
    can_shard_sequence = False
    # whether backbones do the checks that `before_forward` does for other models on "efficient"
    checks_inputs = True
    lora_modules = ["q_proj", "v_proj"]
    ia3_modules = ["k_proj", "v_proj", "down_proj"]
    # outputs that `Trainer.predict` drops: the cache, under each name that a version of transformers has for it
    keys_to_ignore_at_inference = list(CACHE_NAMES)

    def __post_init__(self, **kwargs: Any) -> None:
        this: Any = self
        parent: Any = super()
        if FIELD in kwargs:
            # every model that can be sparsified has this field, and `check` needs it
            setattr(self, FIELD, kwargs.pop(FIELD))
        this.check()
        foreign = kwargs.pop(FOREIGN, {})
        check_names(self, kwargs)
        parent.__post_init__(**{"auto_map": {}, **kwargs, **foreign})

    @property
    def _attn_implementation(self) -> Any:
        """The attention implementation; the default is the family's, whatever model is built from the config.

        transformers would ask the class of the model for a default. A user's model that contains one of our backbones
        would then choose its own default for the backbone.
        """
        default = "eager" if self.__dict__.get("_output_attentions") else self.default_implementation
        return self.__dict__.get("_attn_implementation_internal") or default

    @_attn_implementation.setter
    def _attn_implementation(self, value: Any) -> None:
        PreTrainedConfig._attn_implementation.fset(self, value)

    @property
    def output_attentions(self) -> bool | None:
        """Whether layers return attention weights; True selects "eager" if no implementation is chosen yet."""
        return self._output_attentions

    @output_attentions.setter
    def output_attentions(self, value: bool | None) -> None:
        if self.__dict__.get("_attn_implementation_internal") is None:
            self._output_attentions = value
        else:
            PreTrainedConfig.output_attentions.fset(self, value)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Build a config as `PreTrainedConfig.from_dict` does; warn about unknown fields, and keep those of the file.

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
        """Do as transformers for classes outside this package; our own are saved with a stub (`hub.saving`)."""
        if not cls.__module__.startswith(PACKAGE):
            parent: Any = super()
            parent.register_for_auto_class(auto_class)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a dict, without `experts_implementation` and an empty `auto_map`.

        In other saved configs `experts_implementation` is the name of this package, so that transformers refuses to
        load them without it. A family does not need that, because its model type is then unknown. PEFT calls this
        method before it looks up the modules of a model type, so they are registered here.
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
    # also for the other methods of PEFT that adapt the same modules of Llama as LoRA
    for name, modules in known.items():
        if name.endswith("_TARGET_MODULES_MAPPING") and modules.get("llama") == lora["llama"]:
            modules[config.model_type] = config.lora_modules
    known["TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING"][config.model_type] = config.ia3_modules
    known["TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING"][config.model_type] = ["down_proj"]


def check_given_pattern(config: Any) -> None:
    """Check the `attention_pattern` that `sparsify` gives to a family without this field; write it in JSON types.

    Raises:
        ConfigurationError: a pattern of unknown form, or one that the model cannot have.
    """
    spec = getattr(config, FIELD, None)
    if spec is not None:
        checked_pattern(spec, config)
        write_pattern(config)


def count_key_heads(config: Any) -> None:
    """Replace None in the `num_key_value_heads` of a model's config by the number of query heads.

    PEFT multiplies by it. This is done only when a model is built, because the number of heads may change until then.
    """
    if getattr(config, "num_key_value_heads", 0) is None:
        config.num_key_value_heads = config.key_value_heads
