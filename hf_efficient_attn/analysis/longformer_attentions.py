"""The dense attention weights of our models, brought into the shapes of transformers' Longformer.

Shapes: B batch, H heads, T tokens, X the most global tokens of an example, W the window.
"""

import torch
from torch import Tensor

from hf_efficient_attn.errors import InputError
from hf_efficient_attn.patterns.windows import band_of_window


def longformer_attentions(
    weights: Tensor, attention_window: int, global_attention_mask: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return one layer's `attentions` and `global_attentions` as `LongformerModel` documents them.

    The first X columns of `attentions` are weights on global tokens, in order of position, then come the tokens of the
    window: W/2 before the query, the query itself, W/2 after it. The weight of a global token is 0 in the window, since
    it is in its own column; rows of global tokens are 0, since their weights are in `global_attentions`. Columns
    without a token are 0 in both (transformers leaves 1/T in `global_attentions` of examples with fewer global tokens
    than others, and pads its T).

    Args:
        weights: [B, H, T, T], an entry of `attentions` of a model of ours called with output_attentions=True.
        attention_window: W, both sides together, of this layer.
        global_attention_mask: [B, T], nonzero = a global token; None: there are none.

    Returns:
        [B, H, T, X + W + 1], and [B, H, T, X] or, without global tokens, None: the last axis is the reading global
        token, the one before it the token read.

    Raises:
        ConfigurationError: a window that is not an even integer of at least 2.
        InputError: weights of another shape than [B, H, T, T], or a mask of another shape than [B, T].

    Source: the docstring of transformers' LongformerBaseModelOutput.

    >>> weights = torch.eye(5).expand(1, 2, 5, 5)
    >>> local, of_globals = longformer_attentions(weights, 2, torch.tensor([[1, 0, 0, 0, 0]]))
    >>> local.shape, of_globals.shape, local[0, 0].argmax(-1).tolist()
    (torch.Size([1, 2, 5, 4]), torch.Size([1, 2, 5, 1]), [0, 2, 2, 2, 2])
    """
    band_of_window(attention_window)  # refuses what is no window
    is_global = _checked(weights, global_attention_mask)
    num_global = int(is_global.sum(1).max())
    # global tokens first, both in order of position
    index = torch.argsort(~is_global, dim=1, stable=True)[:, :num_global]
    is_there = is_global.gather(1, index)
    local = torch.cat((_columns(weights, index, is_there), _window(weights, attention_window // 2, is_global)), -1)
    local = local.masked_fill(is_global[:, None, :, None], 0)
    if num_global == 0:
        return local, None
    return local, _columns(weights.transpose(2, 3), index, is_there)


def _checked(weights: Tensor, mask: Tensor | None) -> Tensor:
    """Return which tokens are global, bool [B, T]."""
    if weights.ndim != 4 or weights.shape[2] != weights.shape[3]:
        raise InputError(f"weights have shape {list(weights.shape)}; they must be [batch, heads, tokens, tokens].")
    shape = (weights.shape[0], weights.shape[2])
    if mask is None:
        return torch.zeros(shape, dtype=torch.bool, device=weights.device)
    if tuple(mask.shape) != shape:
        raise InputError(
            f"global_attention_mask has shape {list(mask.shape)}; it must be [batch, tokens] = {[*shape]}."
        )
    return mask.to(weights.device) != 0


def _columns(weights: Tensor, index: Tensor, is_there: Tensor) -> Tensor:
    """Return the columns of the global tokens of each example, [B, H, T, X]."""
    chosen = weights.gather(3, index[:, None, None].expand(*weights.shape[:3], -1))
    return chosen.masked_fill(~is_there[:, None, None], 0)


def _window(weights: Tensor, side: int, is_global: Tensor) -> Tensor:
    """Return the weights on tokens around each query that are not global, [B, H, T, 2·side + 1]."""
    num_tokens = weights.shape[2]
    query = torch.arange(num_tokens, device=weights.device)
    keys = query[:, None] + torch.arange(-side, side + 1, device=weights.device)
    is_inside = (keys >= 0) & (keys < num_tokens)
    keys = keys.clamp(0, num_tokens - 1)
    found = weights.gather(3, keys.expand(*weights.shape[:2], -1, -1))
    is_local = is_inside & ~is_global[:, keys]
    return found.masked_fill(~is_local[:, None], 0)
