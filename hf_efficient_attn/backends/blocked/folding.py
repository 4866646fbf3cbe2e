"""Examples that are alike, counted as heads: one region is computed instead of one for each of them."""

from dataclasses import replace

from torch import Tensor

from hf_efficient_attn.layout.call import AttentionCall


def fold_batch(call: AttentionCall, tensors: tuple[Tensor, ...]) -> tuple[AttentionCall, tuple[Tensor, ...]]:
    """Return the tensors with the examples folded into the heads, if all are alike and views suffice.

    Each region costs a fixed time: this makes one region of what would be one per example. The layout stays that of
    one example, for which it is compiled.
    """
    batch_size, num_heads = tensors[0].shape[:2]
    if batch_size == 1 or not call.tokens.is_empty or len(call.layout.head_groups()) > 1:
        return call, tensors
    if not all(is_foldable(tensor, num_heads) for tensor in tensors):
        return call, tensors
    terms = tuple(replace(term, values=fold_values(term.values, batch_size, num_heads)) for term in call.terms)
    return replace(call, terms=terms), tuple(tensor.flatten(0, 1)[None] for tensor in tensors)


def fold_values(values: Tensor, batch_size: int, num_heads: int) -> Tensor:
    """Return the values of a term with the examples folded into the heads; [1, 1, ...] where all are alike."""
    if values.shape[:2] == (1, 1):
        return values
    return values.expand(batch_size, num_heads, -1, -1).flatten(0, 1)[None]


def unfold_gradient(gradient: Tensor, batch_size: int, values: Tensor) -> Tensor:
    """Return the gradient of folded values in the shape of the values."""
    if gradient.shape == values.shape:
        return gradient
    return gradient.unflatten(1, (batch_size, -1))[0].sum_to_size(values.shape)


def is_foldable(tensor: Tensor, num_heads: int) -> bool:
    """Return whether batch and heads of a tensor can become one dimension without a copy."""
    return tensor.shape[1] == num_heads and (num_heads == 1 or tensor.stride(0) == num_heads * tensor.stride(1))
