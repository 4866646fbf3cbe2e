"""Whether the layers of a model pass keyword arguments on to their attention, by a trial on the meta device."""

import copy
from contextlib import suppress
from typing import Any

import torch
from transformers import PreTrainedConfig

from hf_efficient_attn.attention.trial import TRIAL
from hf_efficient_attn.attention.trial_inputs import trial_inputs


def passes_on(model_class: Any, config: PreTrainedConfig, name: str) -> bool:
    """Return whether the attention of every layer gets a keyword argument of the model; True if no trial gets that far.

    Args:
        model_class: of a decoder, whose base has `layers`, each with `self_attn`.
    """
    config = copy.deepcopy(config)
    config._attn_implementation = TRIAL
    # without a cache, models look for packed documents in positions, which have no values here
    config.use_cache = True
    got: list[bool] = []

    def note(_: Any, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
        got.append(name in options)

    # code of other models may raise anything
    with suppress(Exception), torch.device("meta"), torch.no_grad():
        model = model_class(config).eval()
        for layer in model.base_model.layers:
            layer.self_attn.register_forward_pre_hook(note, with_kwargs=True)
        model(**next(trial_inputs(model)), **{name: None})
    return all(got)
