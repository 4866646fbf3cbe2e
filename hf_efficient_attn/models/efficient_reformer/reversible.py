"""Reversible layers: the backward pass recomputes their saved tensors, from the last layer to the first.

Each layer has two steps, which add a function of one stream to the other: y₁ = x₁ + Attention(x₂), y₂ = x₂ + MLP(y₁).
The inputs follow from the outputs: x₂ = y₂ − MLP(y₁), x₁ = y₁ − Attention(x₂). So a stack of layers keeps only its last
two streams and, for every layer, the buckets of its hashing and the random state of its dropout.

Autograd sees ordinary operations, but saves promises instead of tensors. When the backward pass asks for the first
saved tensor of a step, the step is recomputed from the streams after it. As with checkpointing, gradients reach
parameters in the usual way and once, with `backward`, `torch.autograd.grad` and the hooks of DDP and FSDP.

Source: Gomez et al. (arXiv:1707.04585); Kitaev et al. (arXiv:2001.04451), section 3.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from hf_efficient_attn.errors import EfficientAttentionError

Function = Callable[[Tensor], Tensor]


class Promise:
    """A tensor that the backward pass needs: the stretch it belongs to, and its value as soon as this is known."""

    def __init__(self, stretch: "Stretch") -> None:
        self.stretch = stretch
        self.value: Tensor | None = None


@dataclass(eq=False)
class Surroundings:
    """The random state and the autocast settings of a computation, with which it can be repeated."""

    device: torch.device
    autocast: dict[str, tuple[bool, torch.dtype]]
    random_states: tuple[Tensor, Tensor | None]

    @classmethod
    def of(cls, states: Tensor) -> "Surroundings":
        """Return the current ones, with random states also in evaluation, because dropout may be left on."""
        kinds = {"cpu", states.device.type} - {"meta"}
        autocast = {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds}
        device = states.device
        own = None if device.type in ("cpu", "meta") else torch.get_device_module(device).get_rng_state(device)
        return cls(device, autocast, (torch.get_rng_state(), own))

    @contextmanager
    def again(self) -> Iterator[None]:
        """Restore them, and on exit the current ones."""
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            for kind, (enabled, dtype) in self.autocast.items():
                stack.enter_context(torch.autocast(kind, dtype, enabled))
            on_cpu, own = self.random_states
            devices = [] if own is None else [self.device]
            kind = "cuda" if own is None else self.device.type
            stack.enter_context(torch.random.fork_rng(devices, device_type=kind))
            torch.set_rng_state(on_cpu)
            if own is not None:
                torch.get_device_module(self.device).set_rng_state(own, self.device)
            yield


@dataclass(eq=False)
class Stretch:
    """Tokens of a step that are computed at once.

    Attributes:
        tokens: the slice of these tokens in the sequence.
        promises: the tensors that autograd has saved, in this order, by weak reference: autograd may release them.
        result: what the step adds to these tokens, once it has been recomputed.
    """

    step: "Step"
    tokens: slice
    surroundings: Surroundings
    needs_grad: bool
    promises: list[weakref.ref[Promise]] = field(default_factory=list)
    result: Tensor | None = None

    def promise(self, saved: Tensor) -> Promise:
        """Return a promise in place of a tensor that autograd saves; the tensor itself is not kept."""
        del saved
        promise = Promise(self)
        self.promises.append(weakref.ref(promise))
        return promise

    def compute_again(self, states: Tensor) -> None:
        """Recompute the promised tensors and the result from the stream that is the input of this step."""
        self.step.refuse_other_weights()
        found: list[Tensor] = []
        read = states[:, self.tokens].detach().requires_grad_(self.needs_grad)
        with self.surroundings.again(), saved_tensors_hooks(lambda saved: found.append(saved.detach()), _refuse):
            result = self.step.function(read)
        if len(found) != len(self.promises):
            raise EfficientAttentionError(
                f"A reversible layer saved {len(self.promises)} tensors in the forward pass, but {len(found)} when the "
                "backward pass recomputed it. Do not change hooks or settings, such as the attention implementation, "
                "between the two."
            )
        for reference, value in zip(self.promises, found, strict=True):
            promise = reference()
            if promise is not None:
                promise.value = value
        self.result = result.detach()


@dataclass(eq=False)
class Step:
    """Half a layer: a function of one stream that is added to the other.

    Attributes:
        weights: the parameters of the function, and the versions of these tensors.
    """

    number: int
    function: Function
    weights: list[tuple[Tensor, int]]
    stretches: list[Stretch] = field(default_factory=list)

    def refuse_other_weights(self) -> None:
        """Raise EfficientAttentionError if weights have changed since the forward pass, as autograd does elsewhere."""
        if any(weight._version != version for weight, version in self.weights):
            raise EfficientAttentionError(
                f"The weights of layer {self.number // 2} of a Reformer have changed since its forward pass, for "
                "example by an optimizer step, so the backward pass would recompute the layer with other weights. "
                "Repeat the forward pass first."
            )


class ReversibleStack:
    """The steps of a forward pass, which the backward pass undoes.

    Steps with even numbers compute from the second stream and add to the first, the others the other way round.
    """

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.streams: list[Tensor] = []
        # what the last layer has returned, and the versions of its tensors
        self.left: list[tuple[Tensor, int]] = []
        # by number of steps, the streams after these steps that hooks have replaced by others
        self.replaced: dict[int, list[Tensor]] = {}

    def run(
        self, function: Function, states: Tensor, modules: Sequence[nn.Module] = (), stretch_tokens: int = 0
    ) -> Tensor:
        """Return function(states), [B, T, hidden_size], and record it as the next step.

        Args:
            modules: the modules whose weights the function uses.
            stretch_tokens: how many tokens are computed at once, if the function computes each token by itself; 0: all.
        """
        weights = [(weight, weight._version) for module in modules for weight in module.parameters()]
        step = Step(len(self.steps), function, weights)
        self.steps.append(step)
        results = []
        for tokens in stretches_of(states.shape[1], stretch_tokens):
            stretch = Stretch(step, tokens, Surroundings.of(states), states.requires_grad)
            step.stretches.append(stretch)
            with saved_tensors_hooks(stretch.promise, self._kept):
                results.append(function(states[:, tokens]))
        return results[0] if len(results) == 1 else torch.cat(results, 1)

    def leave(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """Return the streams after a layer, and remember them and their versions."""
        self.left = [(stream, stream._version) for stream in (first, second)]
        return first, second

    def enter(self, first: Tensor, second: Tensor) -> None:
        """Continue with these streams; if hooks have replaced the streams of the layer before, keep those as well.

        Raises:
            EfficientAttentionError: a hook has changed the streams of the layer before in place.
        """
        left, self.left = self.left, []
        if any(stream._version != version for stream, version in left):
            raise EfficientAttentionError(
                f"A hook has written into the output of layer {len(self.steps) // 2 - 1} of a Reformer, from which the "
                "backward pass recomputes the layer. Let the hook return new tensors instead."
            )
        own = [stream for stream, _ in left]
        if own and (first is not own[0] or second is not own[1]):
            self.replaced[len(self.steps)] = [stream.detach() for stream in own]

    def close(self, first: Tensor, second: Tensor) -> None:
        """Keep the two streams after the last step."""
        self.enter(first, second)
        self.streams = [first.detach(), second.detach()]

    def _kept(self, promise: Promise) -> Tensor:
        """Return a promised tensor; if necessary recompute steps, the last one first."""
        if promise.value is None:
            step = promise.stretch.step
            self.streams = self.replaced.pop(len(self.steps), self.streams)
            while self.steps[-1] is not step:
                self._undo(self.steps.pop())
                self.streams = self.replaced.pop(len(self.steps), self.streams)
            promise.stretch.compute_again(self.streams[1 - step.number % 2])
        if promise.value is None:
            raise EfficientAttentionError("A reversible layer has lost a tensor that the backward pass needs.")
        return promise.value

    def _undo(self, step: Step) -> None:
        """Compute the stream before a step."""
        written = step.number % 2
        for stretch in step.stretches:
            if stretch.result is None:
                stretch.compute_again(self.streams[1 - written])
        added = torch.cat([stretch.result for stretch in step.stretches], 1)  # type: ignore[misc]
        self.streams[written] = self.streams[written] - added
        for stretch in step.stretches:
            stretch.result = None


def stretches_of(tokens: Any, stretch_tokens: int) -> list[slice]:
    """Return slices of `stretch_tokens` tokens each; 0: one slice of all tokens.

    >>> stretches_of(5, 2)
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    if not stretch_tokens or stretch_tokens >= tokens:
        return [slice(0, None)]
    return [slice(start, min(start + stretch_tokens, tokens)) for start in range(0, tokens, stretch_tokens)]


def _refuse(_: Any) -> Tensor:
    raise EfficientAttentionError("The recomputation of a reversible layer has no backward pass of its own.")


# The two streams that a reversible layer passes to the next, which mixed precision must not cast.
#
# FSDP's mixed precision casts every tensor argument of a wrapped layer to the dtype of its weights. Streams in bfloat16
# cannot be recomputed: the backward pass would get other values than the forward pass had. So both are passed in one
# object, which is neither a tensor nor a container that FSDP opens (as it opens dataclasses). FSDP also reduces the
# gradients of a layer once the gradients of its arguments are known; for this an empty tensor is passed along with the
# streams.


class Streams:
    """The input of a layer: two streams [B, T, hidden_size]; attention adds to the first, the MLP to the second."""

    def __init__(self, first: Tensor, second: Tensor) -> None:
        self.first, self.second = first, second

    def to(self, *args: Any, **kwargs: Any) -> "Streams":
        """Return both on a device, for models whose layers are on several devices."""
        return Streams(self.first.to(*args, **kwargs), self.second.to(*args, **kwargs))

    def mark(self) -> Tensor | None:
        """Return an empty tensor that requires a gradient if the streams do; None while compiling."""
        if torch.compiler.is_compiling():
            return None
        return self.second.new_zeros(0).requires_grad_(self.second.requires_grad)

    def opened(self, recorded: Tensor, mark: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return both streams; the gradient of `mark` is known once the gradient of the second stream is.

        recorded: the first stream as the tensor argument of the layer; FSDP may have cast it.

        Raises:
            EfficientAttentionError: `recorded` is another tensor.
        """
        if recorded is not self.first and _differ(recorded, self.first):
            raise EfficientAttentionError(
                "A hook has replaced `states`, but a layer of a Reformer only records them, and uses `streams`. Change "
                "the output of the layer before, or the embeddings, with a forward hook instead."
            )
        if mark is None or not mark.requires_grad:
            return self.first, self.second
        return self.first, _Marked.apply(self.second, mark)


def _differ(one: Tensor, other: Tensor) -> bool:
    if (one.dtype, one.device) != (other.dtype, other.device):
        return False
    return one.data_ptr() != other.data_ptr()


class _Marked(torch.autograd.Function):
    """Return `states` unchanged; the gradient of `mark` is zero, and known once the gradient of the result is."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, mark: Tensor) -> Tensor:
        ctx.mark = (mark.shape, mark.dtype)
        return states.view_as(states)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        shape, dtype = ctx.mark
        return grads[0], grads[0].new_zeros(shape, dtype=dtype)
