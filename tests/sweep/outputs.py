"""What the sweep compares: outputs without and with padding, with a cache, and whom the last token reaches."""

from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.integration.forward_context import CACHE_ARGUMENT
from sweep.classes import CAUSAL, IMAGE, SEQ2SEQ
from sweep.inputs import PREFILL, TOKENS, inputs_of

WHOLE, PADDING, REACH, CACHED = "outputs", "left padding", "last token", "cache"
# by stage: whether the texts have padding
STAGES = {WHOLE: False, PADDING: True, REACH: False, CACHED: True}


def stages_of(kind: str) -> tuple[str, ...]:
    """Return what is compared of a class."""
    if kind == IMAGE:
        return (WHOLE,)
    return (WHOLE, PADDING, REACH, CACHED) if kind in (CAUSAL, SEQ2SEQ) else (WHOLE, PADDING, REACH)


@torch.no_grad()
def outputs_of(model: Any, kind: str, stage: str) -> Tensor:
    """Return the outputs of a stage; those of padding tokens are left out."""
    inputs = inputs_of(kind, model.config, STAGES[stage])
    if stage == REACH:
        return reached(model, kind, inputs)
    out = cached(model, kind, inputs) if stage == CACHED else first_tensor(model(**inputs))
    mask = inputs.get("attention_mask")
    return out if mask is None or mask.shape != out.shape[:2] else out[mask.bool()]


def reached(model: Any, kind: str, inputs: dict[str, Tensor]) -> Tensor:
    """Return by how much a change of the last token changes the outputs of those before it, [batch, tokens - 1]."""
    before = first_tensor(model(**inputs))
    name = "decoder_input_ids" if kind == SEQ2SEQ else "input_ids"
    ids = inputs[name].clone()
    ids[:, -1] = (ids[:, -1] + 1) % 56 + 4
    return (first_tensor(model(**{**inputs, name: ids})) - before)[:, :-1].flatten(2).abs().amax(-1)


def cached(model: Any, kind: str, inputs: dict[str, Any]) -> Tensor:
    """Return the outputs of a prompt and of single tokens after it."""
    name = "decoder_input_ids" if kind == SEQ2SEQ else "input_ids"
    ids, mask, cache, parts = inputs[name], inputs["attention_mask"], None, []
    if kind == SEQ2SEQ:
        inputs = {"attention_mask": mask, "encoder_outputs": model.get_encoder()(inputs["input_ids"], mask)}
    for start, stop in [(0, PREFILL), *((step, step + 1) for step in range(PREFILL, TOKENS))]:
        step = {**inputs, name: ids[:, start:stop], CACHE_ARGUMENT: cache, "use_cache": True}
        if kind != SEQ2SEQ:
            step["attention_mask"] = mask[:, :stop]
        out = model(**step)
        cache = out.past_key_values
        parts.append(first_tensor(out))
    return torch.cat(parts, 1)


def first_tensor(out: Any) -> Tensor:
    """Return the logits, or the first output that is a tensor."""
    logits = getattr(out, "logits", None)
    return logits if logits is not None else next(each for each in out.values() if torch.is_tensor(each))
