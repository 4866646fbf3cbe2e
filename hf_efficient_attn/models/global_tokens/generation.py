"""Global tokens in `generate`: they are chosen for the prompt and known at every step."""

from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.models.global_tokens.rules import choose_by_rule, needs_input_ids


def extend_global_mask(
    config: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    inputs_embeds: Tensor | None,
    global_attention_mask: Tensor | None,
) -> Tensor | None:
    """Return which tokens of the text so far are global, [batch, tokens]; None: the model's rule needs no mask.

    A mask that the caller gave for the prompt is extended by zeros: generated tokens are not global.

    Args:
        input_ids: the text so far; after a prompt of embeddings, only what followed it.
        inputs_embeds: a prompt of embeddings, [batch, tokens, hidden_size].
    """
    if global_attention_mask is not None:
        tokens = input_ids.shape[1] + (0 if inputs_embeds is None else inputs_embeds.shape[1])
        return pad(global_attention_mask, (0, tokens - global_attention_mask.shape[1]))
    if inputs_embeds is not None or not needs_input_ids(config.global_tokens):
        return None
    choice = choose_by_rule(config.global_tokens, input_ids.shape[1], input_ids, attention_mask, config.sep_token_id)
    return choice.mask
