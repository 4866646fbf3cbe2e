"""The inputs of a sparse model: checked, and its global tokens found, once for all layers."""

from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.errors import InputError, UnsupportedBackendError
from hf_efficient_attn.models.global_rows import find_global_rows, global_keys
from hf_efficient_attn.models.global_tokens import AUTO_RULES, GlobalTokenChoice, Rule, choose_by_mask, choose_by_rule


def check_inputs(config: Any, input_ids: Tensor | None, inputs_embeds: Tensor | None, options: dict[str, Any]) -> None:
    """Raise for inputs that are missing or doubled, and for calls from continuous batching.

    Raises:
        InputError: not exactly one of input_ids and inputs_embeds.
        UnsupportedBackendError: a paged cache.
    """
    if (input_ids is None) == (inputs_embeds is None):
        raise InputError("Pass exactly one of input_ids and inputs_embeds.")
    if options.get("cache") is not None:
        raise UnsupportedBackendError(
            f"Continuous batching keeps a paged cache, and the attention_pattern of {type(config).__name__} cannot be "
            "followed there. Use generate()."
        )


def resolved_rule(config: Any, task: str | None) -> Rule:
    """Return the rule for global tokens that holds in a task."""
    return AUTO_RULES.get(task or "") if config.global_tokens == "auto" else config.global_tokens


def global_arguments(
    config: Any,
    task: str | None,
    input_ids: Tensor | None,
    attention_mask: Tensor | None,
    global_attention_mask: Tensor | None,
    table: Tensor | None,
    sizes: tuple[int, int, Any, int],
    device: torch.device,
) -> dict[str, Any]:
    """Return what attention layers want to know about global tokens, as keyword arguments.

    Args:
        table: what `token_table` made of the masks.
        sizes: examples, new tokens, cached tokens, keys.

    Raises:
        InputError: a mask or rule that does not fit these inputs.
    """
    batch_size, tokens, past_tokens, num_keys = sizes
    is_token = attention_mask if attention_mask is not None and attention_mask.ndim == 2 else None
    if global_attention_mask is not None:
        known = past_tokens + tokens if isinstance(past_tokens, int) else global_attention_mask.shape[-1]
        is_known = is_token is not None and is_token.shape[1] == known
        choice = choose_by_mask(global_attention_mask, batch_size, known, is_token if is_known else None)
    else:
        rule = resolved_rule(config, task)
        choice = choose_by_rule(rule, num_keys, input_ids, is_token, config.sep_token_id, past_tokens)
    if choice.every is not None:
        keys = global_keys(choice, table, batch_size, tokens, num_keys, device)
        choice = GlobalTokenChoice(mask=keys)
    elif choice.mask is not None and choice.mask.shape[1] < num_keys:
        choice = GlobalTokenChoice(mask=torch.nn.functional.pad(choice.mask, (0, num_keys - choice.mask.shape[1])))
    rows = None
    if config.global_projections:
        rows = find_global_rows(
            choice, table, batch_size, tokens, num_keys, config.is_causal, config.max_global_tokens, device
        )
    return {"global_positions": choice.positions, "global_mask": choice.mask, "global_rows": rows}
