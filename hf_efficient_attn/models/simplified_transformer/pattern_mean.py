"""The centring term C under an `attention_pattern` or an indexer: the mean of the values that A reads.

C is A at equal logits, so it is over the keys that the pattern allows, and where keys are chosen by content, over those
that the layer's own queries (`BlockTopK`) or its indexer (`index`) have chosen. Shaped attention then starts as the
identity whatever it reads (He & Hofmann, arXiv:2311.01906, section 4.1), and padding, packing and caches change
nothing. A mean over all tokens would not do: a token would lose the mean of what it never read. C takes as long as A
here, since there is no running mean of chosen keys.
"""

from typing import Any

from torch import Tensor, nn

from hf_efficient_attn.attention.indexed.config_field import INDEXER
from hf_efficient_attn.attention.indexed.indexed_layer import LOSSES, RECALLS
from hf_efficient_attn.attention.indexed.lightning_indexer import DENSE
from hf_efficient_attn.attention.interface import efficient_attention_forward
from hf_efficient_attn.attention.layer_patterns import NAME, module_pattern

# arguments of attention that say how A is computed and what is learned from it, and not what is read
OF_SCORES = ("position_bias", "position_terms", "output_attentions", LOSSES, RECALLS)


def uses_indexer(config: Any) -> bool:
    """Return whether indexers choose what the layers of a model read, or learn to."""
    field = getattr(config, INDEXER, None)
    return field is not None and field["stage"] != DENSE


def reads_selected(attention: Any) -> bool:
    """Return whether an attention module follows an `attention_pattern` of its config, or has an indexer at work."""
    if attention.config._attn_implementation != NAME:
        return False
    return uses_indexer(attention.config) or module_pattern(attention, attention.is_causal) is not None


def mean_of_read(
    attention: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> Tensor:
    """Return C·V, [B, T, H, D]; no gradient reaches queries and keys.

    Args:
        query, key, value: [B, H, T or K, D]; the queries choose as in A.
        attention_mask, options: those of the attention function.
    """
    said = {name: each for name, each in options.items() if name not in OF_SCORES}
    states = (query.detach(), key.detach(), value)
    mean, _ = efficient_attention_forward(attention, *states, attention_mask, scaling=0.0, **said)
    return mean
