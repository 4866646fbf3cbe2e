"""Positions of the tokens of one of several processes: counted and rotated as by one process with the whole text."""

import sys
from typing import Any

import torch
from torch import Tensor, nn

from hf_efficient_attn.errors import UnsupportedBackendError
from hf_efficient_attn.models.parts.positions import Positions, positions_among_real

# how RoBERTa and kin call what counts from the number of their padding token on: in a module, or beside its class
COUNT_IDS, COUNT_EMBEDS = "create_position_ids_from_input_ids", "create_position_ids_from_inputs_embeds"
# model types of transformers that count the tokens that are not padding
COUNT_REAL_TOKENS = {"opt"}
# rope types whose frequencies are the same for texts of every length
FIXED_ROPE = {"default", "linear", "llama3", "proportional", "yarn"}
# the attribute in which a module with other frequencies keeps the largest position of the whole texts, a tensor
LARGEST = "_largest_position"


def counted_positions(model: Any, input_ids: Tensor | None, mask: Tensor | None, tokens: Tensor) -> Tensor:
    """Return the positions that the model would count in the whole texts, [B or 1, N]."""
    index = torch.arange(tokens.shape[1], device=tokens.device)[None]
    if getattr(model, "counts_real_tokens", False):
        return index if mask is None else positions_among_real(mask).to(tokens.device)
    if model.config.model_type in COUNT_REAL_TOKENS and mask is not None:
        # padding, which nothing reads, gets -1, as the model says
        return (mask.long().cumsum(-1) * mask.long() - 1).to(tokens.device)
    for module in model.modules():
        if hasattr(module, COUNT_EMBEDS) and hasattr(module, "position_embeddings"):
            if input_ids is None:
                return index + module.padding_idx + 1
            count = getattr(module, COUNT_IDS, None) or getattr(sys.modules[type(module).__module__], COUNT_IDS)
            return count(input_ids, module.padding_idx)
    return index


def check_positions(model: nn.Module, positions: Tensor) -> None:
    """Raise InputError in all processes where one holds a position beyond the end of a learned table of ours."""
    for module in model.modules():
        if isinstance(module, Positions):
            module.check_table(positions)


def varying_rotations(model: nn.Module) -> list[nn.Module]:
    """Return the modules whose rotary frequencies depend on the largest position of a call, of any layer type."""
    found = []
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        kinds = set(kinds.values()) if isinstance(kinds, dict) else {kinds} - {None}
        if kinds - FIXED_ROPE:
            found.append(module)
    return found


def set_largest_position(model: nn.Module, positions: Tensor) -> None:
    """Tell the modules with such frequencies the largest of the positions of the whole texts."""
    for module in varying_rotations(model):
        module.__dict__[LARGEST] = positions.max()


def add_largest_position(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with a token more, at the largest position; a hook before a module with such frequencies.

    Raises:
        UnsupportedBackendError: a module that is called otherwise than those of transformers.
    """
    given = {**dict(zip(("x", "position_ids"), args, strict=False)), **kwargs}
    positions = given.get("position_ids")
    if not torch.is_tensor(positions) or positions.ndim < 2:
        raise UnsupportedBackendError(
            f"{type(module).__name__} has frequencies that depend on the length of the text, and is called without "
            "position_ids, so that a process cannot know them for the whole text. Use rope_type='default'."
        )
    last = module.__dict__[LARGEST].to(positions).expand(*positions.shape[:-1], 1)
    given["position_ids"] = torch.cat([positions, last], -1)
    rest = args[2:]
    return (given.pop("x"), given.pop("position_ids"), *rest), given


def drop_largest_position(module: nn.Module, args: Any, out: Any) -> Any:
    """Return what such a module computed for the tokens of this process; a hook after it."""
    return out[..., :-1, :] if torch.is_tensor(out) else tuple(each[..., :-1, :] for each in out)
