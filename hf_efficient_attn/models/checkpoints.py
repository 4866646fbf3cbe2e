"""What a checkpoint says about itself, before any weight is read."""

import json
from typing import Any

from transformers import PreTrainedConfig

from hf_efficient_attn.errors import CheckpointError

HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")


def saved_config(path: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the config saved at `path`, a folder or Hub name; empty if there is none, which loading will report.

    kwargs: those of `from_pretrained`; only the arguments for the Hub are used.

    Raises:
        CheckpointError: it is not a JSON object.
    """
    if path is None:
        return {}
    hub = {name: kwargs[name] for name in HUB_ARGUMENTS if name in kwargs}
    try:
        found = PreTrainedConfig.get_config_dict(path, **hub)[0]
    except OSError as error:
        # transformers raises it both for a missing file and for one that is not JSON
        if isinstance(error.__context__, json.JSONDecodeError | UnicodeDecodeError):
            raise CheckpointError(
                f"The config.json of {path} is damaged: it is not JSON. Copy or download the checkpoint again."
            ) from error
        return {}
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        # JSON, but not an object, or nested too deeply
        raise CheckpointError(
            f"The config.json of {path} is damaged: it is not a table of fields. Copy or download the checkpoint again."
        ) from error
    if not isinstance(found, dict):
        raise CheckpointError(
            f"The config.json of {path} is damaged: it is not a table of fields. Copy or download the checkpoint again."
        )
    return found
