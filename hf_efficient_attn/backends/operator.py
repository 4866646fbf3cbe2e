"""The backends `blocked`, `gathered` and `flash` with gradients: an autograd function, and operators for tracing.

The operators are opaque to `torch.compile` and `torch.export`, so that there are no graph breaks. They take the call as
text and tensors; the autograd function takes the call itself.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.backends.blocked import execute as blocked
from hf_efficient_attn.backends.flash import execute as flash
from hf_efficient_attn.backends.gathered import execute as gathered
from hf_efficient_attn.backends.kernels import empty_output, wide_dtype
from hf_efficient_attn.errors import UnsupportedBackendError
from hf_efficient_attn.layout.call import AttentionCall
from hf_efficient_attn.layout.grouped_keys import read_selected_keys, write_chosen_text
from hf_efficient_attn.layout.onnx import refuse_operator
from hf_efficient_attn.layout.operator_args import read_call, write_call_text
from hf_efficient_attn.layout.token_mask import TokenMask
from hf_efficient_attn.layout.tracing import autocast_off
from hf_efficient_attn.layout.transfer import snapshot

EXECUTE: dict[str, Any] = {"blocked": blocked, "flash": flash, "gathered": gathered}
# the operators read masks on the host, which a CUDA graph cannot replay
TAGS = (torch.Tag.cudagraph_unsafe,)


def attend(
    q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, need_lse: bool = True, name: str = ""
) -> tuple[Tensor, Tensor | None]:
    """Return output and lse, which is never None; see `Backend`.

    name: the name of the backend that calls this.

    Dropout is drawn from torch's global generator, once per call.
    """
    seed = torch.randint(2**62, (), dtype=torch.int64) if call.dropout > 0.0 else None
    # only traced programs have their query offset in a tensor
    if is_traced(q) or call.query_start is not None:
        out, lse, _ = attention_operator(q, k, v, *_arguments(call, seed), name)
        return out, lse if call.lse_needs_grad else lse.detach()
    learned = [term.values for term in call.terms] if call.terms else []
    learned = learned if call.sinks is None else [*learned, call.sinks]
    needs_grad = q.requires_grad or k.requires_grad or v.requires_grad
    needs_grad = needs_grad or (len(learned) > 0 and any(each.requires_grad for each in learned))
    number = 0 if seed is None else int(seed)
    if needs_grad and torch.is_grad_enabled():
        out, lse = _Attention.apply(call, name, number, q, k, v, *learned)  # type: ignore[no-untyped-call]
        return out, lse if call.lse_needs_grad else lse.detach()
    out, lse, *_ = EXECUTE[name].forward(q, k, v, call, number)
    return out, lse


def is_traced(q: Tensor) -> bool:
    """Return whether a compiler, a dispatch mode (such as fake tensors) or a subclass must see one operator."""
    return torch.compiler.is_compiling() or type(q) is not Tensor or torch._C._len_torch_dispatch_stack() > 0


class _Attention(torch.autograd.Function):
    """A call in eager mode; the last arguments are the values of its terms, and its sinks."""

    @staticmethod
    def forward(
        ctx: Any, call: AttentionCall, name: str, seed: int, q: Tensor, k: Tensor, v: Tensor, *learned: Tensor
    ) -> tuple[Tensor, Tensor]:
        out, lse, alone = _forward(q, k, v, call, name, seed)
        # an lse that was not used gets the gradient None, not zeros, with which the fused kernel could not be used
        ctx.set_materialize_grads(False)
        masks = [snapshot(mask) for mask in call.tokens.tensors]
        tensors = [*masks, *([] if call.chosen is None else call.chosen.tensors), *learned]
        # all tensors are saved, and the call holds none, for checkpointing and for saved-tensor hooks
        ctx.call, ctx.name, ctx.seed = _with_tensors(call, [None] * len(tensors)), name, seed
        ctx.save_for_backward(q, k, v, out, lse, alone, *tensors)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, d_lse: Tensor | None) -> tuple[Any, ...]:
        q, k, v, out, lse, alone, *tensors = ctx.saved_tensors
        call = _with_tensors(ctx.call, tensors)
        grad = torch.zeros_like(out) if grad is None else grad
        arguments = (grad, d_lse, q, k, v, out, lse, alone, call, ctx.name, ctx.seed)
        if torch.is_grad_enabled():
            dq, dk, dv, *d_learned = _Gradients.apply(*arguments)  # type: ignore[no-untyped-call]
        else:
            dq, dk, dv, *d_learned = _backward(*arguments)
        return None, None, None, dq, dk if dk.ndim == q.ndim else None, dv, *d_learned


class _Gradients(torch.autograd.Function):
    """The gradients of a call under `create_graph=True`; differentiating them raises an error."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        ctx.backend = arguments[-2]
        return _backward(*arguments)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> None:
        raise _no_second_derivative(ctx.backend)


def _with_tensors(call: AttentionCall, tensors: Sequence[Tensor | None]) -> AttentionCall:
    """Return a call with other tensors, in this order: masks, selected keys, values of terms, sinks."""
    given: Iterator[Any] = iter(tensors)
    tokens = TokenMask(*(next(given) for _ in call.tokens.tensors))
    chosen: Any = call.chosen
    if chosen is not None:
        chosen = replace(chosen, **{name: next(given) for name in chosen.tensor_names})
    terms = tuple(replace(term, values=next(given)) for term in call.terms)
    return replace(call, tokens=tokens, chosen=chosen, terms=terms, sinks=next(given, None))


def _forward(
    q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, name: str, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return out, lse, and which queries attend only to themselves, bool [B, H, Nq] or empty."""
    if name == "gathered":
        return gathered.forward(q, k, v, call, seed)
    return *EXECUTE[name].forward(q, k, v, call, seed), q.new_empty(0, dtype=torch.bool)


def _backward(
    grad: Tensor,
    d_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    alone: Tensor,
    call: AttentionCall,
    name: str,
    seed: int,
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v, and of the values of each term and the sinks, if there are any.

    If keys are the queries scaled to length 1, the gradient of q is that of both, and that of k is empty.
    """
    # backward() within autocast must not round gradients more than the scores were rounded
    with autocast_off(q.device.type):
        if name == "gathered":
            dq, dk, dv, learned = gathered.backward(grad, q, k, v, out, lse, alone, call, seed)
        else:
            dq, dk, dv, learned = EXECUTE[name].backward(grad, d_lse, q, k, v, out, lse, call, seed)
    return dq, dk, dv, *learned


def _arguments(call: AttentionCall, seed: Tensor | None) -> tuple[Any, ...]:
    """Return the arguments of `attention_operator` after q, k and v."""
    layout, chosen = call.layout, call.chosen
    heads = (layout.first_head, layout.num_model_heads, layout.is_cross)
    labels, values = tuple(term.label for term in call.terms), [term.values for term in call.terms]
    tensors = (list(call.tokens.tensors), [] if chosen is None else chosen.tensors, values, call.sinks)
    text = write_call_text(layout.pattern, layout.layer, labels, *heads)
    texts = (text, "" if chosen is None else write_chosen_text(chosen))
    return *tensors, seed, call.query_start, *texts, layout.query_offset, call.softcap, call.scale, call.dropout


def _read_call(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[AttentionCall, int]:
    """Return the call and the seed that the arguments of an operator describe."""
    masks, chosen, values, sinks, seed, query_start, call_text, chosen_text, *numbers = arguments
    choice = read_selected_keys(chosen_text, chosen) if chosen_text else None
    call = read_call(q, k, v, masks, choice, values, sinks, query_start, call_text, *numbers)
    return call, 0 if seed is None else int(seed)


def _no_second_derivative(backend: str) -> UnsupportedBackendError:
    return UnsupportedBackendError(
        f"The {backend} backend has no second derivative (create_graph=True, torch.autograd.functional.hessian, ...). "
        "Use backend='reference', which keeps all scores in memory."
    )


@torch.library.custom_op("hf_efficient_attn::attention", mutates_args=(), tags=TAGS)
def attention_operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    masks: list[Tensor | None],
    chosen: list[Tensor | None],
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
    name: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return out [B, H, Nq, Dv], lse [B, H, Nq], and which queries attend only to themselves, bool or empty.

    Args:
        masks: the tensors of the token mask.
        chosen, chosen_text: the tensors of the selected keys, and the rest as `write_chosen_text` writes it; "": none.
        term_values: the values of the terms whose labels are in the call text.
        seed: int64 scalar on the CPU, needed with dropout.
        query_start: int64 scalar that replaces `query_offset`.
        call_text: pattern, layer, labels and heads, as `write_call_text` writes them.
        name: the name of the backend.
    """
    tensors, texts = (masks, chosen, term_values, sinks, seed, query_start), (call_text, chosen_text)
    call, number = _read_call(q, k, v, *tensors, *texts, query_offset, softcap, scale, dropout)
    return _forward(q, k, v, call, name, number)


@torch.library.custom_op("hf_efficient_attn::attention_backward", mutates_args=(), tags=TAGS)
def attention_backward_operator(
    grad: Tensor,
    d_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    alone: Tensor,
    masks: list[Tensor | None],
    chosen: list[Tensor | None],
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
    name: str,
) -> list[Tensor]:
    """Return the gradients that `_backward` returns."""
    tensors, texts = (masks, chosen, term_values, sinks, seed, query_start), (call_text, chosen_text)
    call, number = _read_call(q, k, v, *tensors, *texts, query_offset, softcap, scale, dropout)
    return list(_backward(grad, d_lse, q, k, v, out, lse, alone, call, name, number))


@attention_operator.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    chosen, call_text, chosen_text = rest[1], rest[6], rest[7]
    refuse_operator(rest[-1], call_text)
    attends_to_self_last = bool(chosen_text) and read_selected_keys(chosen_text, chosen).attends_to_self_last
    alone = q.new_empty(q.shape[:3] if attends_to_self_last else (0,), dtype=torch.bool)
    return empty_output(q, v, q.dtype), q.new_empty(q.shape[:3], dtype=wide_dtype(q.dtype)), alone


@attention_backward_operator.register_fake
def _(grad: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> list[Tensor]:
    _, _, _, _, chosen, term_values, sinks, _, _, _, chosen_text, *_ = rest
    is_shared = bool(chosen_text) and read_selected_keys(chosen_text, chosen).unit_keys
    learned = [*term_values, *([] if sinks is None else [sinks])]
    dk = q.new_empty(0) if is_shared else torch.empty_like(k)
    return [torch.empty_like(q), dk, torch.empty_like(v), *(torch.empty_like(each) for each in learned)]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, masks, chosen, term_values, sinks, seed, query_start, *ctx.settings = inputs
    out, lse, alone = output
    ctx.mark_non_differentiable(alone)
    ctx.set_materialize_grads(False)
    kept = [snapshot(mask) for mask in masks]
    ctx.num_lists = (len(kept), len(chosen))
    ctx.save_for_backward(q, k, v, out, lse, alone, sinks, seed, query_start, *kept, *chosen, *term_values)


def _operator_backward(ctx: Any, grad: Tensor | None, d_lse: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse, alone, sinks, seed, query_start, *rest = ctx.saved_tensors
    num_masks, num_chosen = ctx.num_lists
    masks, chosen, term_values = rest[:num_masks], rest[num_masks:][:num_chosen], rest[num_masks + num_chosen :]
    grad = torch.zeros_like(out) if grad is None else grad
    dq, dk, dv, *d_learned = attention_backward_operator(
        grad, d_lse, q, k, v, out, lse, alone, masks, chosen, term_values, sinks, seed, query_start, *ctx.settings
    )
    d_sinks = None if sinks is None else d_learned.pop()
    # torch takes a list of tensors as a list, but a list with None in it as a single argument
    no_gradient = None if any(each is None for each in chosen) else [None] * num_chosen
    return dq, dk if dk.ndim == q.ndim else None, dv, None, no_gradient, d_learned, d_sinks, *[None] * 9


def _operator_second_backward(ctx: Any, *grads: Any) -> None:
    raise _no_second_derivative(ctx.name)


def _keep_name(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.name = inputs[-1]


attention_operator.register_autograd(_operator_backward, setup_context=_setup_context)
attention_backward_operator.register_autograd(_operator_second_backward, setup_context=_keep_name)
