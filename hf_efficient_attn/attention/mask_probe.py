"""Packed documents that only a mask function of transformers knows, found by calling it for some pairs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

from hf_efficient_attn.errors import UnsupportedBackendError
from hf_efficient_attn.layout.transfer import bring, on_host

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

NOT_EXPRESSIBLE = (
    "This model's mask is not one of causal, bidirectional, sliding, chunked or packed attention with padding: it lets "
    "tokens read tokens that a pattern of positions cannot name (image tokens, prefixes, ...). The efficient attention "
    "cannot compute it: load the model with attn_implementation='sdpa' and without attention_pattern."
)


@dataclass(frozen=True)
class Probe:
    """Calls a mask function of transformers for some pairs of positions, never for all of them.

    Attributes:
        batch_size: the number of examples.
        positions: the positions of the keys, int [keys].
        use_vmap: whether the function takes one position at a time.
    """

    mask_function: MaskFunction
    batch_size: int
    positions: Tensor
    use_vmap: bool

    def checked_documents(self, is_causal: bool, local_size: int | None, asked: tuple[Any, ...]) -> Tensor | None:
        """Return the number of the document of each key, [batch, keys] from 1; None: all are one document.

        A key starts a document if it may not read the previous key. Chunks of chunked attention are documents, too.

        Args:
            asked: tensors that will be needed on the host, too, and are copied with the answers.

        Raises:
            UnsupportedBackendError: documents and distances do not describe the mask completely.
        """
        before, is_there = self.keys_before(1)
        follows = self.allowed(self.positions, self.positions[before]) | ~is_there
        documents = 1 + (~follows).cumsum(1)
        are_right = self.comparisons(documents, is_causal, local_size)
        if torch.compiler.is_compiling():
            for is_right in are_right:
                torch._assert_async(is_right, NOT_EXPRESSIBLE)
            return documents
        answers = torch.stack([follows.all(), *are_right])
        bring(answers, documents, *asked)
        are_one, *are_right = on_host(answers).tolist()
        if not all(are_right):
            raise UnsupportedBackendError(NOT_EXPRESSIBLE)
        return None if are_one else documents

    def comparisons(self, documents: Tensor, is_causal: bool, local_size: int | None) -> list[Tensor]:
        """Return whether documents and distances agree with the mask function, bool [] each.

        Neighbours suffice for the masks of transformers; for a model's own function, powers of two are probed.
        """
        are_right = []
        num_keys = self.positions.shape[0]
        distance = 1
        # in this order: an exported program would not take two tokens if it were asked for more
        while (distance == 1 or self.use_vmap) and distance < num_keys:
            place, is_there = self.keys_before(distance)
            before, after = self.positions[place], self.positions
            is_near = local_size is None or distance < local_size + (0 if is_causal else 1)
            same = (documents[:, place] == documents) & is_near
            ahead = torch.zeros_like(same) if is_causal else same
            is_right = (self.allowed(after, before) == same) & (self.allowed(before, after) == ahead)
            are_right.append((is_right | ~is_there).all())
            distance *= 2
        return are_right

    def keys_before(self, distance: int) -> tuple[Tensor, Tensor]:
        """Return the index of the key that lies so far before each, and whether there is one; both [keys].

        As many as there are keys: an exported program would not take texts that leave a single one of fewer.
        """
        index = torch.arange(self.positions.shape[0], device=self.positions.device) - distance
        return index.clamp(min=0), index >= 0

    def allowed(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return whether each query may read the key at the same index of `keys`, bool [batch, queries]."""
        batch = torch.arange(self.batch_size, device=keys.device)
        head = torch.zeros((), dtype=torch.long, device=keys.device)
        if not self.use_vmap:
            answer = self.mask_function(batch[:, None], head, queries[None], keys[None])
            return answer.expand(self.batch_size, keys.shape[0])
        one_example = torch.vmap(self.mask_function, in_dims=(None, None, 0, 0))
        with TransformGetItemToIndex():
            return torch.vmap(one_example, in_dims=(0, None, None, None))(batch, head, queries, keys)
