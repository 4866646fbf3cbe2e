"""Time, memory and cache of every attention mechanism, by the length of the text.

Models of one layer and of equal width, which take turns; `--causal` takes the mechanisms with a causal form, and also
decodes after the text: time for one more token, and memory of the cache. A training step is a forward and a backward
pass. Times are in milliseconds, memory is in MiB, lengths are in tokens:
    python model_cards/benchmarks/mechanisms.py --lengths 512 4096 32768 --mechanisms dense band linear --causal
"""

from collections.abc import Callable
from typing import Any

import torch
from contest import MEASURES, Built, Contest, drawn_states, forward_case, training_case
from torch import Tensor, nn
from transformers import AutoModel

from hf_efficient_attn.bench.mechanisms import (
    DENSE,
    DENSE_LIMIT,
    MECHANISMS,
    SCORES_LIMIT,
    Shape,
    config_of,
)
from hf_efficient_attn.bench.timing import Case
from hf_efficient_attn.errors import InputError
from hf_efficient_attn.integration.forward_context import CACHE_ARGUMENT

DECODING = "decoding"
SEED = 0
# a small vocabulary, because layers are measured and not their embedding
VOCAB_SIZE = 64
# positions after the text, for decoded tokens
MOST_DECODED = 512


class Model(nn.Module):
    """A model of one layer, from embeddings to the last hidden state."""

    def __init__(self, model: Any, new_cache: Callable[[Any], Any] | None) -> None:
        super().__init__()
        self.model, self.new_cache = model, new_cache

    def forward(self, states: Tensor) -> Tensor:
        return self.model(inputs_embeds=states, use_cache=False).last_hidden_state  # type: ignore[no-any-return]

    def loss(self, states: Tensor) -> Tensor:
        """Return a loss that depends on all outputs, including auxiliary losses of layers."""
        out = self.model(inputs_embeds=states, use_cache=False)
        loss, added = out.last_hidden_state.float().square().mean(), getattr(out, "auxiliary_loss", None)
        return loss if added is None else loss + added

    def decode(self, states: Tensor, cache: Any = None) -> Any:
        """Return the cache after more tokens."""
        if cache is None and self.new_cache is not None:
            cache = self.new_cache(self.model)
        return self.model(inputs_embeds=states, use_cache=True, **{CACHE_ARGUMENT: cache})[CACHE_ARGUMENT]


def build_model(name: str, shape: Shape) -> Model:
    """Return a new model of one of `MECHANISMS`."""
    torch.manual_seed(SEED)
    model = AutoModel.from_config(config_of(name, shape, MOST_DECODED, vocab_size=VOCAB_SIZE))
    return Model(model, MECHANISMS[name].cache).to(shape.device, getattr(torch, shape.dtype))


def build(name: str, shape: Shape) -> Built:
    """Return a new model with its timed cases; a causal model also decodes one more token after the text."""
    model = build_model(name, shape)
    states = drawn_states(shape.batch_size, shape.tokens, shape.hidden_size, shape.dtype, shape.device)

    def step() -> None:
        model.loss(states).backward()
        model.zero_grad()

    cases = {"forward": forward_case(model, states), "training": training_case(model, step)}
    if not shape.is_causal:
        return Built(cases)
    with torch.no_grad():
        cache, token = model.eval().decode(states), states[:, :1]
    size = cache_bytes(cache)
    cases[DECODING] = Case(torch.no_grad()(lambda _: model.decode(token, cache)), model.eval)
    return Built(cases, {"cache_bytes": size})


def cache_bytes(cache: Any) -> int:
    """Return the bytes of all tensors that the layers of a cache hold; shared memory counts once."""
    held = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
        for layer in cache.layers
        for value in vars(layer).values()
        if isinstance(value, Tensor)
    }
    return sum(held.values())


def check(settings: dict[str, Any]) -> None:
    """Raise InputError for a mechanism that has no such direction, or more rounds than tokens can be decoded."""
    is_causal = settings["is_causal"]
    able = [name for name, mechanism in MECHANISMS.items() if is_causal in mechanism.directions]
    missing = [name for name in settings["mechanisms"] if name not in able]
    if missing and len(settings["mechanisms"]) < len(MECHANISMS):
        raise InputError(
            f"--mechanisms {' '.join(missing)}: there is no {'causal' if is_causal else 'bidirectional'} form. Leave "
            f"it out, or take {'away' if is_causal else 'also'} --causal."
        )
    # by default all mechanisms that have this direction
    settings["mechanisms"] = [name for name in settings["mechanisms"] if name in able]
    if settings["repeats"] >= MOST_DECODED:
        raise InputError(f"repeats={settings['repeats']}: at most {MOST_DECODED - 1} tokens are decoded behind a text.")


CONTEST = Contest(
    __file__,
    title="Ways to compute a layer: width {hidden_size}, {heads} heads, {dtype}, batch {batch_size}",
    kind="mechanism",
    contestants={name: mechanism.about for name, mechanism in MECHANISMS.items()},
    shape=Shape,
    build=build,
    lengths=(512, 1024, 2048, 4096, 8192, 16384, 32768, 65536),
    memory_lengths=(2048, 16384),
    counts={
        "batch_size": (1, "texts"),
        "hidden_size": (512, "width"),
        "heads": (8, "heads"),
        "keys": (256, "keys that a token attends to, about, where that can be chosen"),
        DENSE_LIMIT: (16384, "longest text of what computes all pairs of tokens"),
        SCORES_LIMIT: (4096, "longest text of what holds a score of each pair"),
    },
    options={
        "--causal": {
            "action": "store_true",
            "dest": "is_causal",
            "help": "tokens attend to their left, and are decoded",
        }
    },
    limits={name: mechanism.limit for name, mechanism in MECHANISMS.items() if mechanism.limit},
    against=(DENSE,),
    measures={**MEASURES, DECODING: "one more token"},
    check=check,
    about="From embeddings to the last hidden state, without dropout, with an MLP four times as wide (except for the "
    "star). Training step: forward and backward.",
)

if __name__ == "__main__":
    CONTEST.run(__doc__)
