"""What the family refuses: foreign checkpoints, and attention implementations that would compute something else."""

from typing import Any

from transformers import PreTrainedConfig

from hf_efficient_attn.errors import CheckpointError, UnsupportedBackendError

from .configuration_simplified_transformer import SimplifiedTransformerConfig

HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")


def check_checkpoint(model_class: type, path: Any, kwargs: dict[str, Any]) -> None:
    """Raise CheckpointError if the checkpoint at `path` was written by another block or another family.

    `kwargs` are those of `from_pretrained`: the wanted block stands in its `config` or `block`.
    """
    if path is None:
        return
    hub = {name: kwargs[name] for name in HUB_ARGUMENTS if name in kwargs}
    saved, _ = PreTrainedConfig.get_config_dict(path, **hub)
    own_type = model_class.config_class.model_type
    if saved.get("model_type", own_type) != own_type:
        raise CheckpointError(
            f"{path} holds a {saved['model_type']!r} model; {model_class.__name__} cannot read it. Simplified blocks "
            "have no counterpart for its skips and projections: train from scratch."
        )
    config = kwargs.get("config")
    wanted = getattr(config, "block", None) or kwargs.get("block") or saved.get("block")
    if wanted != saved.get("block", wanted):
        raise CheckpointError(
            f"{path} was trained with block={saved['block']!r} and cannot be loaded as block={wanted!r}: the blocks "
            "have different weights. Load it without `block`, or train from scratch."
        )


def check_implementation(config: SimplifiedTransformerConfig, implementation: str | None, paged: bool = False) -> None:
    """Raise UnsupportedBackendError where `implementation` would compute something else than the config describes.

    `paged`: the call comes from continuous batching, which hands attention a paged cache of keys and values.
    """
    name = implementation or "eager"
    if config.is_shaped and (paged or name in ("vllm", "sglang") or name.startswith("paged|")):
        raise UnsupportedBackendError(
            f"attn_implementation={name!r} keeps its own paged cache of keys and values, but block={config.block!r} "
            "also needs the running mean of the values. Use generate() with 'sdpa', 'eager' or 'flex_attention'; "
            "block='pre_ln' and 'parallel' can be served."
        )
    if config.position_embedding_type == "alibi" and (paged or name not in ("eager", "sdpa", "flex_attention")):
        raise UnsupportedBackendError(
            f"attn_implementation={name!r}{' with a paged cache' if paged else ''} would drop the ALiBi bias. Use "
            "generate() with 'sdpa', 'eager' or 'flex_attention'."
        )
