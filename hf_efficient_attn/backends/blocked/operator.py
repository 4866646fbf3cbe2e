"""The blocked backend as custom operators, opaque to `torch.compile` and `torch.export`: there are no graph breaks."""

from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.backends.blocked import execute
from hf_efficient_attn.backends.kernels import empty_output, wide_dtype
from hf_efficient_attn.errors import UnsupportedBackendError
from hf_efficient_attn.layout.autocast import autocast_off
from hf_efficient_attn.layout.call_text import read_call
from hf_efficient_attn.layout.host_copies import as_they_are
from hf_efficient_attn.layout.onnx import refuse_operator

# they look at masks on the host, which a CUDA graph cannot replay
TAGS = (torch.Tag.cudagraph_unsafe,)


@torch.library.custom_op("hf_efficient_attn::blocked_attention", mutates_args=(), tags=TAGS)
def blocked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    masks: list[Tensor | None],
    term_values: list[Tensor],
    sinks: Tensor | None,
    seed: Tensor | None,
    query_start: Tensor | None,
    call_text: str,
    query_offset: int,
    softcap: float | None,
    scale: float,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    """Return out [B, H, Nq, Dv] and lse [B, H, Nq].

    Args:
        masks: the tensors of the token mask.
        term_values: the values of the terms whose labels are in the call text.
        seed: int64 scalar on the CPU, needed with dropout.
        query_start: int64 scalar that replaces `query_offset`.
        call_text: as `write_call_text` writes it.
    """
    settings = (call_text, query_offset, softcap, scale, dropout)
    call = read_call(q, k, v, masks, term_values, sinks, query_start, *settings)
    return execute.forward(q, k, v, call, _number(seed))


@torch.library.custom_op("hf_efficient_attn::blocked_attention_backward", mutates_args=(), tags=TAGS)
def blocked_attention_backward(
    grad: Tensor,
    d_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    masks: list[Tensor | None],
    term_values: list[Tensor],
    sinks: Tensor | None,
    seed: Tensor | None,
    query_start: Tensor | None,
    call_text: str,
    query_offset: int,
    softcap: float | None,
    scale: float,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Return the gradients of q, k, v, and of the values of each term and the sinks, if there are any.

    grad, d_lse: the gradients of output and log-sum-exp.
    out, lse: those of the whole rows. Where the keys of a row are computed in several calls, the outputs join by lse;
        given the joined ones, each call returns its share of the gradients, which add up.
    """
    settings = (call_text, query_offset, softcap, scale, dropout)
    call = read_call(q, k, v, masks, term_values, sinks, query_start, *settings)
    # backward() within autocast must not round gradients more than the scores were rounded
    with autocast_off(q.device.type):
        return execute.backward(grad, d_lse, q, k, v, out, lse, call, _number(seed))


def _number(seed: Tensor | None) -> int:
    return 0 if seed is None else int(seed)


@blocked_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    refuse_operator("blocked", next(setting for setting in rest if isinstance(setting, str)))
    return empty_output(q, v, q.dtype), q.new_empty(q.shape[:3], dtype=wide_dtype(q.dtype))


@blocked_attention_backward.register_fake
def _(
    grad: Tensor,
    d_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    masks: list[Tensor | None],
    term_values: list[Tensor],
    sinks: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    learned = [*term_values, *([] if sinks is None else [sinks])]
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), [torch.empty_like(each) for each in learned]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, masks, term_values, sinks, seed, query_start, *ctx.settings = inputs
    out, lse = output
    # no zeros for an lse that nothing was computed from: with them the fused kernel could not be used
    ctx.set_materialize_grads(False)
    kept = [as_they_are(mask) for mask in masks]
    ctx.num_masks = len(kept)
    ctx.save_for_backward(q, k, v, out, lse, sinks, seed, query_start, *kept, *term_values)


def _backward(ctx: Any, grad: Tensor | None, d_lse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse, sinks, seed, query_start, *rest = ctx.saved_tensors
    grad = torch.zeros_like(out) if grad is None else grad
    masks, term_values = rest[: ctx.num_masks], rest[ctx.num_masks :]
    dq, dk, dv, d_learned = blocked_attention_backward(
        grad, d_lse, q, k, v, out, lse, masks, term_values, sinks, seed, query_start, *ctx.settings
    )
    d_sinks = None if sinks is None else d_learned.pop()
    return dq, dk, dv, None, d_learned, d_sinks, *[None] * 7


def _no_double_backward(ctx: Any, *grads: Any) -> None:
    raise UnsupportedBackendError(
        "The blocked backend has no second derivative (create_graph=True, torch.autograd.functional.hessian, ...). Use "
        "backend='reference', which keeps all scores in memory."
    )


blocked_attention.register_autograd(_backward, setup_context=_setup_context)
blocked_attention_backward.register_autograd(_no_double_backward)
