"""The gathered backend as custom operators, opaque to `torch.compile` and `torch.export`: there are no graph breaks."""

from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.backends.gathered import execute
from hf_efficient_attn.backends.kernels import empty_output, wide_dtype
from hf_efficient_attn.errors import UnsupportedBackendError
from hf_efficient_attn.layout.autocast import autocast_off
from hf_efficient_attn.layout.call_text import read_call
from hf_efficient_attn.layout.chosen.chosen_text import read_chosen
from hf_efficient_attn.layout.host_copies import as_they_are
from hf_efficient_attn.layout.onnx import refuse_operator

# their tiles depend on what tensors say, which a CUDA graph cannot replay
TAGS = (torch.Tag.cudagraph_unsafe,)


@torch.library.custom_op("hf_efficient_attn::gathered_attention", mutates_args=(), tags=TAGS)
def gathered_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    masks: list[Tensor | None],
    chosen_tensors: list[Tensor | None],
    term_values: list[Tensor],
    sinks: Tensor | None,
    seed: Tensor | None,
    query_start: Tensor | None,
    call_text: str,
    chosen_text: str,
    query_offset: int,
    softcap: float | None,
    scale: float,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return out [B, H, Nq, Dv], lse [B, H, Nq], and which queries read themselves alone, bool, or an empty tensor.

    Args:
        masks: the tensors of the token mask.
        chosen_tensors, chosen_text: the tensors of the chosen keys, and what else they are, by `write_chosen_text`.
        term_values: the values of the terms whose labels are in the call text.
        seed: int64 scalar on the CPU, needed with dropout.
        query_start: int64 scalar that replaces `query_offset`.
        call_text: as `write_call_text` writes it.
    """
    settings = (call_text, query_offset, softcap, scale, dropout, read_chosen(chosen_text, chosen_tensors))
    call = read_call(q, k, v, masks, term_values, sinks, query_start, *settings)
    return execute.forward(q, k, v, call, _number(seed))


@torch.library.custom_op("hf_efficient_attn::gathered_attention_backward", mutates_args=(), tags=TAGS)
def gathered_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    alone: Tensor,
    masks: list[Tensor | None],
    chosen_tensors: list[Tensor | None],
    term_values: list[Tensor],
    sinks: Tensor | None,
    seed: Tensor | None,
    query_start: Tensor | None,
    call_text: str,
    chosen_text: str,
    query_offset: int,
    softcap: float | None,
    scale: float,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Return the gradients of q, k, v, and of the values of each term and the sinks, if there are any.

    If keys are queries of length 1, the gradient of q is that of both, and that of k is empty.
    """
    settings = (call_text, query_offset, softcap, scale, dropout, read_chosen(chosen_text, chosen_tensors))
    call = read_call(q, k, v, masks, term_values, sinks, query_start, *settings)
    # backward() within autocast must not round gradients more than the scores were rounded
    with autocast_off(q.device.type):
        return execute.backward(grad, q, k, v, out, lse, alone, call, _number(seed))


def _number(seed: Tensor | None) -> int:
    return 0 if seed is None else int(seed)


@gathered_attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    masks: list[Tensor | None],
    chosen_tensors: list[Tensor | None],
    term_values: list[Tensor],
    sinks: Tensor | None,
    seed: Tensor | None,
    query_start: Tensor | None,
    call_text: str,
    chosen_text: str,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    refuse_operator("gathered", call_text)
    reads_self_last = read_chosen(chosen_text, chosen_tensors).reads_self_last
    alone = q.new_empty(q.shape[:3] if reads_self_last else (0,), dtype=torch.bool)
    return empty_output(q, v, q.dtype), q.new_empty(q.shape[:3], dtype=wide_dtype(q.dtype)), alone


@gathered_attention_backward.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    alone: Tensor,
    masks: list[Tensor | None],
    chosen_tensors: list[Tensor | None],
    term_values: list[Tensor],
    sinks: Tensor | None,
    seed: Tensor | None,
    query_start: Tensor | None,
    call_text: str,
    chosen_text: str,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    learned = [*term_values, *([] if sinks is None else [sinks])]
    dk = q.new_empty(0) if read_chosen(chosen_text, chosen_tensors).unit_keys else torch.empty_like(k)
    return torch.empty_like(q), dk, torch.empty_like(v), [torch.empty_like(each) for each in learned]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, masks, chosen_tensors, term_values, sinks, seed, query_start, *ctx.settings = inputs
    out, lse, alone = output
    ctx.mark_non_differentiable(lse, alone)
    kept = [as_they_are(mask) for mask in masks]
    ctx.num_lists = (len(kept), len(chosen_tensors))
    ctx.save_for_backward(q, k, v, out, lse, alone, sinks, seed, query_start, *kept, *chosen_tensors, *term_values)


def _backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Any, ...]:
    q, k, v, out, lse, alone, sinks, seed, query_start, *rest = ctx.saved_tensors
    num_masks, num_chosen = ctx.num_lists
    masks, chosen, term_values = rest[:num_masks], rest[num_masks:][:num_chosen], rest[num_masks + num_chosen :]
    dq, dk, dv, d_learned = gathered_attention_backward(
        grad, q, k, v, out, lse, alone, masks, chosen, term_values, sinks, seed, query_start, *ctx.settings
    )
    d_sinks = None if sinks is None else d_learned.pop()
    # torch takes a list of tensors for a list, and one with None in it for a single argument
    no_gradient = None if any(each is None for each in chosen) else [None] * num_chosen
    return dq, dk if dk.ndim == q.ndim else None, dv, None, no_gradient, d_learned, d_sinks, *[None] * 8


def _no_double_backward(ctx: Any, *grads: Any) -> None:
    raise UnsupportedBackendError(
        "The gathered backend has no second derivative (create_graph=True, torch.autograd.functional.hessian, ...). "
        "Use backend='reference', which keeps all scores in memory."
    )


gathered_attention.register_autograd(_backward, setup_context=_setup_context)
gathered_attention_backward.register_autograd(_no_double_backward)
