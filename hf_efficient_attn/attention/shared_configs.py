"""Models that were built of one config object, which all of them hold: what one of them follows is written into it."""

import copy
import weakref
from threading import Lock
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

# all models that transformers has built, parts of others among them
_models: "weakref.WeakSet[PreTrainedModel]" = weakref.WeakSet()
_lock = Lock()


def note_model(model: PreTrainedModel) -> None:
    """Note that a model exists."""
    with _lock:
        _models.add(model)


def _noted() -> list[PreTrainedModel]:
    with _lock:
        return list(_models)


def leave_shared_configs(model: PreTrainedModel) -> None:
    """Give a model copies of its configs if models that are no part of it, nor it of them, hold one of them, too.

    So that these go on as they are. A model that it is a part of gets the same copies.
    """
    whole = _whole(model)
    own = set(whole.modules())
    held = {id(config) for module in own for config in _configs_of(module).values()}
    others = [other for other in _noted() if other not in own]
    if not any(id(config) in held for other in others for config in _configs_of(other).values()):
        return
    # one copy for each, with the parts that they share
    memo: dict[int, Any] = {}
    for module in own:
        for name, config in _configs_of(module).items():
            module.__dict__[name] = copy.deepcopy(config, memo)


def _whole(model: PreTrainedModel) -> PreTrainedModel:
    """Return the largest model of which a model is a part; itself: of none."""
    holders = [other for other in _noted() if other is not model and any(part is model for part in other.modules())]
    return max([model, *holders], key=lambda each: sum(1 for _ in each.modules()))


def _configs_of(module: nn.Module) -> dict[str, PreTrainedConfig]:
    return {name: value for name, value in vars(module).items() if isinstance(value, PreTrainedConfig)}
