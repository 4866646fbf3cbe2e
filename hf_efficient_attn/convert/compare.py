"""Check the promise of `parity`: compare the outputs of a source and of its result on the same random inputs.

`EXCEPTIONS` says for which inputs a converted model differs from its source even with `parity`, and why.
"""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_efficient_attn.convert.configs import DEFAULT_WINDOW, TARGET, ConversionRequest
from hf_efficient_attn.convert.preflight import TranslatedConfigs
from hf_efficient_attn.convert.registry import COUNTERPARTS
from hf_efficient_attn.convert.source import Source
from hf_efficient_attn.convert.weights import to_ours
from hf_efficient_attn.errors import CheckpointError

# "here" is this package
PADDING_BEFORE = "padding before or between tokens (positions count only tokens here, also padding in transformers)"
PADDING_BETWEEN = "padding between tokens (rotary positions count only tokens here, also padding in transformers)"
PAD_IDS = "pad ids that no `attention_mask` hides (here each has its own position, in transformers all share one)"
SHORTER = (
    "inputs shorter than the longest of a batch (their own last block is global here, that of the padded row in "
    "transformers)"
)
AFTER_SHORT = "inputs after one that is short enough for full attention (in transformers all later ones get it)"
POOLED_PADDING = (
    "sequences that begin with padding (the classifier takes the first real token here, the first token in "
    "transformers)"
)
TOKEN_TYPES = "question answering without `token_type_ids` (transformers makes them from the first separator)"

PADDED = "any padding (in transformers landmarks, convolutions and positions include it)"
OTHER_LENGTH = (
    "texts that use landmarks and are not `segment_means_seq_len` tokens long (transformers mixes their rows)"
)
HASHED = "texts longer than a chunk (rotations are fixed here, and drawn at every call in transformers)"
WRAPPED = "encoder texts to which transformers adds a whole chunk of padding (their first chunk then attends to it)"

EXCEPTIONS: dict[str, tuple[str, ...]] = {
    "bart": (PADDING_BEFORE,),
    "bert": (PADDING_BEFORE,),
    "big_bird": (PADDING_BEFORE, SHORTER, AFTER_SHORT, TOKEN_TYPES),
    "bigbird_pegasus": (PADDING_BEFORE, SHORTER, AFTER_SHORT),
    "led": (PADDING_BEFORE,),
    "longformer": (PAD_IDS, POOLED_PADDING),
    "marian": (PADDING_BEFORE,),
    "modernbert": (PADDING_BETWEEN, POOLED_PADDING),
    "nystromformer": (PADDED, OTHER_LENGTH),
    "pegasus": (PADDING_BEFORE,),
    "reformer": (HASHED, WRAPPED, PADDING_BEFORE, POOLED_PADDING),
    "roberta": (PAD_IDS, POOLED_PADDING),
    "xlm-roberta": (PAD_IDS, POOLED_PADDING),
}


def note_exceptions(source_type: str, target_type: str) -> str:
    """Return a sentence on inputs for which source and result differ even with `parity`; empty if there are none."""
    sides = EXCEPTIONS.get(source_type, ()), EXCEPTIONS.get(target_type, ())
    # if both models are of transformers, they agree on an exception that both have
    exceptions = [each for side in sides for each in side if not all(each in other for other in sides)]
    return f"Even with parity, outputs differ from the source's for: {'; '.join(exceptions)}. " if exceptions else ""


# longer than the windows of published models and their limits of full attention; a multiple of no window or block
MOST_TOKENS = 1021
TARGET_TOKENS = 9
PADDED_TOKENS = 3
# heads whose rule for global tokens looks for separators
WITH_SEPARATORS = ("QuestionAnswering", "MultipleChoice")
SPECIAL = ("pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id", "cls_token_id", "decoder_start_token_id")


def sample_inputs(
    config: Any, head: str, tokens: int, *, pads: bool, with_token_types: bool, device: Any
) -> dict[str, Tensor]:
    """Return two examples of `tokens` tokens; for multiple choice each has two choices.

    Args:
        config: config of the model of transformers.
        head: a key of `AUTO_CLASSES`.
        pads: whether the first example ends with padding, if the head allows it.
        with_token_types: whether to add token types, in which the question (up to the first separator) differs from
            the text.
    """
    generator = torch.Generator().manual_seed(0)
    ids = _random_ids(config, (2, tokens), generator)
    padded = PADDED_TOKENS if pads and head not in WITH_SEPARATORS and tokens > 3 * PADDED_TOKENS else 0
    mask = torch.ones_like(ids)
    if padded:
        mask[0, -padded:], ids[0, -padded:] = 0, config.pad_token_id
    _set_separators(ids, config, head, padded)
    inputs = {"input_ids": ids, "attention_mask": mask}
    if with_token_types:
        inputs["token_type_ids"] = (torch.arange(tokens) > tokens // 4).long().expand_as(ids)
    if head == "MultipleChoice":
        inputs = {name: torch.stack((each, each.flip(0)), 1) for name, each in inputs.items()}
    if config.is_encoder_decoder and head in ("Model", "ConditionalGeneration"):
        inputs["decoder_input_ids"] = _random_ids(config, (2, TARGET_TOKENS), generator)
    return {name: each.to(device) for name, each in inputs.items()}


def _random_ids(config: Any, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Return random ids of tokens that are not special."""
    special = {getattr(config, name, None) for name in SPECIAL if not isinstance(getattr(config, name, None), list)}
    plain = torch.tensor([number for number in range(min(config.vocab_size, 50_000)) if number not in special] or [0])
    return plain[torch.randint(len(plain), shape, generator=generator)]


def _set_separators(ids: Tensor, config: Any, head: str, padded: int) -> None:
    """Write separators for heads that need them, two after the question and one at the end; for others an end token."""
    end = config.eos_token_id[0] if isinstance(config.eos_token_id, list) else config.eos_token_id
    separator = getattr(config, "sep_token_id", None)
    separator = end if separator is None else separator
    question = ids.shape[1] // 4
    if head in WITH_SEPARATORS and separator is not None:
        ids[:, [question, question + 1, -1]] = separator
    elif end is not None:
        ids[1, -1] = end
        ids[0, -padded - 1] = end


# share of the largest output. Rounding in float32 stays below it, a wrong activation does not: gelu_new for gelu 3e-4
TOLERANCE = 1e-4
# fields of our config that do not change outputs in eval mode
SILENT_IN_EVAL = (
    "embedding_dropout",
    "hidden_dropout",
    "activation_dropout",
    "attention_dropout",
    "classifier_dropout",
    "label_smoothing",
)
# an output of at least this size marks something that is masked out
MASKED = 1e5


@dataclass(frozen=True)
class Difference:
    """The largest difference between two models' outputs: in which output, and as a share of its largest number."""

    output: str
    share: float
    tokens: int


def check_parity(source: Source, model: PreTrainedModel, request: ConversionRequest, configs: TranslatedConfigs) -> str:
    """Compare the outputs of a source and its result, and return a sentence on the comparison.

    Raises:
        CheckpointError: outputs differ, and no deviation by design explains it.
    """
    reason = _why_not_compared(source, request, configs)
    if reason is not None:
        return f"Outputs were not compared with the source's, because {reason}."
    found = compare(source, model, _num_tokens(source, request, configs))
    if found is None:
        return "Outputs were not compared with the source's, because those are not finite."
    apart = f"{found.output} differs by {found.share:.1g} of its largest value on {found.tokens} random tokens"
    if found.share <= TOLERANCE:
        return f"Compared with the source in eval mode: {apart}."
    if configs.theirs is not None and set(configs.theirs.deviations) - set(SILENT_IN_EVAL):
        return f"Compared with the source in eval mode: {apart}; the notes on what is not kept say why."
    raise CheckpointError(
        f"parity=True, but the outputs of the {type(model).__name__} differ from those of the "
        f"{type(source.model).__name__}: {apart}. Nothing was written. Some field of the config or constant of the "
        "source's code is not translated. Please report this with the config, or convert without parity (--parity), "
        "which does not compare outputs."
    )


def compare(source: Source, model: PreTrainedModel, tokens: int) -> Difference | None:
    """Return the largest difference between outputs on `tokens` tokens, in eval mode and float32.

    None: the source's outputs are not finite.

    `model`, a caller's source and random states stay unchanged. A source loaded from files is cast to float32.
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
        # a caller's model is copied: a BigBird of transformers keeps full attention after one short input
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
        return "the result has another pattern"
    if request.attention_window is not None and not configs.is_dense:
        return "the result has another window"
    has_projections = any("global" in name for name, _ in source.model.named_parameters())
    if request.global_projections is False and has_projections:
        return "global_projections=False leaves out some of its weights"
    return None


def _num_tokens(source: Source, request: ConversionRequest, configs: TranslatedConfigs) -> int:
    """Return the length in tokens of the longest input on which both models should agree."""
    sizes = [MOST_TOKENS, configs.source.max_position_embeddings]
    if source.head in ("SequenceClassification", "QuestionAnswering"):
        # the decoder gets the source as its input
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
    """Return the model; if it is ours, with the newly initialized weights of the source's head, so that both agree."""
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
    """Return the largest difference over real tokens, as a share of the largest number; infinity if masks differ."""
    counts = first.abs() < MASKED
    if not counts.equal(second.abs() < MASKED):
        return float("inf")
    if mask.ndim == 2 and first.shape[:2] == mask.shape:
        counts &= mask.bool().view(*mask.shape, *[1] * (first.ndim - 2))
    scale = first[counts].abs().max()
    return float(((first - second)[counts].abs().max() / scale).nan_to_num(nan=float("inf")))
