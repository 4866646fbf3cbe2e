"""The verdict on one class of transformers: right, refused with a sentence, or wrong."""

import contextlib
import warnings
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

import hf_efficient_attn as hea
from hf_efficient_attn.patterns import Band, GlobalTokens, Pattern
from sweep.classes import Candidate, is_backend_dummy, uses_interface
from sweep.inputs import starts_of
from sweep.outputs import CACHED, REACH, STAGES, outputs_of, stages_of
from sweep.reference import PatternOnEager
from sweep.tiny import ATTEMPTS, build, tiny_config

PATTERN = Band(left=2, right=1) | GlobalTokens([0])
RIGHT, REFUSED, WRONG, NOT_BUILT, NO_INTERFACE = "right", "refused", "wrong", "cannot be built tiny", "no interface"
TOLERANCE = 2e-4
# what models without a cache raise when they are given one
NO_CACHE = (TypeError, AttributeError, ValueError, RuntimeError, IndexError)


@dataclass
class Verdict:
    """What the sweep found of a class: of its own attention on "efficient", and of the same model with a pattern.

    Attributes:
        own, sparse: one of the words above.
        own_reason, sparse_reason: of what is not right.
    """

    name: str
    model_type: str
    kind: str
    own: str = NOT_BUILT
    own_reason: str = ""
    sparse: str = NOT_BUILT
    sparse_reason: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return it in JSON types."""
        return asdict(self)


def judge(candidate: Candidate) -> Verdict:
    """Return the verdict on a class."""
    verdict = Verdict(candidate.name, candidate.model_type, candidate.kind)
    try:
        if is_backend_dummy(candidate.model_class):
            raise ImportError(f"{candidate.name} needs libraries that are not installed")
        has_interface = uses_interface(candidate)
        model, own, sparse = first_that_works(candidate)
    # whatever stops the model itself is no matter of ours
    except Exception as error:
        verdict.own_reason = verdict.sparse_reason = sentence(error)
        return verdict
    if has_interface:
        verdict.own, verdict.own_reason = compared(model, candidate.kind, own, lambda: set_efficient(model))
    else:
        verdict.own = NO_INTERFACE
    verdict.sparse, verdict.sparse_reason = compared(model, candidate.kind, sparse, lambda: sparsified(model, PATTERN))
    return verdict


def first_that_works(candidate: Candidate) -> tuple[Any, dict[str, Tensor], dict[str, Tensor]]:
    """Return a tiny model and what its eager attention computes (`references`)."""
    for last, changes in zip((False, True), ATTEMPTS, strict=True):
        try:
            model = build(candidate.model_class, tiny_config(candidate.config_class, candidate.kind, **changes))
            return model, *references(model, candidate.kind)
        # what fails with both is said
        except Exception:
            if last:
                raise
    raise AssertionError


def set_efficient(model: Any) -> None:
    """Put a model on "efficient"."""
    model.set_attn_implementation("efficient")


def sparsified(model: Any, pattern: Pattern) -> None:
    """Sparsify a model, of an encoder-decoder both parts."""
    model.set_attn_implementation("eager")
    is_two = model.config.get_text_config().is_encoder_decoder
    hea.sparsify(model, {"encoder": pattern, "decoder": pattern} if is_two else pattern)


def references(model: Any, kind: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the outputs of eager attention, the model's own and with the pattern, by stage.

    A model whose layers never call an eager attention function has none of the second.
    """
    own = {stage: outputs_of(model, kind, stage) for stage in stages_of(kind) if stage != CACHED}
    with contextlib.suppress(*NO_CACHE):
        if CACHED in stages_of(kind):
            own[CACHED] = outputs_of(model, kind, CACHED)
    on_eager, sparse = PatternOnEager(model, PATTERN), {}
    with on_eager():
        for stage in own:
            on_eager.starts = starts_of(kind, STAGES[stage])
            sparse[stage] = outputs_of(model, kind, stage)
    differs = any(distance(sparse[stage], own[stage]) > 10 * TOLERANCE for stage in own)
    return own, sparse if on_eager.calls and differs else {}


def compared(model: Any, kind: str, expected: dict[str, Tensor], change: Any) -> tuple[str, str]:
    """Return the verdict on a model after a change, and its reason."""
    try:
        change()
        found = {stage: outputs_of(model, kind, stage) for stage in expected or stages_of(kind)}
    except hea.EfficientAttentionError as error:
        return REFUSED, sentence(error)
    # any other error is a finding
    except Exception as error:
        return WRONG, f"raises {sentence(error)}"
    if not expected:
        return WRONG, "accepted, but no layer follows the pattern"
    for stage, tensor in found.items():
        if stage == REACH:
            if bool(((tensor > 1e-6) & (expected[stage] <= 1e-7)).any()):
                return WRONG, "tokens read later ones that they may not read"
        elif (far := distance(tensor, expected[stage])) > TOLERANCE:
            return WRONG, f"{stage}: off by {far:.1e} of the largest output"
    return RIGHT, ""


def distance(tensor: Tensor, expected: Tensor) -> float:
    """Return the largest difference, in units of the largest output."""
    if tensor.shape != expected.shape or not torch.isfinite(tensor).all():
        return float("inf")
    return float((tensor - expected).abs().max() / expected.abs().max().clamp(min=1e-3))


def sentence(error: Exception) -> str:
    """Return the beginning of an error's text, in one line."""
    text = str(error) if isinstance(error, hea.EfficientAttentionError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:300]


def quietly(candidate: Candidate) -> Verdict:
    """Return the verdict on a class without the warnings of its model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return judge(candidate)
