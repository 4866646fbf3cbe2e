"""CUDA pretended on a machine without one: tensors that say cuda:0, hold CPU data, and refuse what CUDA refuses.

It finds operations that mix devices, operators that exist on CPUs only, and how often a computation waits for the
device: for a number or a size that the host needs, and for every copy. It says nothing about numbers or speed on a GPU.
"""

from __future__ import annotations

import re
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)
COPIES = {aten.copy_, aten._to_copy, aten._copy_from_and_resize}
# take indices from the host
INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}
# whose answer is a number or a size that the host needs
NAMES = "_local_scalar_dense nonzero is_nonzero equal masked_select _unique2 unique_dim unique_consecutive bincount"
WAITING = {getattr(aten, name) for name in (*NAMES.split(), "linalg_inv_ex", "_linalg_check_errors")}
CALLERS = r"/(hf_efficient_attn|transformers)/(?!tests/)"


class Waits(Counter[str]):
    """How often each line of the package, or of transformers, waited for the device."""

    def note(self, what: str) -> None:
        frames = [frame for frame in traceback.extract_stack() if re.search(CALLERS, frame.filename)]
        place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "elsewhere"
        self[f"{place}: {what}"] += 1

    def of_package(self) -> Waits:
        """Return those that are not transformers' own."""
        return Waits({place: count for place, count in self.items() if "/transformers/" not in place})


waits = Waits()


class PretendedTensor(Tensor):
    """A tensor on cuda:0, as far as anyone can ask."""

    data_on_cpu: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: CUDA)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, data: Tensor) -> PretendedTensor:
        # torch's own machinery sees a CPU tensor, since without CUDA there is no other
        wrapped = Tensor._make_wrapper_subclass(
            cls, data.size(), strides=data.stride(), storage_offset=data.storage_offset(), dtype=data.dtype
        )
        wrapped.data_on_cpu = data
        return wrapped

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(function, args, kwargs or {})

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
        return moved_to(self, *args, **kwargs)

    def new_tensor(self, data: Any, **options: Any) -> Tensor:
        return tensor(data, **{"device": CUDA, "dtype": self.dtype, **options})


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


_plain_to, _plain_tensor = Tensor.to, torch.tensor


def moved_to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`Tensor.to`, with any of its forms of arguments."""
    if args and isinstance(args[0], Tensor):
        args = (args[0].device, args[0].dtype, *args[1:])
    device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
    tensor = tensor if device is None else move(tensor, device)
    return tensor if dtype is None else _plain_to(tensor, dtype)


def tensor(data: Any, *, device: Any = None, **options: Any) -> Tensor:
    """`torch.tensor`, which copies from the host."""
    made = _plain_tensor(unwrap(data), **options)
    return move(made, device) if is_cuda(device) and made.numel() else wrap(made) if is_cuda(device) else made


def as_tensor(data: Any, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
    """`torch.as_tensor`, which copies what is not on the device."""
    if not isinstance(data, Tensor):
        return tensor(data, dtype=dtype, device=device)
    return data.to(device or data.device, dtype or data.dtype)


def dispatch(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator on the data behind the tensors, if CUDA would run it."""
    if function.namespace == "hf_efficient_attn":
        with DispatchMode():
            return OPDEFS[function._schema.name]._init_fn(*args, **kwargs)
    leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    pretended = [leaf for leaf in leaves if isinstance(leaf, PretendedTensor)]
    if pretended:
        check(function, leaves, args, kwargs)
    # autograd takes the device of a pretended tensor for the CPU; who wants to move one calls `to` or `cpu`
    is_result_cuda = bool(pretended) or is_cuda(kwargs.get("device"))
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    if function.overloadpacket in COPIES and pretended and not isinstance(leaves[0], PretendedTensor):
        is_result_cuda = False
    result = function(*tree_map(unwrap, args), **tree_map(unwrap, kwargs))
    # an operator in place returns the tensor that it was given
    same = [leaf for leaf in pretended if result is leaf.data_on_cpu]
    return result if not is_result_cuda else same[0] if same else tree_map(wrap, result)


def check(function: Any, leaves: list[Tensor], args: Any, kwargs: dict[str, Any]) -> None:
    """Raise RuntimeError for what CUDA refuses, and count what makes the host wait."""
    packet, name = function.overloadpacket, str(function)
    if "for_cpu" in name:
        raise RuntimeError(f"{name} exists on CPUs only.")
    is_sized_by_values = packet in INDEXED and any(
        isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1]
    )
    if packet is aten.repeat_interleave:
        is_sized_by_values = isinstance(args[-1], Tensor) and kwargs.get("output_size") is None
    if packet in WAITING or is_sized_by_values:
        waits.note(name)
    plain = [leaf for leaf in leaves if not isinstance(leaf, PretendedTensor)]
    on_host = [tuple(leaf.shape) for leaf in plain if leaf.dim() > 0]
    if packet in COPIES and plain:
        waits.note("copy between devices")
    elif packet not in COPIES and on_host and packet in INDEXED and isinstance(leaves[0], PretendedTensor):
        waits.note("index copied to the device")
    elif packet not in COPIES and on_host:
        raise RuntimeError(f"Expected all tensors on the same device: {name}, {on_host} on CPU.")


class DispatchMode(TorchDispatchMode):
    """Makes tensors on the pretended device where one is asked for by `device=`."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(function, args, kwargs or {})


@contextmanager
def pretended_cuda() -> Iterator[Waits]:
    """Have a device cuda:0 within the block, on which only tensors by `on_cuda` and their results are."""
    waits.clear()
    with ExitStack() as stack:
        for name, function in {"cuda._lazy_init": lambda: None, "tensor": tensor, "as_tensor": as_tensor}.items():
            stack.enter_context(patch(f"torch.{name}", function))
        # the state of its generator is known to the host
        stack.enter_context(patch("torch.cuda.get_rng_state", lambda device: torch.get_rng_state()))
        stack.enter_context(patch("torch.cuda.set_rng_state", lambda state, device: torch.set_rng_state(state)))
        stack.enter_context(patch.object(Tensor, "to", moved_to))
        # of its operators, the one that is the same on every device
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.enter_context(DispatchMode())
        yield waits


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
