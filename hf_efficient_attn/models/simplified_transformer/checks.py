"""What the family refuses: foreign checkpoints, and attention implementations that would compute something else."""

from typing import Any

from hf_efficient_attn.attention.layer_patterns import NAME
from hf_efficient_attn.attention.trial import MATRIX_TRIAL, TRIAL
from hf_efficient_attn.errors import CheckpointError, UnsupportedBackendError
from hf_efficient_attn.messages import shown
from hf_efficient_attn.models.checkpoints import saved_config
from hf_efficient_attn.models.config.fields import own_fields
from hf_efficient_attn.models.implementations import BACKEND_OF_IMPLEMENTATION

from .configuration_simplified_transformer import SimplifiedTransformerConfig

# what adds the bias of ALiBi to scores, trials included
WITH_BIAS = ("eager", "sdpa", "flex_attention", NAME, TRIAL, MATRIX_TRIAL)


class BlockChecks:
    """Mixin: weights and implementations are refused with which a model would not compute what its config says."""

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        """As transformers'; refuses what would not compute what the config describes."""
        implementation = super().get_correct_attn_implementation(requested_attention, is_init_check)
        check_implementation(self.config, implementation)
        return implementation

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As `PreTrainedModel.from_pretrained`; refuses the weights of another block or family."""
        check_checkpoint(cls, pretrained_model_name_or_path, kwargs)
        return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)


def check_checkpoint(model_class: type, path: Any, kwargs: dict[str, Any]) -> None:
    """Raise CheckpointError if the checkpoint at `path` was written by another block or another family.

    `kwargs` are those of `from_pretrained`: its `config` or single fields say what is wanted.
    """
    saved = saved_config(path, kwargs)
    if not saved:
        return  # there is no config: an adapter, or nothing at all, which from_pretrained reports itself
    config_class = model_class.config_class
    if saved.get("model_type", config_class.model_type) != config_class.model_type:
        raise CheckpointError(
            f"{path} holds a {shown(saved['model_type'])} model; {model_class.__name__} cannot read it. Simplified "
            "blocks have no counterpart for its skips and projections: train from scratch."
        )
    wanted = kwargs.get("config")
    if not hasattr(type(wanted), "structure"):
        wanted = config_class(**{**_own_fields(config_class, saved), **_own_fields(config_class, kwargs)})
    wanted.check()
    before, after = config_class(**_own_fields(config_class, saved)).structure, wanted.structure
    changed = [name for name in before if before[name] != after[name]]
    if before["block"] != after["block"]:
        changed = changed[:1]  # the rest follows from it
    if changed:
        raise CheckpointError(
            f"{path} was saved with {', '.join(f'{name}={shown(before[name])}' for name in changed)}, and "
            f"{', '.join(f'{name}={shown(after[name])}' for name in changed)} is asked for: the weights would not fit, "
            "and what is missing would be random. Load it as it was saved, or train from scratch."
        )


def _own_fields(config_class: type, values: dict[str, Any]) -> dict[str, Any]:
    known = own_fields(config_class)
    return {name: value for name, value in values.items() if name in known}


def check_implementation(config: SimplifiedTransformerConfig, implementation: str | None, paged: bool = False) -> None:
    """Raise UnsupportedBackendError if `implementation` would not compute what the config describes.

    `paged`: whether the call comes from continuous batching, which gives attention a paged cache of keys and values.
    """
    name = implementation or "eager"
    if config.span is not None and (paged or (name not in BACKEND_OF_IMPLEMENTATION)):
        raise UnsupportedBackendError(
            f"attn_implementation={shown(name)}{' with a paged cache' if paged else ''} would drop the attention "
            f"pattern of span={shown(config.span)}. Use generate() with one of: {', '.join(BACKEND_OF_IMPLEMENTATION)}."
        )
    if config.is_centered and (paged or name in ("vllm", "sglang") or name.startswith("paged|")):
        raise UnsupportedBackendError(
            f"attn_implementation={shown(name)} keeps its own paged cache of keys and values, but "
            f"block={shown(config.block)} "
            "also needs the running mean of the values. Use generate() with 'sdpa', 'eager' or 'flex_attention'; "
            "block='pre_ln' and 'parallel' can be served."
        )
    if config.position_embedding_type == "alibi" and (paged or name not in WITH_BIAS):
        raise UnsupportedBackendError(
            f"attn_implementation={shown(name)}{' with a paged cache' if paged else ''} would drop the ALiBi bias. Use "
            "generate() with 'sdpa', 'eager' or 'flex_attention'."
        )
