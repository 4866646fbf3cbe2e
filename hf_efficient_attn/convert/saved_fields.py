"""Fields of a config.json that must be right before transformers may look at them: their kind, and no quantization."""

from typing import Any

from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_efficient_attn.attention.saved_implementation import SAVED_NAME
from hf_efficient_attn.errors import CheckpointError, ConfigurationError
from hf_efficient_attn.messages import shown


def check_saved_config(path: str, saved: dict[str, Any]) -> None:
    """Look at what a config.json says of itself; `saved` is empty if there is none.

    Raises:
        CheckpointError: none, or one of no model, or fields of another kind than they can be.
        ConfigurationError: quantized weights, or an unknown attention.
    """
    if "model_type" not in saved:
        raise CheckpointError(
            f"{path} has no config.json with a model_type. Give a folder that save_pretrained wrote, or a name on the "
            "Hub."
        )
    model_type, architectures = saved["model_type"], saved.get("architectures")
    if not isinstance(model_type, str):
        raise CheckpointError(f"The config in {path} says model_type={shown(model_type)}, which must be a name.")
    if architectures is not None and not (
        isinstance(architectures, list) and all(isinstance(name, str) for name in architectures)
    ):
        raise CheckpointError(
            f"The config in {path} says architectures={shown(architectures)}, which must be a list of names of classes."
        )
    if saved.get("quantization_config") is not None:
        raise ConfigurationError(
            f"The weights in {path} are quantized (quantization_config={shown(saved['quantization_config'])}). Convert "
            "the checkpoint that they were made of, and quantize what it becomes."
        )
    _check_attention(path, saved)


def _names_of_parts(name: Any) -> list[Any]:
    """Return the attention that a config names, or those of its parts where it has one for each."""
    if isinstance(name, dict):
        return [each for part in name.values() for each in _names_of_parts(part)]
    return [] if name is None else [name]


def _check_attention(path: str, saved: dict[str, Any]) -> None:
    """Refuse the attention of a repository on the Hub, whose code loading the model would run, and what is none."""
    for field in ("attn_implementation", "_attn_implementation"):
        for name in _names_of_parts(saved.get(field)):
            if name in ("eager", SAVED_NAME, *ALL_ATTENTION_FUNCTIONS.valid_keys()):
                continue
            raise ConfigurationError(
                f"The config in {path} says {field}={shown(name)}, which is no attention of transformers or of this "
                "package. Take the field out: attn_implementation is an argument of from_pretrained."
            )
