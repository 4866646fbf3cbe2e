"""Random inputs for a head, on which a model of ours and one of transformers are to give the same outputs."""

from typing import Any

import torch
from torch import Tensor

# longer than any window or number of blocks that published models read by full attention, and a multiple of none
MOST_TOKENS = 1021
TARGET_TOKENS = 9
PADDED_TOKENS = 3
# heads whose rule for global tokens looks for separators
WITH_SEPARATORS = ("QuestionAnswering", "MultipleChoice")
SPECIAL = ("pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id", "cls_token_id", "decoder_start_token_id")


def sample_inputs(
    config: Any, head: str, tokens: int, *, pads: bool, with_token_types: bool, device: Any
) -> dict[str, Tensor]:
    """Return two examples of `tokens` tokens, for multiple choice of two choices each.

    Args:
        config: of the model of transformers.
        head: a key of `AUTO_CLASSES`.
        pads: the first ends with padding, where the head allows it.
        with_token_types: the question, which ends at the first separator, has another type than the text.
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
    """Return ids that mean nothing special."""
    special = {getattr(config, name, None) for name in SPECIAL if not isinstance(getattr(config, name, None), list)}
    plain = torch.tensor([number for number in range(min(config.vocab_size, 50_000)) if number not in special] or [0])
    return plain[torch.randint(len(plain), shape, generator=generator)]


def _set_separators(ids: Tensor, config: Any, head: str, padded: int) -> None:
    """Write the separators of a question or choice, two in its middle and one at its end; elsewhere an end token."""
    end = config.eos_token_id[0] if isinstance(config.eos_token_id, list) else config.eos_token_id
    separator = getattr(config, "sep_token_id", None)
    separator = end if separator is None else separator
    question = ids.shape[1] // 4
    if head in WITH_SEPARATORS and separator is not None:
        ids[:, [question, question + 1, -1]] = separator
    elif end is not None:
        ids[1, -1] = end
        ids[0, -padded - 1] = end
