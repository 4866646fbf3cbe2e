"""What training and adapter libraries read from a config, although transformers' base class does not define it."""

from typing import Any

from hf_efficient_attn.models.config.errors import refused
from hf_efficient_attn.models.config.unknown import check_names, warn_of_unknown


class LibraryConfig:
    """Mixin for configs, before `PreTrainedConfig`.

    Attributes:
        auto_map: Auto class → class in the model's own code; empty unless saved with such code. TRL reads it from every
            model that is not in transformers.
    """

    def __post_init__(self, **kwargs: Any) -> None:
        parent: Any = super()
        check_names(self, kwargs)
        parent.__post_init__(**{"auto_map": {}, **kwargs})
        warn_of_unknown(self, kwargs)

    def to_dict(self) -> dict[str, Any]:
        """As `PreTrainedConfig.to_dict`, but without an empty `auto_map`.

        Raises:
            FieldError: a value that transformers cannot write.
        """
        parent: Any = super()
        with refused(type(self), vars(self)):
            written: dict[str, Any] = parent.to_dict()
        if not written.get("auto_map"):
            written.pop("auto_map", None)
        return written


def count_key_heads(config: Any) -> None:
    """Write the number of key heads into the config of a model, where None stands for as many as query heads.

    PEFT multiplies by it. This waits until a model is built, since the number of heads may change until then.
    """
    if getattr(config, "num_key_value_heads", 0) is None:
        config.num_key_value_heads = config.key_value_heads
