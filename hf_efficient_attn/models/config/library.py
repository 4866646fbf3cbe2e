"""What libraries that train or adapt models read from a config, and transformers' own classes do not promise."""

from typing import Any

from hf_efficient_attn.models.config.errors import refused
from hf_efficient_attn.models.config.unknown import check_names, warn_of_unknown


class LibraryConfig:
    """Mixin for configs, before `PreTrainedConfig`.

    Attributes:
        auto_map: Auto class → class in code of the model's own; empty unless saved with such code. TRL reads it of
            every model that is not in transformers.
    """

    def __post_init__(self, **kwargs: Any) -> None:
        parent: Any = super()
        check_names(self, kwargs)
        parent.__post_init__(**{"auto_map": {}, **kwargs})
        warn_of_unknown(self, kwargs)

    def to_dict(self) -> dict[str, Any]:
        """As `PreTrainedConfig.to_dict`; without `auto_map` where there is no such code.

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
    """Write the number of key heads into the config of a model, where None stood for as many as there are heads.

    PEFT multiplies by it. Not before a model is built: until then the number of heads may be changed.
    """
    if getattr(config, "num_key_value_heads", 0) is None:
        config.num_key_value_heads = config.key_value_heads
