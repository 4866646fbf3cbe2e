"""Outputs of a source and of what it became, on the same random inputs: what `parity` promises is computed."""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_efficient_attn.convert.configs import DEFAULT_WINDOW, ConversionRequest
from hf_efficient_attn.convert.parity import EXCEPTIONS, PADDED, SHORTER, TOKEN_TYPES
from hf_efficient_attn.convert.positions import TARGET
from hf_efficient_attn.convert.preflight import TranslatedConfigs
from hf_efficient_attn.convert.registry import COUNTERPARTS
from hf_efficient_attn.convert.rename import to_ours
from hf_efficient_attn.convert.sample_inputs import MOST_TOKENS, sample_inputs
from hf_efficient_attn.convert.source import Source
from hf_efficient_attn.errors import CheckpointError

# of the largest output. Rounding in float32 stays below, an activation of another kind above: gelu_new for gelu 3e-4
TOLERANCE = 1e-4
# fields of our config that say nothing about outputs in eval mode
SILENT_IN_EVAL = (
    "embedding_dropout",
    "hidden_dropout",
    "activation_dropout",
    "attention_dropout",
    "classifier_dropout",
    "label_smoothing",
)
# from here on a number says that something is masked out
MASKED = 1e5


@dataclass(frozen=True)
class Difference:
    """The largest difference of two models' outputs: of which output, and as a share of its largest number."""

    output: str
    share: float
    tokens: int


def check_parity(source: Source, model: PreTrainedModel, request: ConversionRequest, configs: TranslatedConfigs) -> str:
    """Return a sentence on the comparison of a source with what it became.

    Raises:
        CheckpointError: outputs differ, and no deviation by design says so.
    """
    reason = _why_not_compared(source, request, configs)
    if reason is not None:
        return f"Outputs were not compared with the source's, as {reason}."
    found = compare(source, model, _num_tokens(source, request, configs))
    if found is None:
        return "Outputs were not compared with the source's, as those are not finite."
    apart = f"{found.output} differs by {found.share:.1g} of its largest number on {found.tokens} random tokens"
    if found.share <= TOLERANCE:
        return f"Compared with the source in eval mode: {apart}."
    if configs.theirs is not None and set(configs.theirs.deviations) - set(SILENT_IN_EVAL):
        return f"Compared with the source in eval mode: {apart}; the notes on what is not kept say why."
    raise CheckpointError(
        f"parity=True, but the {type(model).__name__} computes something else than the {type(source.model).__name__}: "
        f"{apart}. Nothing was written. A field of the config or a constant of the source's code is not translated: "
        "please report it with the config. Without parity (--parity) the conversion is not compared."
    )


def compare(source: Source, model: PreTrainedModel, tokens: int) -> Difference | None:
    """Return the largest difference on `tokens` tokens, in eval mode and float32; None: the source's are not finite.

    Neither model is changed, nor any random state.
    """
    types = [each for each in (source.model.config, model.config) if each.model_type in COUNTERPARTS]
    exceptions = {exception for each in types for exception in EXCEPTIONS[each.model_type]}
    inputs = sample_inputs(
        types[0],
        source.head,
        tokens,
        pads=not {SHORTER, PADDED} & exceptions and types[0].pad_token_id is not None,
        with_token_types=TOKEN_TYPES in exceptions and source.head == "QuestionAnswering",
        device=source.model.device,
    )
    before = np.random.get_state()  # noqa: NPY002  the BigBird of transformers seeds it
    try:
        # that of a caller stays as it is: a BigBird that has read a short input goes on with full attention
        theirs = _outputs(deepcopy(source.model) if source.path is None else source.model, inputs)
        ours = _outputs(_with_new_weights(source, deepcopy(model)).to(source.model.device), inputs)
    finally:
        np.random.set_state(before)  # noqa: NPY002
    if not all(bool(torch.isfinite(each).all()) for each in theirs.values()):
        return None
    shared = [name for name in theirs if name in ours]
    shares = {name: _share(theirs[name], ours[name], inputs["attention_mask"]) for name in shared}
    worst = max(shares, key=lambda name: shares[name])
    return Difference(worst, shares[worst], tokens)


def _why_not_compared(source: Source, request: ConversionRequest, configs: TranslatedConfigs) -> str | None:
    if request.pattern is not None:
        return "another pattern was asked for"
    if request.attention_window is not None and not configs.is_dense:
        return "another window was asked for"
    has_projections = any("global" in name for name, _ in source.model.named_parameters())
    if request.global_projections is False and has_projections:
        return "global_projections=False leaves some of its weights behind"
    return None


def _num_tokens(source: Source, request: ConversionRequest, configs: TranslatedConfigs) -> int:
    """Return the longest input that both models read alike, in tokens."""
    sizes = [MOST_TOKENS, configs.source.max_position_embeddings]
    if source.head in ("SequenceClassification", "QuestionAnswering"):
        # the decoder reads the source
        sizes.append(getattr(configs.source, TARGET, MOST_TOKENS))
    if configs.is_dense:
        sizes.append((request.attention_window or DEFAULT_WINDOW) // 2 + 1)
    sides = [(source.counterpart, source.model.config)]
    if configs.theirs is not None:
        sides.append((COUNTERPARTS[configs.theirs.config.model_type], configs.theirs.config))
    for counterpart, theirs in sides:
        if counterpart is not None and counterpart.tokens_alike is not None:
            sizes.append(counterpart.tokens_alike(configs.source, theirs))
    return int(min(sizes))


def _with_new_weights(source: Source, model: Any) -> Any:
    """Return the model with the start values of the source's head, where it has none of its own."""
    if source.new_names and source.counterpart is not None and model.config.model_type not in COUNTERPARTS:
        weights = source.model.state_dict()
        new = {name: weights[name] for name in source.new_names}
        model.load_state_dict(to_ours(new, source.counterpart.all_names(source.head))[0], strict=False)
    return model


@torch.no_grad()
def _outputs(model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    found = model.float().eval()(**inputs, return_dict=True)
    return {name: each for name, each in found.items() if torch.is_tensor(each) and name != "pooler_output"}


def _share(first: Tensor, second: Tensor, mask: Tensor) -> float:
    """Return the largest difference over real tokens, as a share of the largest number; of unlike masks, infinity."""
    counts = first.abs() < MASKED
    if not counts.equal(second.abs() < MASKED):
        return float("inf")
    if mask.ndim == 2 and first.shape[:2] == mask.shape:
        counts &= mask.bool().view(*mask.shape, *[1] * (first.ndim - 2))
    scale = first[counts].abs().max()
    return float(((first - second)[counts].abs().max() / scale).nan_to_num(nan=float("inf")))
