"""The models that `bench mechanisms` compares: from embeddings to the last hidden state, and what they are timed at."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel

from hf_efficient_attn.attention.cache_argument import CACHE_ARGUMENT
from hf_efficient_attn.bench.harness.steps import Step
from hf_efficient_attn.bench.mechanisms.cases import ALL, Shape, config_of

SEED = 0
# a small vocabulary: layers are measured, not a table of tokens
VOCAB_SIZE = 64


class Model(nn.Module):
    """A model of one layer, from embeddings to the last hidden state."""

    def __init__(self, model: Any, new_cache: Callable[[Any], Any] | None) -> None:
        super().__init__()
        self.model, self.new_cache = model, new_cache

    def forward(self, states: Tensor) -> Tensor:
        return self.model(inputs_embeds=states, use_cache=False).last_hidden_state  # type: ignore[no-any-return]

    def loss(self, states: Tensor) -> Tensor:
        """Return a number that all outputs have a part in, with what layers add to a loss."""
        out = self.model(inputs_embeds=states, use_cache=False)
        loss, added = out.last_hidden_state.float().square().mean(), getattr(out, "auxiliary_loss", None)
        return loss if added is None else loss + added

    def decode(self, states: Tensor, cache: Any = None) -> Any:
        """Return the cache after it has read more tokens."""
        if cache is None and self.new_cache is not None:
            cache = self.new_cache(self.model)
        return self.model(inputs_embeds=states, use_cache=True, **{CACHE_ARGUMENT: cache})[CACHE_ARGUMENT]


def build_model(name: str, shape: Shape) -> Model:
    """Return a new model of one of `ALL` mechanisms."""
    torch.manual_seed(SEED)
    model = AutoModel.from_config(config_of(name, shape, vocab_size=VOCAB_SIZE))
    return Model(model, ALL[name].cache).to(shape.device, getattr(torch, shape.dtype))


def training_step(model: Any, states: Tensor) -> Step:
    """Return a function that computes the gradients of all parameters, and frees them."""

    def step() -> None:
        model.train().loss(states).backward()
        model.zero_grad()

    return step


def build_training_step(name: str, shape: dict[str, Any]) -> Step:
    """Return the training step of a new model; arguments of JSON types, `shape` has the fields of `Shape`."""
    sizes = Shape(**shape)
    return training_step(build_model(name, sizes), sizes.states())


@torch.no_grad()
def read_prompt(model: Model, states: Tensor) -> tuple[Step, int]:
    """Return a function that decodes one more token behind a text, and the bytes of the cache behind that text."""
    cache, token = model.eval().decode(states), states[:, :1]
    size = cache_bytes(cache)

    @torch.no_grad()
    def step() -> None:
        model.decode(token, cache)

    return step, size


def cache_bytes(cache: Any) -> int:
    """Return the bytes of all tensors that the layers of a cache hold, each memory once."""
    held = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
        for layer in cache.layers
        for value in vars(layer).values()
        if isinstance(value, Tensor)
    }
    return sum(held.values())
