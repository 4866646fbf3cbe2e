"""What a checkpoint says about itself, before any weight is read."""

from typing import Any

from transformers import PreTrainedConfig

HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")


def saved_config(path: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the config saved at `path`, a folder or Hub name; empty if there is none, which loading will report.

    kwargs: of `from_pretrained`; what concerns the Hub counts.
    """
    if path is None:
        return {}
    hub = {name: kwargs[name] for name in HUB_ARGUMENTS if name in kwargs}
    try:
        return PreTrainedConfig.get_config_dict(path, **hub)[0]
    except OSError:
        return {}
