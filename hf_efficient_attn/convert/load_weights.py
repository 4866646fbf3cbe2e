"""Build a model from a config and fill it with converted weights."""

from typing import Any

import transformers
from torch import Tensor
from transformers import PreTrainedModel

from hf_efficient_attn.convert.notes import summarize
from hf_efficient_attn.convert.registry import AUTO_CLASSES
from hf_efficient_attn.errors import CheckpointError


def build_model(config: Any, head: str, weights: dict[str, Tensor]) -> tuple[PreTrainedModel, list[str]]:
    """Return a model in eval mode with the weights, in their dtype, and the names of parameters that got none.

    Raises:
        CheckpointError: weights that the model has no parameter for, of another shape, or shared by it and different.
    """
    dtype = next(tensor.dtype for tensor in weights.values() if tensor.is_floating_point())
    model = getattr(transformers, AUTO_CLASSES[head]).from_config(config, dtype=dtype)
    expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
    unknown = [name for name in weights if name not in expected]
    other = [name for name, tensor in weights.items() if name in expected and tensor.numel() != expected[name].numel()]
    if unknown or other:
        raise CheckpointError(
            f"The weights do not fit the {type(model).__name__} that the config describes. Without parameter: "
            f"{summarize(unknown) or 'none'}; of another shape: {summarize(other) or 'none'}."
        )
    tied = model.all_tied_weights_keys
    _check_tied(weights, tied, type(model).__name__)
    # the same numbers may stand in another shape: a bias of [vocab_size], or of [1, vocab_size]
    shaped = {name: tensor.reshape(expected[name]) for name, tensor in weights.items()}
    missing = model.load_state_dict(shaped, strict=False).missing_keys
    model.tie_weights()
    return model.eval(), [name for name in missing if name not in tied]


def _check_tied(weights: dict[str, Tensor], tied: dict[str, str], name: str) -> None:
    """Raise CheckpointError for weights that differ where the model has one, as transformers loads them untied."""
    pairs = {target: source for target, source in tied.items() if target in weights and source in weights}
    differing = [
        f"{target} and {source}"
        for target, source in pairs.items()
        # of one tensor also what is NaN
        if weights[target].data_ptr() != weights[source].data_ptr() and not weights[target].equal(weights[source])
    ]
    if differing:
        raise CheckpointError(
            f"The config ties weights of {name} that differ: {', '.join(differing)}. Set tie_word_embeddings=False in "
            "the source's config, if the checkpoint is right."
        )


def check_missing(missing: list[str], new: tuple[str, ...], model: PreTrainedModel) -> list[str]:
    """Return a note on parameters that start anew as they were to; raise CheckpointError for the others."""
    rest = [name for name in missing if name not in new]
    if rest:
        raise CheckpointError(f"The source has no weights for {summarize(rest)} of {type(model).__name__}.")
    if not missing:
        return []
    return [f"New in {type(model).__name__}, with start values, as the source has none: {summarize(missing)}."]
