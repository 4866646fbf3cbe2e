"""CUDA pretended on a machine without one: tensors that say cuda:0, hold CPU data, and refuse what CUDA refuses.

It finds operations that mix devices, operators that exist on CPUs only, and how often a computation waits for the
device (`Waits`). It says nothing about numbers or speed on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from device_waits import INDEXED, PACKAGE, WAITING, Waits, is_sized_by_values, waits
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)
COPIES = {aten.copy_, aten._to_copy, aten._copy_from_and_resize}


class PretendedTensor(Tensor):
    """A tensor on cuda:0, as far as anyone can ask."""

    data_on_cpu: Tensor

    @staticmethod
    def __new__(cls, data: Tensor) -> PretendedTensor:
        # torch's own machinery sees a CPU tensor, since without CUDA there is no other
        wrapped = Tensor._make_wrapper_subclass(
            cls, data.size(), strides=data.stride(), storage_offset=data.storage_offset(), dtype=data.dtype
        )
        wrapped.data_on_cpu = data
        return wrapped

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(function, args, kwargs or {})

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PretendedTensor({self.data_on_cpu!r})"

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def untyped_storage(self) -> Any:
        return self.data_on_cpu.untyped_storage()

    def tolist(self) -> Any:
        waits.note("tolist")
        return self.data_on_cpu.tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")

    def cpu(self, *args: Any, **kwargs: Any) -> Tensor:
        return move(self, torch.device("cpu"))

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        return moved_to(self, args, kwargs)


def is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def unwrap(value: Any) -> Any:
    return value.data_on_cpu if isinstance(value, PretendedTensor) else value


def wrap(value: Any) -> Any:
    is_plain = isinstance(value, Tensor) and not isinstance(value, PretendedTensor)
    return PretendedTensor(value) if is_plain else value


class Moved(torch.autograd.Function):
    """A copy to the other device, whose gradient goes back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, is_to_cuda: bool) -> Tensor:
        ctx.is_to_cuda = is_to_cuda
        return PretendedTensor(tensor.detach().clone()) if is_to_cuda else unwrap(tensor).clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return (unwrap(grads[0]) if ctx.is_to_cuda else wrap(grads[0])), None


def move(tensor: Tensor, device: torch.device) -> Tensor:
    if is_cuda(device) == isinstance(tensor, PretendedTensor):
        return tensor
    waits.note("copy to the device" if is_cuda(device) else "copy to the host")
    return Moved.apply(tensor, is_cuda(device))


_plain_to = Tensor.to


def moved_to(tensor: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """`Tensor.to`, with any of its forms of arguments."""
    rest, device = [], kwargs.pop("device", None)
    kwargs.pop("non_blocking", None)
    for argument in args:
        if isinstance(argument, torch.device | str):
            device = argument
        elif isinstance(argument, Tensor):
            device = argument.device
            rest.append(argument.dtype)
        else:
            rest.append(argument)
    tensor = tensor if device is None else move(tensor, torch.device(device))
    return _plain_to(tensor, *rest, **kwargs) if rest or kwargs else tensor


def dispatch(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator on the data behind the tensors, if CUDA would run it."""
    if function.namespace == PACKAGE:
        with DispatchMode():
            return OPERATORS[function._opname](*args, **kwargs)
    leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    pretended = [leaf for leaf in leaves if isinstance(leaf, PretendedTensor)]
    check(function, leaves, pretended, args, kwargs)
    # autograd takes the device of a pretended tensor for the CPU; who wants to move one calls `to` or `cpu`
    is_result_cuda = bool(pretended) or is_cuda(kwargs.get("device"))
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    if function.overloadpacket in COPIES and pretended and not isinstance(leaves[0], PretendedTensor):
        is_result_cuda = False
    result = function(*tree_map(unwrap, args), **tree_map(unwrap, kwargs))
    if not is_result_cuda:
        return result
    # an operator in place returns the tensor that it was given
    for leaf in pretended:
        if result is leaf.data_on_cpu:
            return leaf
    return tree_map(wrap, result)


def check(
    function: Any, leaves: list[Tensor], pretended: list[PretendedTensor], args: Any, kwargs: dict[str, Any]
) -> None:
    """Raise RuntimeError for what CUDA refuses, and count what makes the host wait."""
    if not pretended:
        return
    packet, name = function.overloadpacket, str(function)
    if "for_cpu" in name:
        raise RuntimeError(f"{name} exists on CPUs only.")
    if packet in WAITING:
        waits.note(name)
    if is_sized_by_values(packet, args, kwargs):
        waits.note(f"{name}, whose result has a size by values")
    on_host = [leaf for leaf in leaves if not isinstance(leaf, PretendedTensor) and leaf.dim() > 0]
    if packet in COPIES:
        if len(leaves) > len(pretended):
            waits.note("copy between devices")
    elif on_host and packet in INDEXED and isinstance(leaves[0], PretendedTensor):
        waits.note("index copied to the device")
    elif on_host:
        raise RuntimeError(
            f"Expected all tensors on the same device: {name}, {[tuple(t.shape) for t in on_host]} on CPU."
        )


class DispatchMode(TorchDispatchMode):
    """Makes tensors on the pretended device where one is asked for by `device=`."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(function, args, kwargs or {})


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`scaled_dot_product_attention` as its formula says it, since the operator behind it is another on each device."""
    if enable_gqa:
        key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return torch.nn.functional.dropout(torch.softmax(scores, -1), dropout_p) @ value


_plain_tensor, _plain_as_tensor, _plain_generator = torch.tensor, torch.as_tensor, torch.Generator


def tensor(data: Any, *, device: Any = None, **options: Any) -> Tensor:
    """`torch.tensor`, which copies from the host."""
    made = _plain_tensor(unwrap(data), **options)
    if not is_cuda(device):
        return made
    if made.numel():
        waits.note("copy to the device")
    return PretendedTensor(made)


def as_tensor(data: Any, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
    """`torch.as_tensor`, which copies what is not on the device."""
    if not isinstance(data, Tensor):
        return tensor(data, dtype=dtype, device=device)
    found = data if device is None else move(data, torch.device(device))
    return found if dtype is None else found.to(dtype)


def new_tensor(like: Tensor, data: Any, **options: Any) -> Tensor:
    return tensor(data, **{"device": like.device, "dtype": like.dtype, **options})


def generator(device: Any = "cpu") -> torch.Generator:
    return _plain_generator("cpu" if is_cuda(device) else device)


OPERATORS: dict[str, Callable[..., Any]] = {}


def _register() -> None:
    from hf_efficient_attn.backends.operator import attention_backward_operator, attention_operator
    from hf_efficient_attn.layout.chosen import block_choice, token_choice
    from hf_efficient_attn.layout.dense import pairs

    choices = (block_choice.choose_blocks, token_choice.choose_tokens)
    for made in (attention_operator, attention_backward_operator, *choices, pairs.pairs_operator):
        OPERATORS[made._name] = made._init_fn


@contextmanager
def pretended_cuda() -> Iterator[Waits]:
    """Have a device cuda:0 within the block, on which only tensors by `on_cuda` and their results are."""
    _register()
    waits.clear()
    patches = [
        patch("torch.cuda._lazy_init", lambda: None),
        patch("torch.tensor", tensor),
        patch("torch.as_tensor", as_tensor),
        # the state of its generator is known to the host
        patch("torch.cuda.get_rng_state", lambda device: torch.get_rng_state()),
        patch("torch.cuda.set_rng_state", lambda state, device: torch.set_rng_state(state)),
        patch("torch.Generator", generator),
        patch("hf_efficient_attn.backends.dense_kernel.scaled_dot_product_attention", sdpa),
        patch("hf_efficient_attn.attention.dense_matrix.scaled_dot_product_attention", sdpa),
        patch("torch.nn.functional.scaled_dot_product_attention", sdpa),
        patch.object(Tensor, "to", lambda self, *args, **kwargs: moved_to(self, args, kwargs)),
        patch.object(PretendedTensor, "new_tensor", new_tensor, create=True),
    ]
    for each in patches:
        each.start()
    try:
        with DispatchMode():
            yield waits
    finally:
        for each in patches:
            each.stop()


def on_cuda(given: Tensor) -> PretendedTensor:
    """Return a copy on the pretended device, a leaf."""
    return PretendedTensor(given.detach().clone())


def move_model(model: torch.nn.Module) -> torch.nn.Module:
    """Move parameters and buffers in place; tied ones stay tied."""
    moved: dict[int, Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, given in tensors.items():
                if given is not None:
                    own = moved.setdefault(id(given), on_cuda(given).requires_grad_(given.requires_grad))
                    # what isinstance asks of tensors that are no plain ones
                    own._is_param = isinstance(given, torch.nn.Parameter)
                    tensors[name] = own
    return model
