"""Checks of the arguments of `attention`, before any work starts."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.attention.key_tokens import unknown_start
from hf_efficient_attn.errors import ConfigurationError, InputError, UnsupportedBackendError
from hf_efficient_attn.layout.onnx import refuse_choice
from hf_efficient_attn.layout.score_terms import Label, Term
from hf_efficient_attn.layout.selected_keys import MEAN, ChosenKeys, States
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.layout.tracing import shown
from hf_efficient_attn.patterns.pattern import Pattern
from hf_efficient_attn.patterns.serialization import MAX_INTEGER, check_kind, is_integer

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# beyond these limits kernels, which compute in float32, would take a factor for infinity, or divide by 0
LARGEST_FACTOR, SMALLEST_CAP = 1e30, 1e-30


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise InputError if q, k or v is not a tensor."""
    for name, states in (("q", q), ("k", k), ("v", v)):
        if not isinstance(states, Tensor):
            raise InputError(f"{name} is a {type(states).__name__}; it must be a tensor. Use torch.as_tensor({name}).")


def check_shapes(q: Tensor, k: Tensor, v: Tensor, cross: bool = False) -> None:
    """Raise InputError if the shapes of q, k and v do not fit together."""
    q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
    if not len(q_shape) == len(k_shape) == len(v_shape) == 4:
        raise wrong_shapes(q, k, v, "all three must have four dimensions.")
    (batch_size, num_heads, num_queries, head_dim), (_, num_key_heads, num_keys, _) = q_shape, k_shape
    if not (batch_size == k_shape[0] == v_shape[0]):
        raise wrong_shapes(q, k, v, "the batch sizes (first dimension) must be equal.")
    if k_shape[1:3] != v_shape[1:3]:
        raise wrong_shapes(q, k, v, "k and v must have the same heads and tokens (second and third dimension).")
    if head_dim != k_shape[3]:
        raise wrong_shapes(q, k, v, "q and k must have the same head_dim (last dimension).")
    if not (num_heads and num_key_heads and head_dim):
        raise wrong_shapes(q, k, v, "there must be at least one head (second dimension), and a head_dim of 1 (last).")
    if num_queries > num_keys and not cross:
        raise wrong_shapes(
            q,
            k,
            v,
            "there are more queries (third dimension of q) than keys. Transpose tensors of [batch, tokens, heads, "
            "head_dim] by .transpose(1, 2); give cross=True if queries and keys are of two sequences.",
        )
    if num_heads % num_key_heads:
        raise wrong_shapes(
            q, k, v, f"the {num_key_heads} key heads must divide the {num_heads} query heads (dimension 1)."
        )


def check_dtype(dtype: torch.dtype) -> None:
    """Raise InputError for a dtype that no backend computes in."""
    if dtype not in DTYPES:
        raise InputError(f"dtype={shown(dtype)} must be one of {', '.join(map(str, DTYPES))}.")


def check_axes(cross: bool, tokens: TokenMask, query_offset: int | Tensor | None) -> None:
    """Raise an error for masks that do not go with `cross`, or only with `cross`."""
    if not isinstance(cross, bool):
        raise InputError(
            f"cross={shown(cross)} must be True, if queries and keys are of different sequences, or False."
        )
    has_none_of_queries = tokens.query_mask is None and tokens.query_segment_ids is None
    if not (cross or has_none_of_queries):
        raise InputError(
            "query_mask and query_segment_ids are for queries of another sequence than the keys'. Give cross=True; of "
            "one sequence, key_mask and segment_ids say it all."
        )
    if not has_none_of_queries and unknown_start(query_offset) is not None:
        raise UnsupportedBackendError(
            "While compiling, a query_offset that is a tensor has no known value, and with it the length of query_mask "
            "and query_segment_ids. Give an integer, or no such masks."
        )
    if cross and tokens.global_mask is not None:
        raise InputError(
            "global_mask chooses tokens that read and are read, but with cross=True queries and keys are different "
            "tokens. Use Full(), or GlobalTokens(positions, reads_all=False) for some of the keys."
        )


def check_kinds(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise an error if q, k and v differ in dtype or device, or if no backend can compute them."""
    if not q.dtype == k.dtype == v.dtype:
        raise InputError(f"q, k and v have dtypes {q.dtype}, {k.dtype} and {v.dtype}; they must be equal.")
    if q.dtype not in DTYPES:
        raise InputError(f"q, k and v have dtype {q.dtype}; it must be one of {', '.join(map(str, DTYPES))}.")
    if not q.device == k.device == v.device:
        raise InputError(f"q, k and v are on {q.device}, {k.device} and {v.device}; move them to one device.")
    if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None:
        raise UnsupportedBackendError(
            "torch.func transforms (grad, vmap, jvp, ...) are not supported. Use torch.autograd for gradients, and the "
            "batch dimension for vmap."
        )


def check_numbers(
    pattern: Pattern, scale: float | None, dropout: float, query_offset: int | Tensor | None, layer: int
) -> None:
    """Raise an error if the pattern is not a pattern, or a number has a wrong type or is out of range."""
    if not isinstance(pattern, Pattern):
        raise ConfigurationError(
            f"pattern is {shown(pattern)}; it must be a pattern such as Band(256, 256), or an expression such as "
            "'band(256, 256)'. Pattern.from_dict reads a dict."
        )
    check_kind(pattern)
    if scale is not None and not (is_number(scale) and abs(scale) <= LARGEST_FACTOR):
        raise InputError(
            f"scale={shown(scale)} must be a finite number, from {-LARGEST_FACTOR:g} to {LARGEST_FACTOR:g}, or None "
            "for 1 / sqrt(head_dim)."
        )
    if not (isinstance(dropout, int | float) and 0.0 <= dropout < 1.0):
        raise InputError(f"dropout={shown(dropout)} must be a number of at least 0 and below 1.")
    if isinstance(query_offset, Tensor):
        kind = query_offset.dtype
        is_place = query_offset.numel() == 1 and not (kind.is_floating_point or kind.is_complex or kind == torch.bool)
    else:
        # `torch.export` counts cached tokens by a symbol
        is_place = query_offset is None or is_integer(query_offset) or isinstance(query_offset, torch.SymInt)
    if not is_place:
        raise InputError(
            f"query_offset={shown(query_offset)} must be an integer, an integer tensor of one element, or None."
        )
    if not is_integer(layer) or not 0 <= layer <= MAX_INTEGER:
        raise InputError(f"layer={shown(layer)} must be the index of a layer, an integer from 0 to {MAX_INTEGER}.")


def is_number(value: Any) -> bool:
    """Return whether a value is an integer or a float; True and False are not."""
    return isinstance(value, float) or is_integer(value)


def check_heads(first_head: int, num_model_heads: int | None) -> None:
    """Raise InputError if the numbers of the heads are not integers; `Layout` checks their range."""
    if not is_integer(first_head) or not (num_model_heads is None or is_integer(num_model_heads)):
        raise InputError(
            f"first_head={shown(first_head)} and num_model_heads={shown(num_model_heads)} must be integers, or None "
            "for num_model_heads, if there are no other heads."
        )


def check_softcap(softcap: float | None) -> None:
    """Raise InputError if the bound of the scores is not a positive number by which float32 can divide."""
    if softcap is not None and not (is_number(softcap) and SMALLEST_CAP <= softcap <= LARGEST_FACTOR):
        raise InputError(
            f"softcap={shown(softcap)} must be a positive number, from {SMALLEST_CAP:g} to {LARGEST_FACTOR:g}, or None "
            "for scores without a bound."
        )


def check_chosen(chosen: ChosenKeys | None, q: Tensor, k: Tensor, is_cross: bool, sinks: Tensor | None) -> None:
    """Raise an error for chosen keys that do not fit q and k, or a mean of groups with sinks, or if ONNX is written."""
    if chosen is None:
        return
    refuse_choice()
    if not isinstance(chosen, ChosenKeys):
        raise InputError(
            f"chosen is a {type(chosen).__name__}; it must be ChosenTokens, ChosenBlocks, KeyGroups or ChunkedOrder, "
            "of integer tensors. Use hea.ChosenTokens(tokens) for indices of keys."
        )
    states = States(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.device, is_cross)
    chosen.check(states)
    if sinks is not None and chosen.join == MEAN:
        raise InputError("A mean over groups (join='mean') has one softmax per group, and no row for sinks to join.")


def own_sinks(sinks: Tensor | None, q: Tensor, first_head: int, num_model_heads: int | None) -> Tensor | None:
    """Return the sinks of the heads of q; None: there are none.

    Raises:
        InputError: sinks for other heads, or not a floating-point tensor on the device of q.
    """
    if sinks is None:
        return None
    if not isinstance(sinks, Tensor) or not sinks.is_floating_point() or sinks.device != q.device:
        found = f"{sinks.dtype} on {sinks.device}" if isinstance(sinks, Tensor) else type(sinks).__name__
        raise InputError(f"sinks is {found}; it must be a floating-point tensor on {q.device}, one per query head.")
    num_heads = q.shape[1]
    if sinks.shape == (num_heads,):
        return sinks
    if sinks.shape == (num_model_heads,):
        return sinks[first_head : first_head + num_heads]
    raise InputError(
        f"sinks has shape {list(sinks.shape)}; it must be [{num_heads}], one logit per query head"
        f"{'' if num_model_heads is None else f', or [{num_model_heads}], one for each head of the model'}."
    )


def wrong_shapes(q: Tensor, k: Tensor, v: Tensor, problem: str) -> InputError:
    """Return the error that says what is wrong with the shapes of q, k and v."""
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    return InputError(f"{shapes}: {problem} The dimensions are (batch, heads, tokens, head_dim).")


def check_terms(terms: Sequence[Term], q: Tensor) -> None:
    """Raise InputError if these are not terms, or if values do not broadcast to [B, H, Nq, values of a query]."""
    if not isinstance(terms, tuple | list) or not all(
        isinstance(term, Term) and isinstance(term.values, Tensor) and isinstance(term.label, Label) for term in terms
    ):
        raise InputError(f"terms={shown(terms)} must be a list of Term(values, label), with a tensor and a Label each.")
    for term in terms:
        shape, num_values = tuple(term.values.shape), term.label.num_values
        fits = len(shape) == 4 and shape[3] == num_values
        if not fits or any(size not in (1, full) for size, full in zip(shape, q.shape[:3], strict=False)):
            raise InputError(
                f"A term of {term.label} has values of shape {list(shape)}; they must be [batch or 1, heads or 1, "
                f"queries or 1, values] = [{q.shape[0]} or 1, {q.shape[1]} or 1, {q.shape[2]} or 1, {num_values}]."
            )
        if not torch.compiler.is_compiling():
            term.label.check(term.values)
