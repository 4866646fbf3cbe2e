"""The models' own eager attention, with a pattern put on top of its masks: what a sparsified model must compute."""

import contextlib
import inspect
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.patterns import Pattern
from sweep.inputs import SOURCE_TOKENS

EAGER = "eager_attention_forward"


class PatternOnEager:
    """Within it, every self-attention of a model that has a full layer reads only what a pattern allows.

    Attributes:
        starts: first token of each row that is not padding, by the numbers of keys that follow the pattern; calls with
            other numbers are cross-attention.
        calls: how often a pattern was put on a mask.
    """

    def __init__(self, model: Any, pattern: Pattern) -> None:
        self.model, self.pattern = model, pattern
        self.starts: Mapping[int, Tensor] = {}
        self.calls = 0

    def added(self, module: Any, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor | None:
        """Return the mask of a call with the pattern on it."""
        num_queries, num_keys = query.shape[2], key.shape[2]
        is_cross = num_queries != num_keys and num_keys == SOURCE_TOKENS
        if num_keys not in self.starts or is_cross or is_local(module):
            return mask
        self.calls += 1
        start = self.starts[num_keys][:, None]
        positions = torch.arange(num_keys)[None] - start
        allowed = self.pattern.allowed(positions[:, num_keys - num_queries :, None], positions[:, None, :])
        bias = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)[:, None]
        if mask is None:
            return bias
        mask = mask if mask.is_floating_point() else torch.zeros(mask.shape).masked_fill(~mask, bias.min())
        return torch.maximum(mask + bias, bias.min())

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Put the pattern on the eager attention of every modeling file that the model uses."""
        files = {sys.modules[type(module).__module__] for module in self.model.modules()}
        replaced = [(file, name, own) for file in files for name, own in vars(file).items() if name.endswith(EAGER)]

        def wrapped(own: Any) -> Any:
            signature = inspect.signature(own)

            def forward(*args: Any, **kwargs: Any) -> Any:
                call = signature.bind(*args, **kwargs)
                module, query, key = (call.arguments[name] for name in ("module", "query", "key"))
                call.arguments["attention_mask"] = self.added(module, query, key, call.arguments["attention_mask"])
                return own(*call.args, **call.kwargs)

            return forward

        for file, name, own in replaced:
            setattr(file, name, wrapped(own))
        try:
            yield
        finally:
            for file, name, own in replaced:
                setattr(file, name, own)


def is_local(module: Any) -> bool:
    """Return whether a layer is sliding or chunked by itself, which patterns leave alone."""
    kinds, layer = getattr(module.config, "layer_types", None), getattr(module, "layer_idx", None)
    return bool(kinds) and layer is not None and layer < len(kinds) and kinds[layer] != "full_attention"
