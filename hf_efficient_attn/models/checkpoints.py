"""What a checkpoint says about itself, before any weight is read."""

import json
from typing import Any

from transformers import PreTrainedConfig

from hf_efficient_attn.errors import CheckpointError

HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")


def saved_config(path: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the config saved at `path`, a folder or Hub name; empty if there is none, which loading will report.

    kwargs: of `from_pretrained`; what concerns the Hub counts.

    Raises:
        CheckpointError: there is one, and it is no JSON object.
    """
    if path is None:
        return {}
    hub = {name: kwargs[name] for name in HUB_ARGUMENTS if name in kwargs}
    try:
        found = PreTrainedConfig.get_config_dict(path, **hub)[0]
    except OSError as error:
        # transformers raises it for a file that is absent and for one that is no JSON
        if isinstance(error.__context__, json.JSONDecodeError | UnicodeDecodeError):
            raise CheckpointError(
                f"The config.json of {path} is damaged: it is no JSON. Copy or download the checkpoint again."
            ) from error
        return {}
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        # what is JSON, but no table, or too deep
        raise CheckpointError(
            f"The config.json of {path} is damaged: it is no table of fields. Copy or download the checkpoint again."
        ) from error
    if not isinstance(found, dict):
        raise CheckpointError(
            f"The config.json of {path} is damaged: it is no table of fields. Copy or download the checkpoint again."
        )
    return found
