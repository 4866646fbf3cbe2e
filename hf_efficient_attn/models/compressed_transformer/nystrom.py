"""Nyströmformer: attention through landmarks, which are means of queries and of keys over segments of a sequence.

    F = softmax(Q K̃ᵀ),  A = softmax(Q̃ K̃ᵀ),  B = softmax(Q̃ Kᵀ),  out = F A⁺ (B V) + conv(V)

with Q and K divided by D^¼ each, m landmarks Q̃ and K̃, A⁺ by six steps of an iteration, and a convolution over the
values of each head. A layer computes 2 · n · m + m² scores per head instead of n². This approximates full attention,
which sequences of up to m tokens have.

There is no causal form: each landmark is a mean over a segment, and A⁺ mixes all of them.

Source: Xiong et al., "Nyströmformer" (arXiv:2102.03902). As in the authors' code, padding has no influence. We differ
in these points. Each sequence is divided into segments without its padding, and their lengths differ by at most one
token; the authors' code divides the padded length, which gives the same if m divides it and nothing is padded.
transformers' model divides the initial value of the iteration by one number for all sequences of a batch and all heads
(`inverse_scale="batch"`), so the output of a sequence depends on the other sequences of its batch; our default is one
number per sequence and head.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.utils.import_utils import is_tracing

from hf_efficient_attn.attention.layer import warn_of_weights
from hf_efficient_attn.layout.tracing import autocast_off
from hf_efficient_attn.models.mechanisms.linear import wide
from hf_efficient_attn.models.mechanisms.sequences import MechanismAttention

from .mechanism import zeroed

STEPS = 6


class NystromAttention(MechanismAttention):
    """Attention through landmarks."""

    reads_tokens = True

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.num_landmarks, size = config.num_landmarks, config.conv_kernel_size
        self.conv = None if size is None else HeadConvolution(self.num_heads, size, config.initializer_range)

    def read(
        self,
        states: Sequence[Tensor],
        real: Tensor | None,
        need_weights: bool,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        query, key, value = (self.heads(zeroed(each, real)) for each in states)
        dtype = query.dtype
        with autocast_off(query.device.type):
            query, key, values = (wide(each) for each in (query, key, value))
            query, key = (each * self.head_dim**-0.25 for each in (query, key))
            # a traced graph is for sequences of any length
            if not is_tracing(key) and key.shape[2] <= self.num_landmarks:
                read, gathered = all_read(query, key, real), None
            else:
                read, gathered = self._by_landmarks(query, key, real)
            weights = None
            if need_weights:
                warn_of_weights()
                weights = read if gathered is None else read @ gathered
            out = self.dropout(read) @ (values if gathered is None else gathered @ values)
        out = out.to(dtype)
        out = out if self.conv is None else out + self.conv(value)
        return out.transpose(1, 2).flatten(2), None if weights is None else weights.to(dtype)

    def _by_landmarks(self, query: Tensor, key: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return F, [R, H, L, m], and A⁺ B, [R, H, m, L]; for short sequences full attention, and the identity."""
        means, is_landmark, is_short = segments(query, real, self.num_landmarks)
        queries, keys = means @ query, means @ key
        # F, without the landmarks that a short sequence does not have
        read = (query @ keys.mT).masked_fill(~is_landmark[:, None, None], -torch.inf).softmax(-1)
        inverse = inverted(self._between(queries, keys, is_landmark), self.config.inverse_scale)
        gathered = queries @ key.mT
        if real is not None:
            gathered = gathered.masked_fill(~real[:, None, None], torch.finfo(gathered.dtype).min)
        gathered = inverse @ gathered.softmax(-1)
        # the landmarks of a short sequence are its tokens, and F is full attention
        return read, torch.where(is_short[:, None, None, None], means.expand_as(gathered), gathered)

    def _between(self, queries: Tensor, keys: Tensor, is_landmark: Tensor) -> Tensor:
        """Return A, [R, H, m, m]; a landmark that a sequence does not have attends to itself, and no other to it."""
        none = ~is_landmark
        scores = (queries @ keys.mT).masked_fill(none[:, None, None], -torch.inf)
        own = torch.eye(none.shape[1], dtype=torch.bool, device=none.device)
        return torch.where(none[:, None, :, None], own.to(scores.dtype), scores.softmax(-1))

    def costs(self, num_keys: int) -> str:
        landmarks = min(num_keys, self.num_landmarks)
        scores = num_keys**2 if landmarks == num_keys else 2 * num_keys * landmarks + landmarks**2
        return (
            f"A layer of a Nyströmformer computes {scores:,} scores per head for {num_keys:,} tokens (full attention "
            f"computes {num_keys**2:,}): between tokens and {landmarks:,} landmarks, and between landmarks."
        )


class HeadConvolution(nn.Module):
    """A convolution over the tokens with one kernel per head: [R, h, L, D] → the same."""

    def __init__(self, num_heads: int, size: int, std: float) -> None:
        super().__init__()
        self.size, self.std = size, std
        # the shape in transformers' Nyströmformer
        self.weight = nn.Parameter(torch.empty(num_heads, 1, size, 1))

    def initialize(self) -> None:
        """Initialize the kernels like the other matrices of the model."""
        init.normal_(self.weight, std=self.std)

    def forward(self, states: Tensor) -> Tensor:
        return nn.functional.conv2d(states, self.weight, padding=(self.size // 2, 0), groups=len(self.weight))


def all_read(query: Tensor, key: Tensor, real: Tensor | None) -> Tensor:
    """Return the weights of full attention of sequences, [R, H, L, L], with queries and keys divided by D^¼ each."""
    scores = query @ key.mT
    if real is not None:
        # a sequence of only padding keeps one key, which is 0
        counts = real.sum(1).clamp(min=1).view(-1, 1, 1, 1)
        scores = scores.masked_fill(torch.arange(real.shape[1], device=real.device) >= counts, -torch.inf)
    return scores.softmax(-1)


def segments(states: Tensor, real: Tensor | None, num_landmarks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the segments as matrices that compute means, which landmarks exist, and which sequences are short.

    Shapes: [R, 1, m, L], [R, m] and [R]. If n > m, a sequence of n tokens has m segments, and token i is in segment
    ⌊i · m / n⌋. If n ≤ m, the sequence is short and has n segments of one token.

    Args:
        states: [R, H, L, D]; only the shape, the dtype and the device are used.
    """
    batch_size, _, tokens, _ = states.shape
    index = torch.arange(tokens, device=states.device)
    if real is None:
        counts = torch.full((batch_size, 1), 1, device=states.device) * tokens
        real = torch.ones(batch_size, tokens, dtype=torch.bool, device=states.device)
    else:
        counts = real.sum(1, keepdim=True)
    numbers = torch.where(counts > num_landmarks, index * num_landmarks // counts.clamp(min=1), index)
    landmarks = torch.arange(num_landmarks, device=states.device)
    members = (numbers.unsqueeze(1) == landmarks[:, None]) & real.unsqueeze(1)
    means = members.to(states.dtype) / members.sum(2, keepdim=True).clamp(min=1)
    # a sequence of only padding keeps one landmark, whose key is 0
    is_landmark = landmarks < counts.clamp(min=1)
    return means.unsqueeze(1), is_landmark, (counts <= num_landmarks).squeeze(1)


def inverted(matrix: Tensor, scale: str) -> Tensor:
    """Return the pseudo-inverse of softmax matrices [R, H, m, m], approximated by six steps of an iteration.

    scale: the divisor of the initial value: the largest column sum of each matrix ("head") or of all ("batch").
    """
    largest = matrix.sum(-2, keepdim=True)
    largest = largest.amax(-1, keepdim=True) if scale == "head" else largest.amax()
    inverse = matrix.mT / largest
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    for _ in range(STEPS):
        product = matrix @ inverse
        inverse = inverse / 4 @ (13 * eye - product @ (15 * eye - product @ (7 * eye - product)))
    return inverse
