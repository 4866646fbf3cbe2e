"""Models whose forward adds the loss of their indexers, whoever else replaces it before or after."""

import functools
import inspect
from types import MethodType
from typing import Any

from hf_efficient_attn.models.indexed.index_training import forward_with_loss

# attributes: of a class, that which it is but for the loss; of a model, the forward that others had put there before
PLAIN_CLASS, FORWARD_BEFORE = "class_without_index_loss", "_forward_before_index_loss"


def add_index_loss(model: Any) -> None:
    """Have the forward of a model add the loss of its indexers, also where PEFT calls it directly.

    A class of its own does that, so that copies, replicas and files of the model have it, and what others put around
    its forward is put around this. What they had put there before hides the class, and is called by a method.
    """
    if not hasattr(type(model), PLAIN_CLASS):
        model.__class__ = class_with_index_loss(type(model))
        if "forward" in model.__dict__:
            setattr(model, FORWARD_BEFORE, model.forward)
            model.forward = MethodType(around_forward_before(type(model)), model)


@functools.lru_cache(maxsize=256)
def class_with_index_loss(plain: Any) -> Any:
    """Return a class of models that is the same to all that ask, but for its forward."""
    names = {name: getattr(plain, name) for name in ("__module__", "__qualname__", "__doc__")}
    made: Any = type(plain.__name__, (plain,), {**names, PLAIN_CLASS: plain, "__reduce_ex__": reduced})

    def forward(self: Any, *inputs: Any, **options: Any) -> Any:
        return forward_with_loss(self, functools.partial(plain.forward, self), inputs, options)

    # accelerate takes a forward out of its wrappers by going on to __wrapped__ for as long as there is one
    made.forward = without_wrapped(forward, plain.forward)
    return made


def around_forward_before(model_class: Any) -> Any:
    """Return the function of a model's own forward, which calls that which was there before."""

    @functools.wraps(model_class.forward)
    def forward(self: Any, *inputs: Any, **options: Any) -> Any:
        return forward_with_loss(self, getattr(self, FORWARD_BEFORE), inputs, options)

    # that of the class, for those who take a model out of all that is around its forward
    forward.__wrapped__ = model_class.forward  # type: ignore[attr-defined]
    return forward


def without_wrapped(function: Any, named: Any) -> Any:
    """Return a function with the name, the text and the signature of another, which is not to be found by it."""
    for name in functools.WRAPPER_ASSIGNMENTS:
        if hasattr(named, name):
            setattr(function, name, getattr(named, name))
    function.__signature__ = inspect.signature(named)
    return function


def reduced(model: Any, protocol: Any) -> tuple[Any, ...]:
    """Return how a model is copied and written to files, where its class is not to be found by its name."""
    made, (model_class, *_), *state = object.__reduce_ex__(model, max(protocol, 2))
    return without_state, (getattr(model_class, PLAIN_CLASS),), *state


def without_state(plain: Any) -> Any:
    """Return a model of the class with the loss, before its state is set."""
    made = class_with_index_loss(plain)
    return made.__new__(made)
